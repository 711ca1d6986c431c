// y = act(norm(source)) W^T over packed weights. Per output and block of 32 columns, in order of K:
//   I = sum of n (u - OFFSET), an exact integer (with two 16-column factors: factor times each half's sum, added);
//   y = fma(float(I), d * scale, y), then for types with a minimum y = fma(m, sum, y).
// Each output element is that one chain, whoever computes it beside how many others.
#pragma once
#include "linear.h"
#include "strips.h"

namespace KVIST_VARIANT {

template <class S, int R, int V>
KV_INLINE void strip_tile(const Rounded* a, int64_t pitch, const S* strips, int64_t blocks, float* y, int64_t strip_pitch) {
  vf acc[R][V];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) acc[r][v] = zero();
  for (int64_t b = 0; b < blocks; ++b) {
    Factored f[V];
    vi total[R][V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) { strips[v].fetch(b); f[v] = strips[v].factored(b); }
#pragma GCC unroll 2
    for (int part = 0; part < (S::SUB ? 2 : 1); ++part) {
      typename S::Sum sum[R][V];
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const Rounded& x = a[r * pitch + b];
        const vi first = iset1(S::OFFSET == 0 ? 0 : -S::OFFSET * (S::SUB ? (part ? x.high : x.low) : x.low + x.high));
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) start(sum[r][v], first);
      }
#pragma GCC unroll 8
      for (int g = S::SUB ? 4 * part : 0; g < (S::SUB ? 4 * part + 4 : 8); ++g) {
        typename S::Quants w[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) w[v] = strips[v].columns(b, g);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
          for (int v = 0; v < V; ++v) mac(sum[r][v], w[v], a[r * pitch + b].data + 8 * g);
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) {
          const vi i = value(sum[r][v]);
          if constexpr (!S::SUB) total[r][v] = i;
          else total[r][v] = part ? add(total[r][v], mul(i, f[v].second)) : mul(i, f[v].first);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const Rounded& x = a[r * pitch + b];
      const vf scale = set1(x.scale), sum = set1(x.sum);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
        acc[r][v] = fma(to_float(total[r][v]), mul(f[v].d, scale), acc[r][v]);
        if constexpr (S::MIN) acc[r][v] = fma(f[v].m, sum, acc[r][v]);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) store(y + v * strip_pitch + r * LANES, acc[r][v]);
}

// At most PACKED_ROWS rows times one or two strips of one form; y [strip][row][lane].
template <class S, int V>
inline void strip_rows(int rows, const Rounded* a, int64_t pitch, const S* strips, int64_t blocks, float* y, int64_t strip_pitch) {
  switch (rows) {
#define KV_CASE(R) case R: if constexpr (R <= PACKED_ROWS) strip_tile<S, R, V>(a, pitch, strips, blocks, y, strip_pitch); break;
    KV_CASE(1) KV_CASE(2) KV_CASE(3) KV_CASE(4) KV_CASE(5) KV_CASE(6)
#undef KV_CASE
    default: break;
  }
}

struct Strip { const uint8_t* at; int format; int64_t column, end; };

inline int64_t strips_of(const Segment& s) { return (s.rows + LANES - 1) / LANES; }
inline Strip strip_of(const Segment& s, int64_t i, int64_t k) {
  return {s.data + i * strip_bytes(s.format, k), s.format, s.first + i * LANES, s.first + s.rows};
}

struct PackedProduct {
  const Op& op;
  const Rounded* a;   // [row][block]
  int64_t m, blocks;
  uint8_t* scratch;   // two strips opened, when there are many rows
  float* y;           // [strip][row][lane] of one row tile
  Output output;

