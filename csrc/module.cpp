// Python bindings: raw addresses and sizes in, nothing of torch or numpy. Callers keep the memory alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <omp.h>

#include <stdexcept>
#include <tuple>

#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvist;
using Address = uintptr_t;

static Type type_of(int t) {
  if (t < 0 || t > 2) throw std::invalid_argument("element type must be 0 (float32), 1 (bfloat16) or 2 (float16)");
  return Type(t);
}

static Weight weight_of(Address data, int64_t n, int64_t k, int type, bool glu) {
  Weight w;
  w.data = (const void*)data; w.n = n; w.k = k; w.type = type_of(type); w.glu = glu;
  if (n < 1 || k < 1 || w.type == Type::f16 || (w.type == Type::bf16 && k % 2) || (glu && n % 2))
    throw std::invalid_argument("a packed weight is float32 or bfloat16 (then with even k), with n and k above 0 and n even when glu");
  return w;
}

// Segments (address, rows, GGUF type), one below the other: rows of 16 a strip, as Kernels::strip_bytes counts them.
static Weight packed_of(const std::vector<std::tuple<Address, int64_t, int>>& segments, int64_t k, bool glu) {
  Weight w;
  w.k = k; w.type = Type::packed; w.glu = glu;
  for (const auto& [data, rows, format] : segments) {
    if (rows < 1 || !all_kernels()[0]->strip_bytes(format, k))
      throw std::invalid_argument(std::to_string(rows) + " rows of " + std::to_string(k) + " in GGUF type " + std::to_string(format) + " cannot be held packed");
    w.segments.push_back({(const uint8_t*)data, w.n, rows, format});
    w.n += rows;
  }
  if (w.segments.empty() || (glu && (w.segments.size() != 2 || w.segments[0].rows != w.segments[1].rows)))
    throw std::invalid_argument("a packed weight has segments, and a glu weight two of equal rows");
  return w;
}

static Store store_of(Address data, int64_t blocks, int64_t block_bytes, int block_size, int kv_heads, int head_dim, int v_head_dim, int type, int group, bool value_in_key) {
  Store s;
  s.data = (uint8_t*)data; s.num_blocks = blocks; s.block_bytes = block_bytes; s.block_size = block_size;
  s.kv_heads = kv_heads; s.head_dim = head_dim; s.v_head_dim = v_head_dim; s.type = type_of(type); s.group = group;
  s.value_in_key = value_in_key;
  if (value_in_key && (kv_heads != 1 || v_head_dim > head_dim)) throw std::invalid_argument("a latent row is one key, and its value the first channels of it");
  if (block_size < TILE || block_size % TILE || (block_size % SPLIT && SPLIT % block_size))
    throw std::invalid_argument("block_size must be a multiple of 16 that divides 128 or is a multiple of it");
  if (s.type == Type::bf16 && head_dim % 2) throw std::invalid_argument("a bfloat16 store needs an even head_dim");
  return s;
}

// Rows i of `in` (float32, bfloat16, or a GGUF type when gguf >= 0) become packed rows row_map[i], or first + i.
static void pack_rows(const std::string& kernels, const Weight& w, Address in, int type, int gguf, int64_t count, int64_t first, Address row_map, int threads) {
  const Kernels& kernel = kernels_named(kernels);
  const size_t row_bytes = gguf >= 0 ? kernel.gguf_row_bytes(gguf, w.k) : size_t(w.k) * type_bytes(Type(type));
  if (!row_bytes) throw std::invalid_argument("rows of " + std::to_string(w.k) + " in GGUF type " + std::to_string(gguf) + " cannot be unpacked here");
  if (w.type == Type::packed && gguf < 0) throw std::invalid_argument("a packed weight is filled with GGUF blocks");
  const int64_t* map = (const int64_t*)row_map;
  if (first < 0 || (!map && first + count > w.n)) throw std::invalid_argument("rows beyond the weight");
  nb::gil_scoped_release release;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> temp(gguf >= 0 && w.type != Type::packed ? size_t(w.k) : 0);
#pragma omp for schedule(dynamic, 1)
    for (int64_t panel = 0; panel < (count + PANEL - 1) / PANEL; ++panel)
      for (int64_t i = panel * PANEL; i < count && i < (panel + 1) * PANEL; ++i) {
        const uint8_t* x = (const uint8_t*)in + size_t(i) * row_bytes;
        const int64_t row = map ? map[i] : first + i;
        if (w.type == Type::packed) {
          kernel.tile_row(w, row, x);
        } else if (gguf >= 0) {
          kernel.gguf_row(gguf, x, w.k, temp.data());
          kernel.pack(w, (void*)w.data, row, temp.data(), Type::f32, 1, w.k);
        } else {
          kernel.pack(w, (void*)w.data, row, x, Type(type), 1, w.k);
        }
      }
  }
}

