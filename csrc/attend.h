// Attention over blocks, in splits of 128 keys at absolute positions. Every split starts afresh: its own maximum, its own
// sum, probabilities relative to that maximum. Splits are merged in ascending order by `fold`, in decode and prefill
// alike, so that chunks, neighbours, block sizes and threads cannot reach the bits. Keys that a query may not see are
// removed by select, their values are never multiplied: fresh memory may hold NaN.
#pragma once
#include <algorithm>

#include "pointwise.h"
#include "tile.h"

namespace KVIST_VARIANT {

constexpr int TILES = SPLIT / TILE;

struct Range { int64_t lo, hi; };  // keys lo..hi-1 of a split

// What one query sees of split s: its sinks and its window, as at most two ranges; `whole` when that is every key.
struct View {
  Range part[2];
  int count = 0;
  bool whole() const { return count == 1 && part[0].lo == 0 && part[0].hi == SPLIT; }
  bool operator==(const View& o) const {
    if (count != o.count) return false;
    for (int i = 0; i < count; ++i) if (part[i].lo != o.part[i].lo || part[i].hi != o.part[i].hi) return false;
    return true;
  }
};

inline View view_of(int64_t position, int64_t window, int64_t sinks, int64_t split) {
  const int64_t base = split * SPLIT, end = std::min<int64_t>(SPLIT, position + 1 - base);
  View v;
  if (end <= 0) return v;
  const int64_t begin = window ? std::max<int64_t>(0, position - window + 1 - base) : 0;
  const int64_t sink_end = std::min(end, window ? std::max<int64_t>(0, sinks - base) : 0);
  if (sink_end > 0 && sink_end < begin) v.part[v.count++] = {0, std::min<int64_t>(sink_end, SPLIT)};
  const int64_t lo = sink_end >= begin ? 0 : begin;
  if (lo < end) v.part[v.count++] = {lo, end};
  return v;
}

struct Partial { float m, l; };

// Joins one split's result to what the splits before it gave. The only merge formula there is.
inline void fold(Partial& to, float* out, const Partial& from, const float* o, int64_t width) {
  const float m = to.m > from.m ? to.m : from.m;
  float x[LANES] = {to.m - m, from.m - m};
  float y[LANES];
  store(y, exp(load(x)));
  to = {m, to.l * y[0] + from.l * y[1]};
  const vf a = set1(y[0]), b = set1(y[1]);
  for (int64_t i = 0; i < width; i += LANES) store(out + i, fma(load(o + i), b, mul(load(out + i), a)));
}

template <class E> struct Attention {
  const Op& op;
  const Step& step;
  const int64_t d, dv, group, vectors, width;  // width: v_head_dim rounded up to whole vectors
  const int64_t k_part, head_bytes, tile_bytes;
  static constexpr int64_t P_ROW = SPLIT * E::A_BYTES;
  // this thread's working memory
  float *scores, *values;
  uint8_t *weights, *q_tile, *zeros, *edge;

  static int64_t v_width(const Op& op) { return (op.store.v_head_dim + LANES - 1) / LANES * LANES; }
  static size_t own_bytes(const Op& op) {
    const int64_t d = op.store.head_dim, w = v_width(op);
    return size_t(MAX_ROWS * SPLIT * 4 + MAX_ROWS * w * 4 + MAX_ROWS * SPLIT * 4 + MAX_ROWS * d * 4 + d * TILE * 4 + SPLIT * w * 4 + 6 * 64);
  }

  Attention(const Op& o, const Step& s, uint8_t* memory)
      : op(o), step(s), d(o.store.head_dim), dv(o.store.v_head_dim), group(o.num_heads / o.store.kv_heads),
        vectors(v_width(o) / LANES), width(v_width(o)), k_part(int64_t(o.store.block_size) * d * E::B_BYTES),
        head_bytes(int64_t(o.store.block_size) * (d + dv) * E::B_BYTES), tile_bytes(int64_t(TILE) * d * E::B_BYTES) {
    auto next = [&](int64_t bytes) { uint8_t* p = memory; memory += (bytes + 63) / 64 * 64; return p; };
    scores = (float*)next(MAX_ROWS * SPLIT * 4);
    values = (float*)next(MAX_ROWS * width * 4);
    weights = next(MAX_ROWS * SPLIT * 4);
    q_tile = next(MAX_ROWS * d * 4);
    zeros = next(d * TILE * 4);
    edge = next(SPLIT * width * 4);
    std::memset(zeros, 0, size_t(d) * TILE * 4);
  }

  // The block that holds position `p` of request b, at kv head g; null where nothing is stored.
  const uint8_t* block(int64_t b, int64_t g, int64_t p) const {
    const Table& t = step.tables[op.store.group];
    const int64_t i = p / op.store.block_size;
    if (i >= t.width) return nullptr;
    const int32_t id = t.data[b * t.width + i];
    return id < 0 ? nullptr : op.store.data + int64_t(id) * op.store.block_bytes + g * head_bytes;
  }

  void load_queries(int64_t rows, const int64_t* tokens, const int64_t* heads) {
    const int64_t units = d / E::STEP;
    uint32_t* out = (uint32_t*)q_tile;
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t* q = (const uint8_t*)op.source + (tokens[r] * op.source_stride + heads[r] * d) * E::A_BYTES;
      for (int64_t i = 0; i < units; ++i) std::memcpy(out + i * rows + r, q + 4 * i, 4);
    }
  }