  void finish(const Strip* strips, int count, int64_t t, int rows) const {
    for (int r = 0; r < rows; ++r) {
      if (op.epilogue == Epilogue::glu) output.glu(t + r, strips[0].column / LANES, load(y + r * LANES), load(y + (PACKED_ROWS + r) * LANES));
      else for (int v = 0; v < count; ++v) output.plain(t + r, strips[v].column, strips[v].end, load(y + (v * PACKED_ROWS + r) * LANES));
    }
  }
  // One or two strips (a gate and its up strip) times rows t0..t1.
  void run(const Strip* strips, int count, int64_t t0, int64_t t1) const {
    const int64_t k = op.weight.k, ahead = 8192;  // bytes: about what memory answers while as much is multiplied
    if (m <= FEW) {
      times(strips, count, t0, t1, [&](auto f, int v) { return Held<decltype(f)>(strips[v].at, k, ahead); });
      return;
    }
    auto room = [&](int v) { return scratch + v * blocks * OPENED_BYTES; };
    for (int v = 0; v < count; ++v)
      with_format(strips[v].format, [&](auto f) { open_strip(Held<decltype(f)>(strips[v].at, k, ahead), k, room(v)); });
    times(strips, count, t0, t1, [&](auto f, int v) { return Opened<decltype(f)::MIN>{room(v)}; });
  }
  // The same over strips in the form that form(format, v) gives: side by side where the registers hold two of one form.
  template <class Form> void times(const Strip* strips, int count, int64_t t0, int64_t t1, Form&& form) const {
    const bool beside = PACKED_STRIPS == 2 && count == 2 && strips[0].format == strips[1].format;
    const int64_t tiles = (t1 - t0 + PACKED_ROWS - 1) / PACKED_ROWS, height = (t1 - t0 + tiles - 1) / tiles;
    for (int64_t t = t0; t < t1; t += height) {
      const int rows = int(std::min(height, t1 - t));
      for (int v = 0; v < count; v += beside ? 2 : 1)
        with_format(strips[v].format, [&](auto f) {
          using S = decltype(form(f, v));
          const S s[2] = {form(f, v), form(f, beside ? 1 : v)};
          if (beside) strip_rows<S, PACKED_STRIPS>(rows, a + t * blocks, blocks, s, blocks, y, PACKED_ROWS * LANES);
          else strip_rows<S, 1>(rows, a + t * blocks, blocks, s, blocks, y + v * PACKED_ROWS * LANES, 0);
        });
      finish(strips, count, t, rows);
    }
  }
};

inline size_t packed_common(const Op& op, const Step& step) {
  return size_t(op.wanted ? step.num_rows : step.num_tokens) * size_t(op.weight.k / BLOCK) * sizeof(Rounded);
}

inline void multiply_packed(const Op& op, const Step& step, Team& team) {
  const Weight& w = op.weight;
  const int64_t m = op.wanted ? step.num_rows : step.num_tokens, k = w.k, blocks = k / BLOCK;
  if (m == 0) return;
  const bool few = m <= FEW, alone = m <= 4;  // alone: each thread rounds the rows itself, which costs less than waiting for others
  const size_t temp_bytes = (size_t(k) * 4 + 63) / 64 * 64, y_bytes = 2 * PACKED_ROWS * LANES * 4;
  const size_t a_bytes = alone ? size_t(m * blocks) * sizeof(Rounded) : 0, opened = few ? 0 : size_t(2 * blocks * OPENED_BYTES);
  uint8_t* mine = team.own->at(temp_bytes + y_bytes + opened + a_bytes);
  float* temp = (float*)mine;
  Rounded* a = alone ? (Rounded*)(mine + temp_bytes + y_bytes + opened) : (Rounded*)team.common;
  auto prepare = [&](int64_t r) {
    const float* x = (const float*)op.source + (op.wanted ? step.rows[r] : r) * op.source_stride;
    if (op.norm) { row_norm(op, x, k, temp); x = temp; }
    round_row(x, k, !few, a + r * blocks);
  };
  if (!alone) share(team, m, few ? 1 : 8, prepare);
  bool ready = !alone;
  const PackedProduct product{op, a, m, blocks, mine + temp_bytes + y_bytes, (float*)(mine + temp_bytes), {op, 0, op.out_stride}};
  const int64_t deep = few ? m : std::clamp<int64_t>((512 << 10) / (blocks * int64_t(sizeof(Rounded))), 96, 512), down = (m + deep - 1) / deep;
  int64_t units = 0;  // pairs of strips; of each segment by itself, or of gate and up
  for (const Segment& s : w.segments) units += w.glu ? (&s == w.segments.data() ? strips_of(s) : 0) : (strips_of(s) + 1) / 2;
  const int64_t run = few ? std::clamp<int64_t>(units / 32, 1, 16) : 1, across = (units + run - 1) / run;
  share(team, across * down, 1, [&](int64_t item) {
    if (!ready) for (int64_t r = 0; r < m; ++r) prepare(r);
    ready = true;
    const int64_t t0 = item / across * deep, t1 = std::min(m, t0 + deep);
    for (int64_t unit = item % across * run; unit < std::min(units, (item % across + 1) * run); ++unit) {
      if (w.glu) {
        const Strip pair[2] = {strip_of(w.segments[0], unit, k), strip_of(w.segments[1], unit, k)};
        product.run(pair, 2, t0, t1);
        continue;
      }
      int64_t i = unit;
      const Segment* s = w.segments.data();
      for (; i >= (strips_of(*s) + 1) / 2; ++s) i -= (strips_of(*s) + 1) / 2;
      const int64_t half = (strips_of(*s) + 1) / 2;  // from both halves of a segment: two long runs of memory
      const int count = half + i < strips_of(*s) ? 2 : 1;
      const Strip pair[2] = {strip_of(*s, i, k), strip_of(*s, count == 2 ? half + i : i, k)};
      product.run(pair, count, t0, t1);
    }
  });
}

}  // namespace KVIST_VARIANT
