// The one inner kernel: rows of A times vectors of B, both packed along the summed axis. Linear layers, scores and
// weighted values all use it. Each output element is one chain of operations in order of the summed axis, in one
// accumulator: its bits depend neither on how many rows or columns share a tile, nor on who computes it.
#pragma once
#include <type_traits>

#include "simd.h"

namespace KVIST_VARIANT {

// Element kinds. A "unit" of A is 4 bytes: a pair of bfloat16, or one float32. STEP: elements of the summed axis a unit.

struct Bf16 {
  static constexpr int STEP = 2, VECTOR_BYTES = 64, A_BYTES = 2, B_BYTES = 2;
#if defined(KVIST_VARIANT_AVX512BF16)
  using A = __m512i;
  using B = __m512i;
  static KV_INLINE A broadcast(const uint8_t* a) { int32_t u; std::memcpy(&u, a, 4); return _mm512_set1_epi32(u); }
  static KV_INLINE B load(const uint8_t* b) { return _mm512_loadu_si512(b); }
  static KV_INLINE vf mac(vf acc, A a, B b) {
    acc.p[0] = (part_f)_mm512_dpbf16_ps((__m512)acc.p[0], (__m512bh)a, (__m512bh)b);
    return acc;
  }
#else
  struct A { vf even, odd; };
  struct B { vf even, odd; };
  static KV_INLINE A broadcast(const uint8_t* a) {
    uint32_t u; std::memcpy(&u, a, 4);
    uint32_t lo = u << 16, hi = u & 0xffff0000u;
    float x, y; std::memcpy(&x, &lo, 4); std::memcpy(&y, &hi, 4);
    return {set1(x), set1(y)};
  }
  static KV_INLINE B load(const uint8_t* b) {
    const vf raw = ::KVIST_VARIANT::load(b);
    B r;
    KV_EACH(
      part_u u = (part_u)raw.p[i_];
      r.even.p[i_] = (part_f)(u << 16);
      r.odd.p[i_] = (part_f)(u & 0xffff0000u);
    )
    return r;
  }
  static KV_INLINE vf mac(vf acc, A a, B b) { return fma(a.odd, b.odd, fma(a.even, b.even, acc)); }
#endif
};

struct F32 {
  static constexpr int STEP = 1, VECTOR_BYTES = 64, A_BYTES = 4, B_BYTES = 4;
  using A = vf;
  using B = vf;
  static KV_INLINE A broadcast(const uint8_t* a) { float x; std::memcpy(&x, a, 4); return set1(x); }
  static KV_INLINE B load(const uint8_t* b) { return ::KVIST_VARIANT::load(b); }
  static KV_INLINE vf mac(vf acc, A a, B b) { return fma(a, b, acc); }
};

struct F16 : F32 {  // stored in half precision, computed in float32
  static constexpr int VECTOR_BYTES = 32, B_BYTES = 2;
  static KV_INLINE B load(const uint8_t* b) { return load_f16((const uint16_t*)b); }
};

// Where row r, step k of A stands: `Packed<R>` [step][R] units, `Strided<S>` rows S bytes apart.
template <int R> struct Packed { static constexpr int ROW = 4, STEP = 4 * R; };
template <int S> struct Strided { static constexpr int ROW = S, STEP = 4; };

// What stands `ahead` bytes further may be fetched meanwhile, so that memory is read while the registers work: into every
// cache, or, where it is read `once`, past them all but the first.
enum class Fetch { none, kept, once };
template <class E, class L, int R, int V, Fetch FETCH, class Columns, class Sink>
KV_INLINE void tile(const uint8_t* a, int64_t v, int64_t stride, int64_t steps, const Columns& columns, Sink& sink, int64_t ahead) {
  const uint8_t* b[V];
  vf acc[R][V];
#pragma GCC unroll 8
  for (int j = 0; j < V; ++j) b[j] = columns(v + j);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) acc[r][j] = sink.first(r, v + j);
  for (int64_t k = 0; k < steps; ++k) {
    if constexpr (requires { sink.ahead(); }) sink.ahead();
    typename E::B x[V];
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) x[j] = E::load(b[j] + k * stride);
    if constexpr (FETCH != Fetch::none)
#pragma GCC unroll 8
      for (int j = 0; j < V; ++j) __builtin_prefetch(b[j] + k * stride + ahead, 0, FETCH == Fetch::once ? 0 : 3);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      typename E::A y = E::broadcast(a + k * L::STEP + r * L::ROW);
#pragma GCC unroll 8
      for (int j = 0; j < V; ++j) acc[r][j] = E::mac(acc[r][j], y, x[j]);
    }
  }
  sink.template done<R, V>(v, acc);
}

// All vectors v0..v1 for R rows, as many at a time as the registers hold.
template <class E, class L, int R, Fetch FETCH = Fetch::none, class Columns, class Sink>
inline void sweep(const uint8_t* a, int64_t v0, int64_t v1, int64_t stride, int64_t steps, const Columns& columns, Sink& sink, int64_t ahead = 0) {
  constexpr int MOST = MAX_ACC / R;
  int64_t v = v0;
  if constexpr (MOST >= 8) for (; v + 8 <= v1; v += 8) tile<E, L, R, 8, FETCH>(a, v, stride, steps, columns, sink, ahead);
  if constexpr (MOST >= 4) for (; v + 4 <= v1; v += 4) tile<E, L, R, 4, FETCH>(a, v, stride, steps, columns, sink, ahead);
  if constexpr (MOST >= 2) for (; v + 2 <= v1; v += 2) tile<E, L, R, 2, FETCH>(a, v, stride, steps, columns, sink, ahead);
  for (; v < v1; ++v) tile<E, L, R, 1, FETCH>(a, v, stride, steps, columns, sink, ahead);
}

template <class F> inline void with_rows(int rows, F&& f) {
  switch (rows) {
#define KV_CASE(R) case R: if constexpr (R <= MAX_ROWS) f(std::integral_constant<int, R>{}); break;
    KV_CASE(1) KV_CASE(2) KV_CASE(3) KV_CASE(4) KV_CASE(5) KV_CASE(6)
    KV_CASE(7) KV_CASE(8) KV_CASE(9) KV_CASE(10) KV_CASE(11) KV_CASE(12)
#undef KV_CASE
    default: break;
  }
}

}  // namespace KVIST_VARIANT
