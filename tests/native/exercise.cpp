// Every operation kind of every kernel variant of this machine, for the sanitizers of `make sanitize`.
//
//   exercise MODE [PLANT]
//
// MODE `program` runs lists of operations by Program::run, whose team is OpenMP's. MODE `team` runs them by threads of
// the standard library: libgomp is not built with ThreadSanitizer, which therefore cannot see that its barriers order
// anything and reports races that are none. What is under test, the kernels and how a team shares
// out its work, is the same in both.
//
// Each buffer has exactly the bytes that the contract names, so that one element too many is seen. Results of 1 and 3
// threads must have the same bits. PLANT is a deliberate fault that a sanitizer must find: short, race, crooked.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "program.h"

using namespace kvist;

static std::string plant;
static bool by_program = true;

struct Random {
  uint64_t state = 42;
  uint32_t next() { state = state * 6364136223846793005ull + 1442695040888963407ull; return uint32_t(state >> 33); }
  float real() { return float(next() % 20001) / 10000.0f - 1.0f; }
  int64_t below(int64_t n) { return int64_t(next()) % n; }
};
static Random draw;

static uint16_t bf16(float x) { uint32_t u; std::memcpy(&u, &x, 4); return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16); }

// Memory of exactly `size` bytes, at a multiple of 64 as the package allocates it.
struct Bytes {
  size_t size;
  std::unique_ptr<uint8_t, void (*)(void*)> data;
  explicit Bytes(size_t n, int fill = 0) : size(n), data(nullptr, std::free) {
    void* p = nullptr;
    if (posix_memalign(&p, 64, n ? n : 1)) std::abort();
    data.reset((uint8_t*)p);
    std::memset(p, fill, n);
  }
  template <class T> T* as() const { return (T*)data.get(); }
};
static Bytes floats(int64_t n, float scale = 1, float offset = 0) {
  Bytes b(size_t(n) * 4);
  for (int64_t i = 0; i < n; ++i) b.as<float>()[i] = draw.real() * scale + offset;
  return b;
}
static Bytes integers(const std::vector<int32_t>& x) {
  Bytes b(x.size() * 4);
  if (!x.empty()) std::memcpy(b.data.get(), x.data(), b.size);
  return b;
}

static void run_team(const Kernels& kernels, const std::vector<Op>& ops, const Step& step, int threads) {
  size_t need = 0;
  for (const Op& op : ops) need = std::max(need, kernels.common_bytes(op, step));
  Scratch common;
  uint8_t* memory = common.at(need);
  std::vector<Scratch> own{size_t(threads)};
  size_t count = 0;
  for (const Op& op : ops) count += size_t(phases_of(op));
  std::vector<Phase> phases(count);
  std::vector<std::thread> members;
  for (int rank = 0; rank < threads; ++rank)
    members.emplace_back([&, rank] {
      Team team{phases.data(), &own[plant == "race" ? 0 : size_t(rank)], threads, memory};
      Phase* phase = phases.data();
      for (const Op& op : ops) {
        team.phase = phase;
        phase += phases_of(op);
        kernels.exec(op, step, team);
      }
    });
  for (std::thread& member : members) member.join();
}

static void run(const Kernels& kernels, const std::vector<Op>& ops, const Step& step, int threads) {
  if (!by_program) return run_team(kernels, ops, step, threads);
  Program program(kernels, threads);
  for (const Op& op : ops) program.add(op);
  program.run(step, 0, ops.size());
}

struct Matrix {
  Weight weight;
  Bytes data;
  Matrix(const Kernels& kernels, int64_t n, int64_t k, Type type, bool glu)
      : data(size_t(glu ? (n / 2 + 15) / 16 : (n + PANEL - 1) / PANEL) * PANEL * size_t(k) * type_bytes(type)) {
    weight.data = data.data.get(); weight.n = n; weight.k = k; weight.type = type; weight.glu = glu;
    for (int64_t row = 0; row < n; ++row) {
      if (row % 2) {
        Bytes x = floats(k, 0.5f);
        kernels.pack(weight, data.data.get(), row, x.data.get(), Type::f32, 1, k);
      } else {
        Bytes x(size_t(k) * 2);
        for (int64_t i = 0; i < k; ++i) x.as<uint16_t>()[i] = bf16(draw.real() * 0.5f);
        kernels.pack(weight, data.data.get(), row, x.data.get(), Type::bf16, 1, k);
      }
    }
    Bytes out(size_t(k) * 4);
    kernels.unpack(weight, n - 1, out.as<float>());
  }
};