  // Weighted values of keys range.lo..range.hi-1 for R rows from `row`, added to values[] in order of position.
  template <int R> void gather(int64_t b, int64_t g, int64_t split, int row, Range range) {
    const int64_t block_size = op.store.block_size, e = E::STEP;
    int64_t key = range.lo;
    while (key < range.hi) {
      const int64_t p = split * SPLIT + key, slot = p % block_size;
      int64_t count = std::min(range.hi - key, block_size - slot);
      const uint8_t* base = block(b, g, p);
      if (!base) { key += count; continue; }
      int64_t first = key;  // the key of the first unit that is multiplied, on a whole unit
      const uint8_t* v = base + k_part + slot / e * dv * e * E::B_BYTES;
      int64_t stride = dv * e * E::B_BYTES;
      if (e == 2 && (key % 2 || (count == 1))) {  // a pair of which one position is not to be seen: blank the other
        const bool odd = key % 2;
        copy_unit(v, stride);
        for (int64_t i = 0; i < width; ++i) ((uint16_t*)edge)[2 * i + (odd ? 0 : 1)] = 0;
        first = key - odd; count = 1; v = edge; stride = width * 4;
        multiply_values<R>(row, first, 1, v, stride);
        key += 1;
        continue;
      }
      count -= count % e;
      if (dv % LANES) {  // rows that do not fill whole vectors are copied first, so that no load passes their end
        for (int64_t i = 0; i < count / e; ++i) {
          copy_unit(v + i * stride, stride);
          multiply_values<R>(row, first + i * e, 1, edge, width * e * E::B_BYTES);
        }
      } else {
        multiply_values<R>(row, first, count / e, v, stride);
      }
      key += count;
    }
  }
  void copy_unit(const uint8_t* v, int64_t bytes) {
    std::memset(edge, 0, size_t(width) * 4);
    std::memcpy(edge, v, size_t(bytes));
  }
  struct Values {
    float* out; int64_t width;
    KV_INLINE vf first(int r, int64_t v) const { return load(out + r * width + v * LANES); }
    template <int R, int V> KV_INLINE void done(int64_t v, vf (&acc)[R][V]) const {
      for (int r = 0; r < R; ++r) for (int j = 0; j < V; ++j) store(out + r * width + (v + j) * LANES, acc[r][j]);
    }
  };
  template <int R> void multiply_values(int row, int64_t key, int64_t units, const uint8_t* v, int64_t stride) {
    Values sink{values + row * width, width};
    auto columns = [&](int64_t i) { return v + i * E::VECTOR_BYTES; };
    sweep<E, Strided<int(P_ROW)>, R>(weights + row * P_ROW + key * E::A_BYTES, 0, vectors, stride, units, columns, sink);
  }