NB_MODULE(_native, m) {
  // Objects may live until the interpreter ends: that is no leak.
  nb::set_leak_warnings(false);
  m.doc() = "Native kernels of kvist: raw addresses and sizes in.";
  m.attr("SPLIT") = SPLIT;
  m.attr("PANEL") = PANEL;
  m.def("variants", [] {
    std::vector<std::string> names;
    for (const Kernels* k : all_kernels()) names.push_back(k->name);
    return names;
  }, "Kernel variants that this machine runs, best first.");
  m.def("max_threads", [] { return omp_get_num_procs(); }, "Processors the process may use.");
  nb::class_<Weight>(m, "Weight").def("__init__", [](Weight* self, Address data, int64_t n, int64_t k, int type, bool glu) {
    new (self) Weight(weight_of(data, n, k, type, glu));
  }, "data"_a, "n"_a, "k"_a, "type"_a, "glu"_a);
  m.def("packed", &packed_of, "segments"_a, "k"_a, "glu"_a, "A weight whose segments (address, rows, GGUF type) stay packed.");
  m.def("strip_bytes", [](int type, int64_t k) { return all_kernels()[0]->strip_bytes(type, k); }, "type"_a, "k"_a,
        "Bytes of 16 packed rows; 0 for a type or width that is not held packed.");
  nb::class_<Store>(m, "Store").def("__init__", [](Store* self, Address data, int64_t num_blocks, int64_t block_bytes, int block_size, int num_kv_heads, int head_dim, int v_head_dim, int type, int group, bool value_in_key) {
    new (self) Store(store_of(data, num_blocks, block_bytes, block_size, num_kv_heads, head_dim, v_head_dim, type, group, value_in_key));
  }, "data"_a, "num_blocks"_a, "block_bytes"_a, "block_size"_a, "num_kv_heads"_a, "head_dim"_a, "v_head_dim"_a, "type"_a, "group"_a, "value_in_key"_a = false);

  m.def("pack", &pack_rows, "kernels"_a, "weight"_a, "rows"_a, "type"_a, "gguf"_a, "count"_a, "first"_a, "row_map"_a, "threads"_a,
        "Write rows (addresses; float32, bfloat16 or GGUF blocks) into a packed weight.");
  m.def("unpack", [](const std::string& kernels, const Weight& w, Address ids, int64_t count, Address out) {
    const Kernels& kernel = kernels_named(kernels);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = ((const int64_t*)ids)[i];
      if (row < 0 || row >= w.n) throw std::invalid_argument("row " + std::to_string(row) + " of " + std::to_string(w.n));
      kernel.unpack(w, row, (float*)out + i * w.k);
    }
  }, "kernels"_a, "weight"_a, "ids"_a, "count"_a, "out"_a);
  m.def("gguf_dequantize", [](const std::string& kernels, int type, Address in, int64_t rows, int64_t k, Address out) {
    const Kernels& kernel = kernels_named(kernels);
    const size_t row_bytes = kernel.gguf_row_bytes(type, k);
    if (!row_bytes) throw std::invalid_argument("rows of " + std::to_string(k) + " in GGUF type " + std::to_string(type) + " cannot be unpacked here");
    nb::gil_scoped_release release;
    for (int64_t i = 0; i < rows; ++i) kernel.gguf_row(type, (const uint8_t*)in + size_t(i) * row_bytes, k, (float*)out + i * k);
  }, "kernels"_a, "type"_a, "data"_a, "rows"_a, "k"_a, "out"_a);
  m.def("read_bandwidth", [](Address data, size_t bytes, int threads, int passes) {
    nb::gil_scoped_release release;
    return read_bandwidth((const uint8_t*)data, bytes, threads, passes);
  }, "data"_a, "bytes"_a, "threads"_a, "passes"_a);

  nb::class_<Program>(m, "Program")
      .def("__init__", [](Program* self, const std::string& kernels, int threads) {
        if (threads < 1 || threads > 1024) throw std::invalid_argument("threads must be 1 to 1024");
        new (self) Program(kernels_named(kernels), threads);
      }, "kernels"_a, "threads"_a)
      .def("__len__", &Program::size)
      .def("embed", [](Program& p, const Weight& w, float scale, Address out, int64_t out_stride, const Weight* places) {
        Op op; op.kind = OpKind::embed; op.weight = w; op.scale = scale; op.out = (void*)out; op.out_stride = out_stride;
        if (places) {
          if (places->k != w.k) throw std::invalid_argument("learned positions are as wide as the embedding");
          op.places = *places;
        }
        p.add(op);
      }, "weight"_a, "scale"_a, "out"_a, "out_stride"_a, "places"_a.none())
      .def("linear", [](Program& p, const Weight& w, Address source, int64_t source_stride, Address out, int64_t out_stride, int source_type, int act, int epilogue, int activation, Address norm, float eps, Address norm_bias, bool centred, Address bias, bool wanted, float scale, float softcap) {
        Op op; op.kind = OpKind::linear; op.weight = w; op.source = (const void*)source; op.source_stride = source_stride;
        op.out = (void*)out; op.out_stride = out_stride; op.source_type = type_of(source_type); op.act = type_of(act); op.epilogue = Epilogue(epilogue); op.activation = Activation(activation);
        op.norm = (const float*)norm; op.eps = eps; op.norm_bias = (const float*)norm_bias; op.centred = centred;
        op.bias = (const float*)bias; op.wanted = wanted; op.scale = scale; op.softcap = softcap;
        if (w.glu != (op.epilogue == Epilogue::glu)) throw std::invalid_argument("the glu epilogue goes with a glu weight");
        if (op.source_type != Type::f32 && (norm || op.source_type != w.type))
          throw std::invalid_argument("a source is float32, or without norm of the weight's own type");
        if (op.act != Type::f32 && op.act != w.type) throw std::invalid_argument("activations are float32, or of the weight's own type");
        p.add(op);
      }, "weight"_a, "source"_a, "source_stride"_a, "out"_a, "out_stride"_a, "source_type"_a, "act"_a, "epilogue"_a, "activation"_a, "norm"_a, "eps"_a, "norm_bias"_a, "centred"_a, "bias"_a, "wanted"_a, "scale"_a, "softcap"_a)
      .def("append", [](Program& p, const Store& s, Address qkv, int64_t stride, Address q_out, int64_t q_stride, int num_heads, float scale, int rotary, Address cos, Address sin, int64_t rope_rows, Address q_norm, Address k_norm, float eps) {
        Op op; op.kind = OpKind::append; op.store = s; op.source = (const void*)qkv; op.source_stride = stride; op.out = (void*)q_out; op.out_stride = q_stride;
        op.num_heads = num_heads; op.scale = scale; op.rotary = rotary; op.cos = (const float*)cos; op.sin = (const float*)sin; op.rope_rows = rope_rows;
        op.q_norm = (const float*)q_norm; op.k_norm = (const float*)k_norm; op.eps = eps;
        if (s.value_in_key) throw std::invalid_argument("keys and values do not fit a store of latent rows");
        p.add(op);
      }, "store"_a, "qkv"_a, "stride"_a, "q_out"_a, "q_stride"_a, "num_heads"_a, "scale"_a, "rotary"_a, "cos"_a, "sin"_a, "rope_rows"_a, "q_norm"_a, "k_norm"_a, "eps"_a)
      .def("attend", [](Program& p, const Store& s, Address q, int64_t q_stride, Address out, int64_t out_stride, int act, int num_heads, int window, int sinks, float softcap) {
        Op op; op.kind = OpKind::attend; op.store = s; op.source = (const void*)q; op.source_stride = q_stride; op.out = (void*)out; op.out_stride = out_stride;
        op.act = type_of(act); op.num_heads = num_heads; op.window = window; op.sinks = sinks; op.softcap = softcap;
        if (num_heads % s.kv_heads) throw std::invalid_argument("num_heads must be a multiple of num_kv_heads");
        p.add(op);
      }, "store"_a, "q"_a, "q_stride"_a, "out"_a, "out_stride"_a, "act"_a, "num_heads"_a, "window"_a, "sinks"_a, "softcap"_a)
      .def("norm_add", [](Program& p, Address source, int64_t source_stride, Address out, int64_t out_stride, int64_t width, Address norm, float eps, Address norm_bias, bool centred, bool add) {
        Op op; op.kind = add ? OpKind::norm_add : OpKind::normalise; op.norm_bias = (const float*)norm_bias; op.centred = centred;
        op.source = (const void*)source; op.source_stride = source_stride; op.out = (void*)out; op.out_stride = out_stride;
        op.weight.k = width; op.norm = (const float*)norm; op.eps = eps;
        p.add(op);
      }, "source"_a, "source_stride"_a, "out"_a, "out_stride"_a, "width"_a, "norm"_a, "eps"_a, "norm_bias"_a, "centred"_a, "add"_a)
      .def("append_latent", [](Program& p, const Store& s, Address q, int64_t q_stride, int64_t nope, Address absorbed, int64_t absorbed_stride, Address kv, int64_t kv_stride, Address q_out, int64_t q_out_stride, int num_heads, float scale, Address cos, Address sin, int64_t rope_rows, Address norm, float eps) {
        Op op; op.kind = OpKind::append_latent; op.store = s; op.source = (const void*)q; op.source_stride = q_stride; op.nope = nope;
        op.absorbed = (const float*)absorbed; op.absorbed_stride = absorbed_stride; op.latents = (const float*)kv; op.latents_stride = kv_stride;
        op.out = (void*)q_out; op.out_stride = q_out_stride; op.num_heads = num_heads; op.scale = scale;
        op.rotary = cos ? s.head_dim - s.v_head_dim : 0; op.cos = (const float*)cos; op.sin = (const float*)sin; op.rope_rows = rope_rows;
        op.norm = (const float*)norm; op.eps = eps;
        if (!s.value_in_key || nope < 0) throw std::invalid_argument("latent rows need a store whose values lie in its keys");
        p.add(op);
      }, "store"_a, "q"_a, "q_stride"_a, "nope"_a, "absorbed"_a, "absorbed_stride"_a, "kv"_a, "kv_stride"_a, "q_out"_a, "q_out_stride"_a, "num_heads"_a, "scale"_a, "cos"_a, "sin"_a, "rope_rows"_a, "norm"_a, "eps"_a)
      .def("attend_expanded", [](Program& p, const Store& s, Address q, int64_t q_stride, Address out, int64_t out_stride, int act, int num_heads, const std::vector<Weight>& keys, const std::vector<Weight>& values) {
        Op op; op.kind = OpKind::attend_expanded; op.store = s; op.source = (const void*)q; op.source_stride = q_stride; op.out = (void*)out; op.out_stride = out_stride;
        op.act = type_of(act); op.num_heads = num_heads;
        if (!s.value_in_key || num_heads < 1 || keys.size() != size_t(num_heads) || values.size() != keys.size()) throw std::invalid_argument("latents are expanded by one weight of keys and one of values for each head");
        op.weight = keys[0]; op.places = values[0];
        auto group = std::make_shared<std::vector<const void*>>();
        for (const auto* list : {&keys, &values})
          for (const Weight& w : *list) {
            if (w.n != (*list)[0].n || w.k != s.v_head_dim || w.type != s.type || w.glu || w.n % TILE) throw std::invalid_argument("weights that expand latents are of the store's type, of one shape, and whole vectors of outputs");
            group->push_back(w.data);
          }
        op.group = group;
        p.add(op);
      }, "store"_a, "q"_a, "q_stride"_a, "out"_a, "out_stride"_a, "act"_a, "num_heads"_a, "keys"_a, "values"_a)
      .def("grouped", [](Program& p, const std::vector<Weight>& weights, Address source, int64_t source_stride, int64_t slot_stride, Address out, int64_t out_stride, int64_t slots, Address ids, int64_t ids_stride, int source_type, int act, int epilogue, int activation, Address norm, float eps, Address norm_bias, bool centred, float scale) {
        if (weights.empty() || slots < 1 || (!ids && int64_t(weights.size()) != slots)) throw std::invalid_argument("a grouped product needs weights: without ids one for each slot");
        Op op; op.kind = OpKind::grouped; op.weight = weights[0]; op.weight.data = nullptr;
        auto group = std::make_shared<std::vector<const void*>>();
        for (const Weight& w : weights) {
          if (w.n != op.weight.n || w.k != op.weight.k || w.type != op.weight.type || w.glu != op.weight.glu || w.type == Type::packed)
            throw std::invalid_argument("grouped weights are bfloat16 or float32, of one shape and type");
          group->push_back(w.data);
        }
        op.group = group; op.source = (const void*)source; op.source_stride = source_stride; op.slot_stride = slot_stride;
        op.out = (void*)out; op.out_stride = out_stride; op.slots = slots; op.ids = (int32_t*)ids; op.ids_stride = ids_stride;
        op.source_type = type_of(source_type); op.act = type_of(act); op.epilogue = Epilogue(epilogue); op.activation = Activation(activation);
        op.norm = (const float*)norm; op.eps = eps; op.norm_bias = (const float*)norm_bias; op.centred = centred; op.scale = scale;
        if (op.weight.glu != (op.epilogue == Epilogue::glu) || op.epilogue == Epilogue::add) throw std::invalid_argument("a grouped epilogue is store or act, or glu for glu weights");
        if (op.source_type != Type::f32 && (norm || op.source_type != op.weight.type)) throw std::invalid_argument("a source is float32, or without norm of the weights' own type");
        if (op.act != Type::f32 && op.act != op.weight.type) throw std::invalid_argument("activations are float32, or of the weights' own type");
        p.add(op);
      }, "weights"_a, "source"_a, "source_stride"_a, "slot_stride"_a, "out"_a, "out_stride"_a, "slots"_a, "ids"_a, "ids_stride"_a, "source_type"_a, "act"_a, "epilogue"_a, "activation"_a, "norm"_a, "eps"_a, "norm_bias"_a, "centred"_a, "scale"_a)
      .def("route", [](Program& p, Address scores, int64_t scores_stride, int64_t experts, Address ids, int64_t ids_stride, Address gates, int64_t gates_stride, int64_t top_k, bool sigmoid, int64_t groups, int64_t top_groups, bool top2, Address bias, bool normalise, float scale) {
        Op op; op.kind = OpKind::route; op.source = (const void*)scores; op.source_stride = scores_stride; op.weight.n = experts;
        op.ids = (int32_t*)ids; op.ids_stride = ids_stride; op.gates = (float*)gates; op.gates_stride = gates_stride; op.slots = top_k;
        op.sigmoid = sigmoid; op.groups = groups; op.top_groups = top_groups; op.top2 = top2; op.bias = (const float*)bias; op.normalise = normalise; op.scale = scale;
        if (groups < 1 || experts < 1 || experts % groups || top_groups < 1 || top_groups > groups || (top2 && groups > 1 && experts / groups < 2) ||
            top_k < 1 || top_k > (groups > 1 ? experts / groups * top_groups : experts))
          throw std::invalid_argument("fewer experts than are to be chosen, or groups that do not divide them");
        p.add(op);
      }, "scores"_a, "scores_stride"_a, "experts"_a, "ids"_a, "ids_stride"_a, "gates"_a, "gates_stride"_a, "top_k"_a, "sigmoid"_a, "groups"_a, "top_groups"_a, "top2"_a, "bias"_a, "normalise"_a, "scale"_a)
      .def("combine", [](Program& p, Address source, int64_t source_stride, Address gates, int64_t gates_stride, Address out, int64_t out_stride, int64_t width, int64_t top_k) {
        Op op; op.kind = OpKind::combine; op.source = (const void*)source; op.source_stride = source_stride; op.gates = (float*)gates; op.gates_stride = gates_stride;
        op.out = (void*)out; op.out_stride = out_stride; op.weight.k = width; op.slots = top_k;
        p.add(op);
      }, "source"_a, "source_stride"_a, "gates"_a, "gates_stride"_a, "out"_a, "out_stride"_a, "width"_a, "top_k"_a)
      .def("run", [](Program& p, Address tokens, Address positions, Address starts, int64_t num_tokens, int64_t num_requests,
                     const std::vector<std::tuple<Address, int64_t>>& tables, Address rows, int64_t num_rows, size_t first, size_t last) {
        if (first > last || last > p.size()) throw std::invalid_argument("no such run of operations");
        std::vector<Table> t;
        for (const auto& [data, width] : tables) {
          t.push_back({(const int32_t*)data, width, {}, {}});
          find_leaders(t.back(), num_requests);
        }
        Step s;
        s.tokens = (const int32_t*)tokens; s.positions = (const int32_t*)positions; s.starts = (const int32_t*)starts; s.rows = (const int32_t*)rows;
        s.num_tokens = num_tokens; s.num_requests = num_requests; s.num_rows = num_rows; s.tables = t.data();
        nb::gil_scoped_release release;
        p.run(s, first, last);
      }, "tokens"_a, "positions"_a, "starts"_a, "num_tokens"_a, "num_requests"_a, "tables"_a, "rows"_a, "num_rows"_a, "first"_a, "last"_a);
}
