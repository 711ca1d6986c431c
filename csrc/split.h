// Attention over blocks, in splits of 128 keys at absolute positions. Every split starts afresh: its own maximum, its own
// sum, probabilities relative to that maximum. Splits are merged in ascending order by `fold`, in decode and prefill
// alike, so that chunks, neighbours, block sizes and threads cannot reach the bits. Keys that a query may not see are
// removed by select, their values are never multiplied: fresh memory may hold NaN.
#pragma once
#include <algorithm>

#include "pointwise.h"
#include "tile.h"
#include "turn.h"

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

struct Partial { float m, l; };  // maximum and sum of one split, or of all splits so far; m is -inf where nothing was seen

// Joins one split's results, of up to LANES rows, to what the splits before it gave. The only merge formula there is.
// A sum that underflowed to -0 differs from one that met further zeros, so +0 is added to what comes in.
template <class From, class Values> inline void fold(int rows, Partial* to, float* out, From&& from, Values&& values, int64_t width) {
  float x[LANES], y[LANES];
  for (int r = 0; r < LANES; ++r) x[r] = y[r] = 0;
  for (int r = 0; r < rows; ++r) {
    const float m = from(r).m > to[r].m ? from(r).m : to[r].m;
    x[r] = to[r].m - m;
    y[r] = from(r).m - m;
    to[r].m = m;
  }
  store(x, exp(load(x)));
  store(y, exp(load(y)));
  for (int r = 0; r < rows; ++r) {
    if (from(r).m == -__builtin_inff()) continue;  // nothing was seen: nothing changes
    to[r].l = to[r].l * x[r] + from(r).l * y[r];
    const vf a = set1(x[r]), b = set1(y[r]);
    float* sum = out + r * width;
    const float* o = values(r);
    for (int64_t i = 0; i < width; i += LANES) store(sum + i, fma(add(load(o + i), zero()), b, mul(load(sum + i), a)));
  }
}

// Where one split's keys and values stand, tile of 16 positions by tile; null where nothing is stored.
struct Keys { const uint8_t *k[TILES], *v[TILES]; };

// The keys of the split that comes next, asked for a cache line at a time while this one is computed: over latents the
// first pass of scores would otherwise wait for all of them, and nothing else would read memory.
struct Ahead {
  const uint8_t *at = nullptr, *end = nullptr;
  const uint8_t* tiles[TILES];
  int64_t bytes = 0;
  int left = 0;
  void start(const Keys* keys, int64_t tile_bytes) {
    at = end = nullptr; bytes = tile_bytes; left = 0;
    if (keys) for (int t = TILES - 1; t >= 0; --t) if (keys->k[t]) tiles[left++] = keys->k[t];
  }
  KV_INLINE void line() {
    if (at == end) {
      if (!left) return;
      at = tiles[--left]; end = at + bytes;
    }
    __builtin_prefetch(at, 0, 2);
    at += 64;
  }
};

// Calls at(tile, block, inside) for each tile of one split: `block` is null where nothing is stored, else `inside` counts
// the tiles of the block.
template <class At> inline void locate(const Op& op, const Step& step, int64_t request, int64_t split, At&& at) {
  const Table& table = step.tables[op.store.group];
  const int64_t size = op.store.block_size, run = std::min<int64_t>(size, SPLIT) / TILE;
  for (int64_t t = 0; t < TILES; t += run) {
    const int64_t p = split * SPLIT + t * TILE, i = p / size, inside = (p - i * size) / TILE;
    const int32_t id = i < table.width ? table.data[request * table.width + i] : -1;
    const uint8_t* block = id < 0 ? nullptr : op.store.data + int64_t(id) * op.store.block_bytes;
    for (int64_t j = 0; j < run; ++j) at(t + j, block, inside + j);
  }
}

