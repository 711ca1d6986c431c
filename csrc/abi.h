// What the variants and the program share: operation records, the step, the team of threads, the table of kernels.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace kvist {

enum class Type : int32_t { f32 = 0, bf16 = 1, f16 = 2, packed = 3 };
enum class OpKind : int32_t { embed, linear, append, attend, norm_add, normalise, append_latent, attend_expanded, grouped, route, combine };
enum class Epilogue : int32_t { store, add, glu, act };
enum class Activation : int32_t { silu, gelu_tanh, gelu };

constexpr int SPLIT = 128;  // keys of one attention split, at absolute positions
constexpr int TILE = 16;    // positions of one K tile
constexpr int PANEL = 32;   // output columns of one weight panel

// A packed matrix [N, K]: panels of 32 columns, K in order, bfloat16 in pairs: [N/32][K/2][32][2], float32 [N/32][K][32].
// A glu weight's panel holds 16 gate columns, then the 16 up columns of the same outputs.
// A packed weight (strips.h) has no data of its own but segments, one below the other: rows of one GGUF type each, in
// strips of 16. A glu weight then has two, gate and up.
struct Segment { const uint8_t* data; int64_t first, rows; int32_t format; };

struct Weight {
  const void* data = nullptr;
  int64_t n = 0, k = 0;  // n counts gate and up; columns beyond n are zero
  Type type = Type::f32;
  bool glu = false;
  std::vector<Segment> segments;
};

struct Store {  // one layer's blocks; see LayerStore in ops.py for the format
  uint8_t* data = nullptr;
  int64_t num_blocks = 0, block_bytes = 0;
  int32_t block_size = 0, kv_heads = 0, head_dim = 0, v_head_dim = 0, group = 0;
  Type type = Type::f32;
  bool value_in_key = false;  // latent rows: no V part, a value is the first v_head_dim channels of its key
};

struct Op {
  OpKind kind{};
  // embed, linear, norm_add, normalise
  Weight weight;
  Weight places;  // embed: learned positions [positions, K], or no data
  const void* source = nullptr;
  void* out = nullptr;
  int64_t source_stride = 0, out_stride = 0;  // elements
  Type act = Type::f32;                       // element type of an act output
  Type source_type = Type::f32;
  const float* norm = nullptr;
  const float* norm_bias = nullptr;
  bool centred = false;                       // layer norm: the mean is taken off first
  float eps = 0, scale = 1, softcap = 0;      // softcap 0: none
  const float* bias = nullptr;
  Epilogue epilogue = Epilogue::store;
  Activation activation = Activation::silu;
  bool wanted = false;
  // append, attend
  Store store;
  int32_t num_heads = 0, rotary = 0, window = 0, sinks = 0;  // window 0: none
  const float *cos = nullptr, *sin = nullptr, *q_norm = nullptr, *k_norm = nullptr;
  int64_t rope_rows = 0;
  // append_latent: `source` holds each head's `nope` + R channels; without `absorbed` those are what is kept
  const float *absorbed = nullptr, *latents = nullptr;
  int64_t absorbed_stride = 0, latents_stride = 0, nope = 0;
  // attend_expanded: `weight` and `places` are the shapes of each head's W_UK and W_UV, `group` all W_UK, then all W_UV.
  // grouped: the matrices, all of the shape of `weight`, whose own data is unused; slot s reads the row at s * slot_stride
  std::shared_ptr<const std::vector<const void*>> group;
  int64_t slots = 0, slot_stride = 0, ids_stride = 0;
  int32_t* ids = nullptr;  // grouped: read, or no ids; route: written
  // route, combine: `slots` is k, `weight.n` the number of experts, `bias` what is added to choose
  float* gates = nullptr;
  int64_t gates_stride = 0, groups = 1, top_groups = 1;
  bool sigmoid = false, top2 = false, normalise = false;
};

// Block ids [B, width] of one group of layers. `leader[b]` is the first request whose leading `lead[b]` blocks are the same
// as those of b (b itself, and 0, when there is none): their keys can be read once for both.
struct Table {
  const int32_t* data = nullptr;
  int64_t width = 0;
  std::vector<int32_t> leader, lead;
};

struct Step {
  const int32_t *tokens = nullptr, *positions = nullptr, *starts = nullptr, *rows = nullptr;
  int64_t num_tokens = 0, num_requests = 0, num_rows = 0;
  const Table* tables = nullptr;
};

// One piece of work that the team shares out: items 0..total-1, handed out by a counter and counted when finished. Who
// computes an item never enters its arithmetic.
struct alignas(64) Phase {
  std::atomic<int64_t> next{0}, finished{0}, total{-1};
};

struct Scratch { std::vector<uint8_t> bytes; uint8_t* at(size_t need); };

// A member of the team that runs a program. A phase ends when its items are finished, not when every member has come by:
// a thread that the system has taken off its core holds nobody up unless it is in the middle of an item.
struct Team {
  Phase* phase;     // the current one; phases of a program follow each other in memory
  Scratch* own;     // this thread's
  int members;      // threads that were asked for
  uint8_t* common;  // the team's, large enough for the operation: Kernels::common_bytes

  // The next `count` items; the caller finishes those below the phase's total.
  int64_t take(int64_t count) { return phase->next.fetch_add(count, std::memory_order_relaxed); }
  // The phase's total as the first member to come here counted it. One who comes late may count what a later operation has
  // written meanwhile (experts chosen in the next layer): it takes the first one's word, and finds nothing left to do.
  int64_t agree(int64_t total) {
    int64_t known = -1;
    return phase->total.compare_exchange_strong(known, total, std::memory_order_relaxed) ? total : known;
  }
  void finish(int64_t count) { phase->finished.fetch_add(count, std::memory_order_release); }
  void wait(int64_t total);  // until all items are finished; then the next phase begins
};

// Calls work(i) for each item that falls to this thread, `run` neighbours at a time, and waits for the others' items.
template <class Work> inline __attribute__((always_inline)) void share(Team& team, int64_t total, int64_t run, Work&& work) {
  total = team.agree(total);
  for (int64_t first; (first = team.take(run)) < total;) {
    const int64_t last = first + run < total ? first + run : total;
    for (int64_t i = first; i < last; ++i) work(i);
    team.finish(last - first);
  }
  team.wait(total);
}

constexpr int WAVES = 8;  // most rounds in which attention over latents computes and merges
constexpr int phases_of(const Op& op) { return op.kind == OpKind::attend && op.store.value_in_key ? 2 * WAVES : 2; }  // at most

// One instruction set's kernels. `common_bytes`: the shared scratch that an operation needs in this step.
struct Kernels {
  const char* name;
  void (*exec)(const Op&, const Step&, Team&);
  size_t (*common_bytes)(const Op&, const Step&);
  void (*pack)(const Weight&, void* data, int64_t row, const void* rows, Type type, int64_t count, int64_t stride);
  void (*unpack)(const Weight&, int64_t row, float* out);
  int64_t (*strip_bytes)(int type, int64_t k);  // 0: a GGUF type that is not held packed
  void (*tile_row)(const Weight&, int64_t row, const uint8_t* in);
  size_t (*gguf_row_bytes)(int type, int64_t k);  // 0: not known here
  void (*gguf_row)(int type, const uint8_t* in, int64_t k, float* out);
};

inline size_t type_bytes(Type t) { return t == Type::f32 ? 4 : 2; }

}  // namespace kvist