  bool finite(int64_t b, int64_t g, int64_t split, Range range) const {
    for (int64_t key = range.lo; key < range.hi; ++key) {
      const int64_t p = split * SPLIT + key, slot = p % op.store.block_size;
      const uint8_t* base = block(b, g, p);
      if (!base) continue;
      const int64_t e = E::STEP;
      bool ok = true;
      if (E::B_BYTES == 4) {
        const uint32_t* v = (const uint32_t*)(base + k_part) + slot * dv;
        for (int64_t i = 0; i < dv; ++i) ok &= (v[i] & 0x7f800000u) != 0x7f800000u;
      } else {
        const uint16_t* v = (const uint16_t*)(base + k_part) + slot / e * dv * e + slot % e;
        const uint16_t bits = std::is_same_v<E, Bf16> ? 0x7f80u : 0x7c00u;
        for (int64_t i = 0; i < dv; ++i) ok &= (v[i * e] & bits) != bits;
      }
      if (!ok) return false;
    }
    return true;
  }

  struct Scores {
    float* out;
    KV_INLINE vf first(int, int64_t) const { return zero(); }
    template <int R, int V> KV_INLINE void done(int64_t v, vf (&acc)[R][V]) const {
      for (int r = 0; r < R; ++r) for (int j = 0; j < V; ++j) store(out + r * SPLIT + (v + j) * LANES, acc[r][j]);
    }
  };

  // One split for R rows: partial results in part[] and values[]. part.m is -inf where a row sees nothing of it.
  template <int R> void split(int64_t b, int64_t g, int64_t s, const int64_t* positions, Partial* part) {
    View view[R];
    Range all{SPLIT, 0};
    bool alike = true;
    for (int r = 0; r < R; ++r) {
      view[r] = view_of(positions[r], op.window, op.sinks, s);
      for (int i = 0; i < view[r].count; ++i) all = {std::min(all.lo, view[r].part[i].lo), std::max(all.hi, view[r].part[i].hi)};
      alike = alike && view[r] == view[0];
      part[r] = {-__builtin_inff(), 0};
    }
    if (all.lo >= all.hi) return;
    const int64_t t0 = all.lo / TILE, t1 = (all.hi + TILE - 1) / TILE;
    const uint8_t* tiles[TILES];
    for (int64_t t = t0; t < t1; ++t) {
      const int64_t p = s * SPLIT + t * TILE;
      const uint8_t* base = block(b, g, p);
      tiles[t] = base ? base + p % op.store.block_size / TILE * tile_bytes : zeros;
    }
    Scores sink{scores};
    sweep<E, Packed<R>, R>(q_tile, t0, t1, E::VECTOR_BYTES, d / E::STEP, [&](int64_t t) { return tiles[t]; }, sink);
    for (int r = 0; r < R; ++r) part[r] = softmax(r, view[r], t0, t1);
    for (int64_t i = 0; i < R * width; ++i) values[i] = 0;
    if (alike) {
      for (int i = 0; i < view[0].count; ++i) gather<R>(b, g, s, 0, view[0].part[i]);
    } else if (finite(b, g, s, all)) {
      gather<R>(b, g, s, 0, all);  // probabilities of unseen keys are exactly 0, and so is 0 times a finite value
    } else {
      for (int r = 0; r < R; ++r)
        for (int i = 0; i < view[r].count; ++i) gather<1>(b, g, s, r, view[r].part[i]);
    }
    // A sum that underflowed to -0 differs from one that met further zeros: make both +0.
    for (int64_t i = 0; i < R * width; i += LANES) store(values + i, add(load(values + i), zero()));
  }

  Partial softmax(int r, const View& view, int64_t t0, int64_t t1) {
    float* s = scores + r * SPLIT;
    const vf low = set1(-__builtin_inff());
    vf top = low;
    for (int64_t t = t0; t < t1; ++t) {
      vf x = load(s + t * TILE);
      if (op.softcap != 0) x = cap(x, op.softcap);
      // An infinite score takes all the weight instead of making inf - inf; NaN stays NaN.
      x = select(less(x, set1(-__FLT_MAX__)), set1(-__FLT_MAX__), select(less(set1(__FLT_MAX__), x), set1(__FLT_MAX__), x));
      if (!view.whole()) {
        const vi lane = lanes_from(int32_t(t * TILE));
        vi seen = iset1(0);
        for (int i = 0; i < view.count; ++i)
          seen = either(seen, both(less_equal(iset1(int32_t(view.part[i].lo)), lane), less(lane, iset1(int32_t(view.part[i].hi)))));
        x = select(seen, x, low);
      }
      store(s + t * TILE, x);
      top = max(x, top);
    }
    float m = lane_max(top);
    uint8_t* out = weights + r * P_ROW;
    if (view.count == 0) { std::memset(out, 0, size_t(P_ROW)); return {m, 0}; }
    if (m == -__builtin_inff()) m = __builtin_nanf("");  // something is seen, and all of it is NaN: say so
    vf sum = zero();
    for (int64_t t = t0; t < t1; ++t) {
      vf p = exp(sub(load(s + t * TILE), set1(m)));
      if (E::STEP == 2) { p = round_bf16(p); store_bf16((uint16_t*)out + t * TILE, p); }
      else store((float*)out + t * TILE, p);
      sum = add(sum, p);
    }
    return {m, lane_sum(sum)};
  }