struct Shape {
  Type kv, act;
  int heads, kv_heads, d, dv, block_size, window, sinks;
  float softcap;
  bool qk_norm, bias, ring, shared;
};

// One decoder layer between an embedding and a head, over requests of ragged lengths. `hidden` is odd on purpose where
// the type allows it.
static void layer(const Kernels& kernels, const Shape& s) {
  const int64_t hidden = s.act == Type::bf16 ? 46 : 45, ffn = s.act == Type::bf16 ? 70 : 35, vocab = 53;
  const int64_t width = int64_t(s.heads + s.kv_heads) * s.d + int64_t(s.kv_heads) * s.dv;
  const Type q_type = s.kv == Type::bf16 ? Type::bf16 : Type::f32;
  const size_t act = type_bytes(s.act), q_bytes = type_bytes(q_type);
  const std::vector<std::vector<int32_t>> steps = {  // tokens of each request; 0: it sits this step out
      {300, 1, 0, 137, 16}, {1, 1, 33, 1, 1}, {1, 1, 1, 1, 1}, {4, 0, 2, 1, 3}, {1, 1, 1, 1, 1}};
  const int64_t requests = int64_t(steps[0].size()), size = s.block_size;
  int64_t longest = 0, most = 0;
  for (int64_t b = 0; b < requests; ++b) {
    int64_t sum = 0;
    for (const auto& counts : steps) sum += counts[size_t(b)];
    longest = std::max(longest, sum);
  }
  for (const auto& counts : steps) {
    int64_t sum = 0;
    for (int32_t n : counts) sum += n;
    most = std::max(most, sum);
  }
  // Tables: blocks in a scattered order; a ring repeats its own; a shared prefix names the same ones.
  const int64_t columns = (longest + size - 1) / size;
  const int64_t cycle = s.ring ? std::min(columns, (s.window + 300 + size - 1) / size + 1) : columns;
  const int64_t blocks = requests * cycle;
  std::vector<int32_t> table(size_t(requests * columns));
  for (int64_t b = 0; b < requests; ++b)
    for (int64_t i = 0; i < columns; ++i) table[size_t(b * columns + i)] = int32_t(blocks - 1 - (b * cycle + i % cycle));

  Matrix embed(kernels, vocab, hidden, s.act, false), qkv(kernels, width, hidden, s.act, false);
  Matrix o(kernels, hidden, int64_t(s.heads) * s.dv, s.act, false), up(kernels, 2 * ffn, hidden, s.act, true);
  Matrix down(kernels, hidden, ffn, s.act, false);
  Bytes norm = floats(hidden, 0.2f, 1), head_norm = floats(s.d, 0.2f, 1);
  Bytes qkv_bias = floats(width), up_bias = floats(2 * ffn), bias = floats(hidden);
  const int64_t rotary = s.d / 2 * 2, half = rotary / 2;
  Bytes cos = floats(longest * half), sin = floats(longest * half);
  const int64_t block_bytes = size * s.kv_heads * (s.d + s.dv) * int64_t(type_bytes(s.kv));

  std::vector<std::vector<uint8_t>> found;
  for (int threads : {1, 3}) {
    Bytes pool(size_t(blocks * block_bytes), 0xff);  // NaN wherever nobody wrote
    std::vector<int64_t> written(size_t(requests), 0);
    std::vector<uint8_t> kept;
    for (size_t at = 0; at < steps.size(); ++at) {
      std::vector<int32_t> tokens, positions, starts{0}, rows, now = table;
      for (int64_t b = 0; b < requests; ++b) {
        const int32_t count = steps[at][size_t(b)];
        for (int32_t i = 0; i < count; ++i) {
          tokens.push_back(int32_t((int64_t(positions.size()) * 7 + b + int64_t(at)) % vocab));
          positions.push_back(int32_t(written[size_t(b)] + i));
        }
        starts.push_back(int32_t(tokens.size()));
        if (count) rows.push_back(starts.back() - 1);
        const int64_t oldest = s.window && !s.sinks ? std::max<int64_t>(0, written[size_t(b)] - s.window + 1) : 0;
        for (int64_t i = 0; i < columns; ++i)
          if ((i + 1) * size <= oldest || i * size >= written[size_t(b)] + count) now[size_t(b * columns + i)] = -1;
      }
      // From the third step on all read the first request's leading blocks, as after a prefix was found. Each still
      // writes blocks of its own only.
      if (s.shared && at >= 2)
        for (int64_t b = 1; b < requests; ++b)
          for (int64_t i = 0; (i + 1) * size <= std::min(written[0], written[size_t(b)]); ++i) now[size_t(b * columns + i)] = now[size_t(i)];
      const int64_t t = int64_t(tokens.size()), r = int64_t(rows.size());
      Bytes x(size_t(t * hidden) * 4), branch(size_t(t * hidden) * 4), projected(size_t(t * width) * 4);
      Bytes q(size_t(t * s.heads * s.d) * q_bytes), attended(size_t(t * s.heads * s.dv) * act);
      Bytes gated(size_t(t * ffn) * act), logits(size_t(r * vocab) * 4);
      Bytes tokens_ = integers(tokens), positions_ = integers(positions), starts_ = integers(starts), rows_ = integers(rows);
      Bytes now_ = integers(now);
      if (plant == "short") { Bytes less(x.size - 4); std::swap(x.data, less.data); }
      Table group;
      group.data = now_.as<int32_t>();
      if (plant == "crooked") group.data = (const int32_t*)(now_.data.get() + 1);
      group.width = columns;
      find_leaders(group, requests);
      Step step;
      step.tokens = tokens_.as<int32_t>(); step.positions = positions_.as<int32_t>();
      step.starts = starts_.as<int32_t>(); step.rows = rows_.as<int32_t>();
      step.num_tokens = t; step.num_requests = requests; step.num_rows = r; step.tables = &group;

      Store store;
      store.data = pool.data.get(); store.num_blocks = blocks; store.block_bytes = block_bytes; store.block_size = s.block_size;
      store.kv_heads = s.kv_heads; store.head_dim = s.d; store.v_head_dim = s.dv; store.group = 0; store.type = s.kv;
      std::vector<Op> ops;
      auto linear = [&](const Matrix& w, const Bytes& source, int64_t stride, Bytes& out, int64_t out_stride, Epilogue epilogue) -> Op& {
        Op op;
        op.kind = OpKind::linear; op.weight = w.weight; op.source = source.data.get(); op.source_stride = stride;
        op.out = out.data.get(); op.out_stride = out_stride; op.act = op.source_type = s.act; op.epilogue = epilogue;
        ops.push_back(op);
        return ops.back();
      };
      auto normed = [&](Op& op) { op.source_type = Type::f32; op.norm = norm.as<float>(); op.eps = 1e-5f; };
      Op op;
      op.kind = OpKind::embed; op.weight = embed.weight; op.scale = 1.5f; op.out = x.data.get(); op.out_stride = hidden;
      ops.push_back(op);
      Op& first = linear(qkv, x, hidden, projected, width, Epilogue::store);
      normed(first);
      if (s.bias) first.bias = qkv_bias.as<float>();
      op = Op();
      op.kind = OpKind::append; op.store = store; op.source = projected.data.get(); op.source_stride = width;
      op.out = q.data.get(); op.out_stride = s.heads * s.d; op.num_heads = s.heads; op.scale = 0.25f; op.eps = 1e-6f;
      op.rotary = int32_t(rotary); op.cos = cos.as<float>(); op.sin = sin.as<float>(); op.rope_rows = longest;
      if (s.qk_norm) op.q_norm = op.k_norm = head_norm.as<float>();
      ops.push_back(op);
      op = Op();
      op.kind = OpKind::attend; op.store = store; op.source = q.data.get(); op.source_stride = s.heads * s.d;
      op.out = attended.data.get(); op.out_stride = s.heads * s.dv; op.act = s.act; op.num_heads = s.heads;
      op.window = s.window; op.sinks = s.sinks; op.softcap = s.softcap;
      ops.push_back(op);
      linear(o, attended, int64_t(s.heads) * s.dv, x, hidden, Epilogue::add);
      Op& gate = linear(up, x, hidden, gated, ffn, Epilogue::glu);
      normed(gate);
      gate.activation = s.softcap != 0 ? Activation::gelu_tanh : Activation::silu;
      if (s.bias) gate.bias = up_bias.as<float>();
      Op& back = linear(down, gated, ffn, branch, hidden, Epilogue::store);
      if (s.bias) back.bias = bias.as<float>();
      op = Op();
      op.kind = OpKind::norm_add; op.source = branch.data.get(); op.source_stride = hidden; op.out = x.data.get();
      op.out_stride = hidden; op.weight.k = hidden; op.norm = norm.as<float>(); op.eps = 1e-5f;
      ops.push_back(op);
      Op& head = linear(embed, x, hidden, logits, vocab, Epilogue::store);
      normed(head);
      head.wanted = head.centred = true;
      head.norm_bias = norm.as<float>();
      head.softcap = s.softcap;
      run(kernels, ops, step, threads);
      for (int64_t b = 0; b < requests; ++b) written[size_t(b)] += steps[at][size_t(b)];
      for (int64_t i = 0; i < r * vocab; ++i)
        if (!(logits.as<float>()[i] - logits.as<float>()[i] == 0)) { std::fprintf(stderr, "%s: a logit is not finite\n", kernels.name); std::exit(3); }
      kept.insert(kept.end(), logits.data.get(), logits.data.get() + logits.size);
    }
    found.push_back(kept);
  }
  if (found[0] != found[1]) { std::fprintf(stderr, "%s: 1 and 3 threads differ\n", kernels.name); std::exit(3); }
}