template <class E> struct Attention {
  const Op& op;
  const Step& step;
  const int64_t d, dv, group, vectors, width;  // width: v_head_dim rounded up to whole vectors
  const bool latent;  // values lie in the keys: those of a split are turned into `turned`
  const bool fetches;  // keys and values are equally wide: what comes next stands at one distance from what is read
  const int64_t k_part, head_bytes, k_tile, v_tile, v_unit, v_vector;  // bytes; v_vector: from one vector of channels to the next
  static constexpr int64_t P_ROW = SPLIT * E::A_BYTES, TURNED = SPLIT / E::STEP * 64;
  // this thread's working memory
  float *scores, *values, *result;  // result: where the next split's values go, `pitch` floats from row to row
  int64_t pitch;
  uint8_t *weights, *queries, *zeros, *edge, *turned;
  uint32_t done = 0;  // tiles of the present split that have been turned
  const uint8_t* ask = nullptr;  // lines that the softmax fetches, which the first values' pass would ask for
  bool again = false;  // further tiles of rows will read the split that is fetched
  Ahead next;

  static int64_t v_width(const Store& kept) { return (kept.v_head_dim + LANES - 1) / LANES * LANES; }
  static size_t own_bytes(const Store& kept, int64_t rows) {
    const int64_t d = kept.head_dim, w = v_width(kept);
    const int64_t turned = kept.value_in_key ? (w / LANES + 1) * TURNED : 0;
    return size_t(MAX_ROWS * SPLIT * 4 + MAX_ROWS * w * 4 + MAX_ROWS * SPLIT * 4 + rows * d * 4 + d * TILE * 4 + w * 4 + turned + 7 * 64);
  }

  // `kept`: how the keys and values lie that are attended; the operation's own store, or one like it.
  Attention(const Op& o, const Store& kept, const Step& s, uint8_t* memory, int64_t rows)
      : op(o), step(s), d(kept.head_dim), dv(kept.v_head_dim), group(o.num_heads / kept.kv_heads),
        vectors(v_width(kept) / LANES), width(v_width(kept)), latent(kept.value_in_key), fetches(d == dv && !latent),
        k_part(int64_t(kept.block_size) * d * E::B_BYTES),
        head_bytes(k_part + (latent ? 0 : int64_t(kept.block_size) * dv * E::B_BYTES)), k_tile(int64_t(TILE) * d * E::B_BYTES),
        v_tile(latent ? TILE / E::STEP * 64 : int64_t(TILE) * dv * E::B_BYTES), v_unit(latent ? 64 : dv * E::STEP * E::B_BYTES),
        v_vector(latent ? TURNED : E::VECTOR_BYTES) {
    auto next = [&](int64_t bytes) { uint8_t* p = memory; memory += (bytes + 63) / 64 * 64; return p; };
    scores = (float*)next(MAX_ROWS * SPLIT * 4);
    values = (float*)next(MAX_ROWS * width * 4);
    into(values, width);
    weights = next(MAX_ROWS * SPLIT * 4);
    queries = next(rows * d * 4);
    zeros = next(d * TILE * 4);
    edge = next(width * 4);
    turned = next(latent ? (vectors + 1) * TURNED : 0);
    std::memset(zeros, 0, size_t(d) * TILE * 4);
  }

  void into(float* rows, int64_t apart) { result = rows; pitch = apart; }

  Keys find(int64_t request, int64_t head, int64_t split) const {
    Keys keys;
    locate(op, step, request, split, [&](int64_t t, const uint8_t* block, int64_t inside) {
      const uint8_t* base = block ? block + head * head_bytes : nullptr;
      keys.k[t] = base ? base + inside * k_tile : nullptr;
      keys.v[t] = !base ? nullptr : latent ? turned + t * v_tile : base + k_part + inside * v_tile;
    });
    return keys;
  }

  // Tiles are read in the order K, V, the next split's K; while some are multiplied, as many that come after them are
  // fetched: about 8 KiB, which memory gives meanwhile and the first cache holds, but enough that R rows fill the registers.
  int64_t stage(int64_t rows) const {
    int64_t tiles = std::clamp<int64_t>(8192 / k_tile, 1, std::min<int64_t>(op.store.block_size, SPLIT) / TILE);
    while (tiles * rows < 8 && tiles < TILES) tiles *= 2;
    return tiles;
  }
  static int64_t apart(const uint8_t* from, const uint8_t* to) { return from && to ? to - from : 0; }
  template <class F> void fetching(F&& f) const {
    if (again) f(std::integral_constant<Fetch, Fetch::kept>{});
    else f(std::integral_constant<Fetch, Fetch::once>{});
  }

  // Queries of one tile of rows, units of 4 bytes: [step][row].
  void load_queries(uint8_t* tile, int64_t rows, const int64_t* tokens, const int64_t* heads) {
    const int64_t units = d / E::STEP;
    uint32_t* out = (uint32_t*)tile;
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t* q = (const uint8_t*)op.source + (tokens[r] * op.source_stride + heads[r] * d) * E::A_BYTES;
      for (int64_t i = 0; i < units; ++i) std::memcpy(out + i * rows + r, q + 4 * i, 4);
    }
  }

  struct Values {
    float* out;
    int64_t pitch;
    bool fresh;
    KV_INLINE vf first(int r, int64_t v) const { return fresh ? zero() : load(out + r * pitch + v * LANES); }
    template <int R, int V> KV_INLINE void done(int64_t v, vf (&acc)[R][V]) const {
      for (int r = 0; r < R; ++r) for (int j = 0; j < V; ++j) store(out + r * pitch + (v + j) * LANES, acc[r][j]);
    }
  };
  struct LatentValues : Values {
    Ahead& next;
    KV_INLINE void ahead() const { next.line(); }
  };
  template <int R, Fetch FETCH = Fetch::none>
  void multiply(int row, int64_t key, int64_t units, const uint8_t* v, int64_t stride, int64_t vector, bool& fresh, int64_t ahead = 0) {
    Values sink{result + row * pitch, pitch, fresh};
    auto columns = [&](int64_t i) { return v + i * vector; };
    const uint8_t* p = weights + row * P_ROW + key * E::A_BYTES;
    fresh = false;
    if (latent) {
      LatentValues turned_sink{sink, next};
      return sweep<std::conditional_t<std::is_same_v<E, F16>, F32, E>, Strided<int(P_ROW)>, R>(p, 0, vectors, stride, units, columns, turned_sink);
    }
    sweep<E, Strided<int(P_ROW)>, R, FETCH>(p, 0, vectors, stride, units, columns, sink, ahead);
  }
  // One unit (a position, or a pair of them) by way of `edge`, with the position that may not be seen blanked.
  template <int R> void multiply_edge(int row, int64_t key, int64_t blank, const uint8_t* v, bool& fresh) {
    if (latent) {
      for (int64_t i = 0; i < vectors; ++i) std::memcpy(edge + i * 64, v + i * v_vector, 64);
    } else {
      std::memset(edge, 0, size_t(width) * 4);
      std::memcpy(edge, v, size_t(v_unit));
    }
    if (blank >= 0) for (int64_t i = 0; i < width; ++i) ((uint16_t*)edge)[2 * i + blank] = 0;
    multiply<R>(row, key, 1, edge, width * 4, E::VECTOR_BYTES, fresh);
  }

  // Weighted values of keys range.lo..range.hi-1 for R rows from `row`, added to result[] in order of position. Meanwhile
  // the keys of split `soon` are fetched, if there is one.
  template <int R> void gather(const Keys& keys, int row, Range range, bool& fresh, const Keys* soon = nullptr) {
    constexpr int64_t e = E::STEP;
    const int64_t run = soon ? stage(R) : TILES;
    for (int64_t key = range.lo; key < range.hi;) {
      const int64_t t = key / TILE;
      if (!keys.v[t]) { key = (t + 1) * TILE; continue; }
      int64_t last = t;  // tiles that follow each other in memory are taken in one go
      while (last + 1 < TILES && (last + 1) % run && (last + 1) * TILE < range.hi && keys.v[last + 1] == keys.v[last] + v_tile) ++last;
      const int64_t stop = std::min(range.hi, (last + 1) * TILE);
      auto at = [&](int64_t k) { return keys.v[t] + (k - t * TILE) / e * v_unit; };
      if (e == 2 && key % 2) { multiply_edge<R>(row, key - 1, 0, at(key), fresh); ++key; }
      const int64_t units = (stop - key) / e;
      if (latent || dv % LANES == 0) {
        if (units && soon) {
          const int64_t ahead = apart(keys.v[t], t + run < TILES ? keys.v[t + run] : soon->k[t + run - TILES]);
          fetching([&](auto how) { multiply<R, decltype(how)::value>(row, key, units, at(key), v_unit, v_vector, fresh, ahead); });
        }
        else if (units) multiply<R>(row, key, units, at(key), v_unit, v_vector, fresh);
      } else {  // rows that do not fill whole vectors are copied first, so that no load passes their end
        for (int64_t i = 0; i < units; ++i) multiply_edge<R>(row, key + i * e, -1, at(key + i * e), fresh);
      }
      key += units * e;
      if (key < stop) { multiply_edge<R>(row, key, 1, at(key), fresh); ++key; }
    }
  }

  // Whether R rows of result[] hold neither infinity nor NaN.
  template <int R> bool finite() const {
    vf some = zero();  // x - x is 0 or NaN
    for (int r = 0; r < R; ++r)
      for (int64_t i = 0; i < width; i += LANES) { const vf x = load(result + r * pitch + i); some = add(some, sub(x, x)); }
    return lane_sum(some) == 0;
  }

  struct Scores {
    float* out;
    KV_INLINE vf first(int, int64_t) const { return zero(); }
    template <int R, int V> KV_INLINE void done(int64_t v, vf (&acc)[R][V]) const {
      for (int r = 0; r < R; ++r) for (int j = 0; j < V; ++j) store(out + r * SPLIT + (v + j) * LANES, acc[r][j]);
    }
  };

  struct LatentScores : Scores {
    Ahead& next;
    KV_INLINE void ahead() const { next.line(); }
  };

  // One split for R rows: partial results in part[] and result[]. part.m is -inf where a row sees nothing of it.
  // `soon`: the split that follows for this thread; null when nothing has to be fetched, since earlier rows did.
  template <int R> void split(const Keys& keys, const Keys* soon, const uint8_t* q, int64_t s, const int64_t* positions, Partial* part) {
    View view[R];
    Range all{SPLIT, 0};
    bool alike = true;
    int64_t oldest = positions[0];
    for (int r = 1; r < R; ++r) oldest = std::min(oldest, positions[r]);
    if (!op.window && (s + 1) * SPLIT <= oldest + 1) {  // all see all of it
      for (int r = 0; r < R; ++r) { view[r].part[0] = {0, SPLIT}; view[r].count = 1; }
      all = {0, SPLIT};
    } else {
      for (int r = 0; r < R; ++r) {
        view[r] = view_of(positions[r], op.window, op.sinks, s);
        for (int i = 0; i < view[r].count; ++i) all = {std::min(all.lo, view[r].part[i].lo), std::max(all.hi, view[r].part[i].hi)};
        alike = alike && view[r] == view[0];
      }
    }
    for (int r = 0; r < R; ++r) part[r] = {-__builtin_inff(), 0};
    if (all.lo >= all.hi) return;
    const int64_t t0 = all.lo / TILE, t1 = (all.hi + TILE - 1) / TILE;
    Scores sink{scores};
    auto columns = [&](int64_t t) { return keys.k[t] ? keys.k[t] : zeros; };
    if (latent && done) {  // the first rows of a pass wait for their own keys
      LatentScores later{sink, next};
      sweep<E, Packed<R>, R>(q, t0, t1, E::VECTOR_BYTES, d / E::STEP, columns, later);
    } else if (soon) {
      const int64_t run = stage(R);
      for (int64_t t = t0; t < t1; t += run) {
        const int64_t ahead = apart(keys.k[t], t + run < TILES ? keys.k[t + run] : keys.v[t + run - TILES]);
        fetching([&](auto how) {
          sweep<E, Packed<R>, R, decltype(how)::value>(q, t, std::min(t1, t + run), E::VECTOR_BYTES, d / E::STEP, columns, sink, ahead);
        });
      }
    } else {
      sweep<E, Packed<R>, R>(q, t0, t1, E::VECTOR_BYTES, d / E::STEP, columns, sink);
    }
    ask = !soon || again ? nullptr : stage(R) < TILES ? keys.v[stage(R)] : soon->k[0];
    for (int r = 0; r < R; ++r) part[r] = softmax(r, view[r], t0, t1);
    if (latent) turn(keys, t0, t1);
    bool fresh = true;
    if (alike) {
      for (int i = 0; i < view[0].count; ++i) gather<R>(keys, 0, view[0].part[i], fresh, soon);
      return;
    }
    // Probabilities of unseen keys are exactly 0, and so is 0 times a finite value. When a value may have been none, each
    // row takes only what it sees.
    gather<R>(keys, 0, all, fresh, soon);
    if (finite<R>()) return;
    for (int r = 0; r < R; ++r) {
      fresh = true;
      for (int i = 0; i < view[r].count; ++i) gather<1>(keys, r, view[r].part[i], fresh);
    }
  }

  void turn(const Keys& keys, int64_t t0, int64_t t1) {
    for (int64_t t = t0; t < t1; ++t) {
      if (done >> t & 1 || !keys.k[t]) continue;
      turn_tile<E>(keys.k[t], dv, turned + t * v_tile, TURNED);
      done |= uint32_t(1) << t;
    }
  }

  Partial softmax(int r, const View& view, int64_t t0, int64_t t1) {
    float* s = scores + r * SPLIT;
    uint8_t* out = weights + r * P_ROW;
    if (view.count == 0) { std::memset(out, 0, size_t(P_ROW)); return {-__builtin_inff(), 0}; }
    const vf low = set1(-__builtin_inff());
    vf top = low;
    if (op.softcap != 0) for (int64_t t = t0; t < t1; ++t) store(s + t * TILE, cap(load(s + t * TILE), op.softcap));
    if (view.whole()) {
      for (int64_t t = t0; t < t1; ++t) top = max(load(s + t * TILE), top);
    } else {
      for (int64_t t = t0; t < t1; ++t) {
        if (view.part[view.count - 1].lo <= t * TILE && (t + 1) * TILE <= view.part[view.count - 1].hi) {
          top = max(load(s + t * TILE), top);
          continue;
        }
        const vi lane = lanes_from(int32_t(t * TILE));
        vi seen = iset1(0);
        for (int i = 0; i < view.count; ++i)
          seen = either(seen, both(less_equal(iset1(int32_t(view.part[i].lo)), lane), less(lane, iset1(int32_t(view.part[i].hi)))));
        const vf x = select(seen, load(s + t * TILE), low);
        store(s + t * TILE, x);
        top = max(x, top);
      }
    }
    float m = lane_max(top);
    if (!(m >= -__FLT_MAX__ && m <= __FLT_MAX__)) m = tame(s, view, t0, t1);
    vf sum = zero();
    for (int64_t t = t0; t < t1; ++t) {
      if (ask) { __builtin_prefetch(ask, 0, 0); ask += 64; }  // memory need not wait until values ask
      vf p = exp_negative(sub(load(s + t * TILE), set1(m)));
      if (E::STEP == 2) p = keep_bf16((uint16_t*)out + t * TILE, p);
      else store((float*)out + t * TILE, p);
      sum = add(sum, p);
    }
    return {m, lane_sum(sum)};
  }

  // Infinite scores take all the weight instead of making inf - inf, only -inf seen weighs alike, NaN makes NaN.
  static float tame(float* s, const View& view, int64_t t0, int64_t t1) {
    float m = -__builtin_inff();
    bool nan = false;
    for (int i = 0; i < view.count; ++i)
      for (int64_t key = std::max(view.part[i].lo, t0 * TILE); key < std::min(view.part[i].hi, t1 * TILE); ++key) {
        s[key] = s[key] > __FLT_MAX__ ? __FLT_MAX__ : s[key] < -__FLT_MAX__ ? -__FLT_MAX__ : s[key];
        nan = nan || s[key] != s[key];
        m = s[key] > m ? s[key] : m;
      }
    return nan ? __builtin_nanf("") : m;
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

}  // namespace KVIST_VARIANT