  void finish(int64_t token, int64_t head, const Partial& part, const float* o) const {
    const float inverse = part.l > 0 || part.l != part.l ? 1.0f / part.l : 0.0f;
    const int64_t at = token * op.out_stride + head * dv;
    for (int64_t i = 0; i < dv; ++i) {
      const float y = o[i] * inverse;
      if (op.act == Type::bf16) ((uint16_t*)op.out)[at + i] = bf16_of(y);
      else ((float*)op.out)[at + i] = y;
    }
  }
};

// How the work of a step is cut: `unit` is one kv head of a run of tokens of one request. With few units, splits are
// shared out too and their partial results merged afterwards. The cut never reaches the arithmetic.
struct Cut {
  int64_t tokens_per_unit, units, splits, splits_per_item;  // splits > 0: shared out
  int64_t per_unit_floats;
};

inline int64_t last_split(const Step& s) {
  int64_t most = 0;
  for (int64_t t = 0; t < s.num_tokens; ++t) most = std::max<int64_t>(most, s.positions[t] / SPLIT + 1);
  return most;
}

inline Cut cut_of(const Op& op, const Step& step) {
  const int64_t group = op.num_heads / op.store.kv_heads, width = (op.store.v_head_dim + LANES - 1) / LANES * LANES;
  Cut c{};
  c.tokens_per_unit = std::max<int64_t>(1, 4 * MAX_ROWS / group);
  for (int64_t b = 0; b < step.num_requests; ++b)
    c.units += (step.starts[b + 1] - step.starts[b] + c.tokens_per_unit - 1) / c.tokens_per_unit * op.store.kv_heads;
  const int64_t splits = last_split(step), rows = c.tokens_per_unit * group;
  if (c.units < 16 && splits > 1 && step.num_tokens <= 16) {
    c.splits = splits;
    c.splits_per_item = std::max<int64_t>(1, std::min<int64_t>(4, c.units * splits / 32));
    c.per_unit_floats = rows * splits * (width + 2);
  }
  return c;
}

inline size_t attend_common(const Op& op, const Step& step) {
  const Cut c = cut_of(op, step);
  return c.splits ? size_t(c.units) * c.per_unit_floats * 4 : 0;
}

struct Unit { int64_t request, head, first, count; };  // kv head; tokens first..first+count-1 of the step

inline Unit unit_of(const Op& op, const Step& step, const Cut& c, int64_t i) {
  for (int64_t b = 0;; ++b) {
    const int64_t n = step.starts[b + 1] - step.starts[b], runs = (n + c.tokens_per_unit - 1) / c.tokens_per_unit;
    if (i >= runs * op.store.kv_heads) { i -= runs * op.store.kv_heads; continue; }
    const int64_t run = runs - 1 - i / op.store.kv_heads;  // the last tokens see most: they go first
    const int64_t first = run * c.tokens_per_unit;
    return {b, i % op.store.kv_heads, step.starts[b] + first, std::min(c.tokens_per_unit, n - first)};
  }
}