// A layer of latent attention and one of routed experts. A second step finds the first one's rows behind a shared prefix.
static void latents(const Kernels& kernels, Type kv, Type act, int heads, int64_t rank, int64_t rope, int block_size, int experts, int first) {
  const int64_t nope = 6, value = 5, hidden = 34, ffn = 18, k_count = 3, d = rank + rope, size = block_size;
  const size_t q_bytes = kv == Type::bf16 ? 2 : 4;
  const std::vector<std::vector<int32_t>> steps = {{first, 0, 3}, {1, 1, 1}, {2, 1, 0}};
  const int64_t requests = 3, columns = 2200 / size + 1, blocks = requests * columns, block_bytes = size * d * int64_t(type_bytes(kv));
  std::vector<int32_t> table(static_cast<size_t>(blocks));
  for (int64_t i = 0; i < blocks; ++i) table[size_t(i)] = int32_t(blocks - 1 - i);
  std::vector<Matrix> uk, uv, up, down;
  for (int h = 0; h < heads; ++h) { uk.emplace_back(kernels, rank, nope, act, false); uv.emplace_back(kernels, value, rank, Type::f32, false); }
  for (int e = 0; e < experts; ++e) { up.emplace_back(kernels, 2 * ffn, hidden, act, true); down.emplace_back(kernels, hidden, ffn, act, false); }
  auto group = [](const std::vector<Matrix>& all) {
    auto list = std::make_shared<std::vector<const void*>>();
    for (const Matrix& m : all) list->push_back(m.weight.data);
    return std::shared_ptr<const std::vector<const void*>>(list);
  };
  Bytes norm = floats(std::max(rank, hidden), 0.2f, 1), bias = floats(experts, 0.1f), cos = floats(2200 * rope / 2), sin = floats(2200 * rope / 2);
  std::vector<std::vector<uint8_t>> found;
  for (int threads : {1, 3}) {
    draw.state = 7;
    Bytes pool(size_t(blocks * block_bytes), 0x3c);  // small numbers: the first request begins behind 2060 rows of them
    std::vector<uint8_t> kept;
    std::vector<int64_t> written{2060, 0, 0};
    for (size_t at = 0; at < steps.size(); ++at) {
      std::vector<int32_t> positions, starts{0}, now = table;
      for (int64_t b = 0; b < requests; ++b) {
        if (at && b == 1) {  // as many of the first request's blocks as are whole, then its own
          const int64_t shared = 2000 / size;
          if (at == 1) written[1] = shared * size;
          for (int64_t i = 0; i < shared; ++i) now[size_t(columns + i)] = now[size_t(i)];
        }
        for (int32_t i = 0; i < steps[at][size_t(b)]; ++i) positions.push_back(int32_t(written[size_t(b)] + i));
        starts.push_back(int32_t(positions.size()));
        written[size_t(b)] += steps[at][size_t(b)];
      }
      const int64_t t = int64_t(positions.size());
      Bytes positions_ = integers(positions), starts_ = integers(starts), now_ = integers(now);
      Table list;
      list.data = now_.as<int32_t>(); list.width = columns;
      find_leaders(list, requests);
      Step step;
      step.positions = positions_.as<int32_t>(); step.starts = starts_.as<int32_t>(); step.num_tokens = t; step.num_requests = requests; step.tables = &list;
      Store store;
      store.data = pool.data.get(); store.num_blocks = blocks; store.block_bytes = block_bytes; store.block_size = block_size;
      store.kv_heads = 1; store.head_dim = int32_t(d); store.v_head_dim = int32_t(rank); store.type = kv; store.value_in_key = true;
      Bytes q = floats(t * heads * (nope + rope)), rows = floats(t * d), absorbed(size_t(t * heads * rank) * 4), wide(size_t(t * heads * d) * q_bytes);
      Bytes seen(size_t(t * heads * rank) * 4), out(size_t(t * heads * value) * 4);
      Bytes x = floats(t * hidden), scores = floats(t * experts), ids(size_t(t * k_count) * 4), gates(size_t(t * k_count) * 4);
      Bytes gated(size_t(t * k_count * ffn) * type_bytes(act)), answers(size_t(t * k_count * hidden) * 4);
      std::vector<Op> ops;
      auto grouped = [&](const std::vector<Matrix>& all, const Bytes& source, int64_t stride, int64_t slot, Bytes& to, int64_t to_stride, int64_t slots) -> Op& {
        Op op;
        op.kind = OpKind::grouped; op.weight = all[0].weight; op.weight.data = nullptr; op.group = group(all); op.slots = slots;
        op.source = source.data.get(); op.source_stride = stride; op.slot_stride = slot; op.out = to.data.get(); op.out_stride = to_stride;
        ops.push_back(op);
        return ops.back();
      };
      grouped(uk, q, heads * (nope + rope), nope + rope, absorbed, heads * rank, heads);
      Op op;
      op.kind = OpKind::append_latent; op.store = store; op.source = q.data.get(); op.source_stride = heads * (nope + rope); op.nope = nope;
      op.absorbed = absorbed.as<float>(); op.absorbed_stride = heads * rank; op.latents = rows.as<float>(); op.latents_stride = d;
      op.out = wide.data.get(); op.out_stride = heads * d; op.num_heads = heads; op.scale = 0.3f; op.rotary = int32_t(rope);
      op.cos = cos.as<float>(); op.sin = sin.as<float>(); op.rope_rows = 2200; op.norm = norm.as<float>(); op.eps = 1e-6f;
      ops.push_back(op);
      op = Op();
      op.kind = OpKind::attend; op.store = store; op.source = wide.data.get(); op.source_stride = heads * d; op.out = seen.data.get();
      op.out_stride = heads * rank; op.num_heads = heads;
      ops.push_back(op);
      grouped(uv, seen, heads * rank, rank, out, heads * value, heads);
      op = Op();
      op.kind = OpKind::route; op.source = scores.data.get(); op.source_stride = experts; op.weight.n = experts; op.ids = ids.as<int32_t>();
      op.ids_stride = k_count; op.gates = gates.as<float>(); op.gates_stride = k_count; op.slots = k_count; op.sigmoid = op.top2 = op.normalise = true;
      op.groups = 2; op.top_groups = 1; op.bias = bias.as<float>();
      ops.push_back(op);
      for (int half = 0; half < 2; ++half) {
        Op& e = half ? grouped(down, gated, k_count * ffn, ffn, answers, k_count * hidden, k_count) : grouped(up, x, hidden, 0, gated, k_count * ffn, k_count);
        e.ids = ids.as<int32_t>(); e.ids_stride = k_count;
        if (half) { e.source_type = act; continue; }
        e.epilogue = Epilogue::glu; e.act = act; e.norm = norm.as<float>(); e.eps = 1e-5f;
      }
      op = Op();
      op.kind = OpKind::combine; op.source = answers.data.get(); op.source_stride = k_count * hidden; op.gates = gates.as<float>(); op.gates_stride = k_count;
      op.out = x.data.get(); op.out_stride = hidden; op.weight.k = hidden; op.slots = k_count;
      ops.push_back(op);
      run(kernels, ops, step, threads);
      for (const Bytes* b : {&out, &x}) {
        for (size_t i = 0; i < b->size / 4; ++i)
          if (!(b->as<float>()[i] - b->as<float>()[i] == 0)) { std::fprintf(stderr, "%s: a latent's answer is not finite\n", kernels.name); std::exit(3); }
        kept.insert(kept.end(), b->data.get(), b->data.get() + b->size);
      }
    }
    found.push_back(kept);
  }
  if (found[0] != found[1]) { std::fprintf(stderr, "%s: 1 and 3 threads differ over latents\n", kernels.name); std::exit(3); }
}