template <class E> inline void attend_as(const Op& op, const Step& step, Team& team) {
  const Cut c = cut_of(op, step);
  const int64_t group = op.num_heads / op.store.kv_heads, width = Attention<E>::v_width(op), most = c.tokens_per_unit * group;
  const size_t own = Attention<E>::own_bytes(op);
  uint8_t* memory = team.own->at(own + 64 + size_t(most) * (width + 2) * 4);
  Attention<E> a(op, step, memory);
  Partial* state = (Partial*)(memory + (own + 63) / 64 * 64);
  float* sums = (float*)(state + most);
  float* shared = c.splits ? (float*)team.common : nullptr;
  int64_t token[MAX_ROWS], head[MAX_ROWS], position[MAX_ROWS];

  // Splits s0..s1 of unit u, tile of rows by tile of rows; `emit(row, split, part, values)` takes each row's result.
  auto walk = [&](const Unit& u, int64_t s0, int64_t s1, auto&& emit) {
    const int64_t rows = u.count * group;
    for (int64_t r0 = 0; r0 < rows; r0 += MAX_ROWS)
      with_rows(int(std::min<int64_t>(MAX_ROWS, rows - r0)), [&](auto n) {
        constexpr int R = decltype(n)::value;
        int64_t top = 0;
        for (int r = 0; r < R; ++r) {
          token[r] = u.first + (r0 + r) / group;
          head[r] = u.head * group + (r0 + r) % group;
          position[r] = step.positions[token[r]];
          top = std::max(top, position[r]);
        }
        a.load_queries(R, token, head);
        Partial part[R];
        const int64_t begin = op.window && !op.sinks ? std::max<int64_t>(0, position[0] - op.window + 1) / SPLIT : 0;
        for (int64_t s = std::max(s0, begin); s < std::min(s1, top / SPLIT + 1); ++s) {
          a.template split<R>(u.request, u.head, s, position, part);
          for (int r = 0; r < R; ++r) emit(r0 + r, s, part[r], a.values + r * width);
        }
      });
  };

  if (!c.splits) {
    for (int64_t i; (i = team.take(1)) < c.units;) {
      const Unit u = unit_of(op, step, c, i);
      for (int64_t r = 0; r < u.count * group; ++r) state[r] = {-__builtin_inff(), 0};
      std::fill(sums, sums + u.count * group * width, 0.0f);
      walk(u, 0, INT64_MAX, [&](int64_t r, int64_t, const Partial& part, const float* o) {
        if (part.m != -__builtin_inff()) fold(state[r], sums + r * width, part, o, width);
      });
      for (int64_t r = 0; r < u.count * group; ++r) a.finish(u.first + r / group, u.head * group + r % group, state[r], sums + r * width);
    }
    return;
  }
  const int64_t record = width + 2, runs = (c.splits + c.splits_per_item - 1) / c.splits_per_item;
  for (int64_t i; (i = team.take(1)) < c.units * runs;) {
    const int64_t index = i / runs, s0 = i % runs * c.splits_per_item, s1 = std::min(c.splits, s0 + c.splits_per_item);
    const Unit u = unit_of(op, step, c, index);
    float* base = shared + index * c.per_unit_floats;
    for (int64_t r = 0; r < u.count * group; ++r)
      for (int64_t s = s0; s < s1; ++s) base[(r * c.splits + s) * record] = -__builtin_inff();
    walk(u, s0, s1, [&](int64_t r, int64_t s, const Partial& part, const float* o) {
      float* to = base + (r * c.splits + s) * record;
      to[0] = part.m; to[1] = part.l;
      std::memcpy(to + 2, o, size_t(width) * 4);
    });
  }
  team.barrier();
  for (int64_t i; (i = team.take(1)) < c.units;) {
    const Unit u = unit_of(op, step, c, i);
    const float* base = shared + i * c.per_unit_floats;
    for (int64_t r = 0; r < u.count * group; ++r) {
      state[0] = {-__builtin_inff(), 0};
      std::fill(sums, sums + width, 0.0f);
      for (int64_t s = 0; s < c.splits; ++s) {
        const float* from = base + (r * c.splits + s) * record;
        if (from[0] != -__builtin_inff()) fold(state[0], sums, {from[0], from[1]}, from + 2, width);
      }
      a.finish(u.first + r / group, u.head * group + r % group, state[0], sums);
    }
  }
}

inline void attend(const Op& op, const Step& step, Team& team) {
  if (op.store.type == Type::bf16) attend_as<Bf16>(op, step, team);
  else if (op.store.type == Type::f16) attend_as<F16>(op, step, team);
  else attend_as<F32>(op, step, team);
}

}  // namespace KVIST_VARIANT