// Rows of every GGUF type, as a file holds them, unpacked and packed.
static void unpacked(const Kernels& kernels) {
  for (int type : {0, 1, 2, 3, 6, 7, 8, 12, 13, 14, 30}) {
    const int64_t k = 512;
    const size_t bytes = kernels.gguf_row_bytes(type, k);
    if (!bytes) { std::fprintf(stderr, "%s: GGUF type %d is not known\n", kernels.name, type); std::exit(3); }
    if (type >= 2 && type != 30 && kernels.gguf_row_bytes(type, 511)) std::exit(3);
    Bytes row(bytes), out(size_t(k) * 4);
    for (size_t i = 0; i < bytes; ++i) row.as<uint8_t>()[i] = uint8_t(draw.next());
    kernels.gguf_row(type, row.data.get(), k, out.as<float>());
  }
}

int main(int count, char** arguments) {
  const std::string mode = count > 1 ? arguments[1] : "";
  if (mode != "program" && mode != "team") { std::fprintf(stderr, "usage: exercise program|team [short|race|crooked]\n"); return 2; }
  by_program = mode == "program";
  plant = count > 2 ? arguments[2] : "";
  const Type types[] = {Type::f32, Type::bf16, Type::f16};
  int layers = 0;
  for (const Kernels* kernels : all_kernels()) {
    unpacked(*kernels);
    for (Type kv : types)
      for (Type act : {Type::f32, Type::bf16}) {
        const bool pairs = kv == Type::bf16;
        const Shape shapes[] = {
            {kv, act, 4, 4, 16, 16, 16, 0, 0, 0, false, false, false, false},
            {kv, act, 6, 2, pairs ? 24 : 23, 20, 32, 0, 0, 5, true, true, false, true},
            {kv, act, 5, 1, pairs ? 18 : 17, 33, 64, 0, 0, 0, true, false, false, true},
            {kv, act, 9, 3, 64, 64, 128, 40, 0, 0, false, true, false, false},
            {kv, act, 26, 2, 32, 48, 16, 200, 4, 30, false, false, false, true},
            {kv, act, 8, 1, 128, 16, 256, 0, 0, 0, false, false, false, true},
            {kv, act, 4, 2, 16, pairs ? 7 : 6, 16, 50, 0, 0, false, false, true, false},
        };
        for (const Shape& shape : shapes) { layer(*kernels, shape); ++layers; }
        latents(*kernels, kv, act, 6, pairs ? 24 : 23, 8, 16, 8, 60);
        if (act == Type::f32) latents(*kernels, kv, act, 20, 520, 8, 256, 6, 2);  // in two waves
      }
    std::printf("%s: all operations, %d layers so far\n", kernels->name, layers);
    std::fflush(stdout);
  }
  if (by_program)
    for (size_t size : {size_t(0), size_t(63), size_t(4096), size_t(100003)}) {
      Bytes memory(size);
      read_bandwidth(memory.data.get(), size, 3, 2);
    }
  return 0;
}
