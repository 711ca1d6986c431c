// Integer lanes for packed weights: bytes of weights times activations of fifteen bits, summed exactly in 32 bits.
// Exact sums have no order, so every instruction set may form them its own way and all of them agree.
#pragma once
#include "simd.h"

namespace KVIST_VARIANT {

KV_INLINE vi load_i(const void* x) { vi r; KV_EACH(r.p[i_] = *(const loose_i*)((const char*)x + i_ * PART_BYTES);) return r; }
KV_INLINE void store_i(void* x, vi a) { KV_EACH(*(loose_i*)((char*)x + i_ * PART_BYTES) = a.p[i_];) }
// Sums and products wrap: what is exact in the end may pass 2^31 on the way.
KV_INLINE vi add(vi a, vi b) { vi r; KV_EACH(r.p[i_] = (part_i)((part_u)a.p[i_] + (part_u)b.p[i_]);) return r; }
KV_INLINE vi mul(vi a, vi b) { vi r; KV_EACH(r.p[i_] = (part_i)((part_u)a.p[i_] * (part_u)b.p[i_]);) return r; }
KV_INLINE vi left(vi a, int n) { vi r; KV_EACH(r.p[i_] = (part_i)((part_u)a.p[i_] << n);) return r; }
KV_INLINE vi right(vi a, int n) { vi r; KV_EACH(r.p[i_] = (part_i)((part_u)a.p[i_] >> n);) return r; }
KV_INLINE vi masked(vi a, uint32_t m) { vi r; KV_EACH(r.p[i_] = (part_i)((part_u)a.p[i_] & m);) return r; }
KV_INLINE vf to_float(vi a) { vf r; KV_EACH(r.p[i_] = __builtin_convertvector(a.p[i_], part_f);) return r; }

// Bits `ma` of a with bits `mb` of b.
KV_INLINE vi joined(vi a, uint32_t ma, vi b, uint32_t mb) {
  vi r;
#if KVIST_PARTS == 1
  r.p[0] = (part_i)_mm512_ternarylogic_epi32((__m512i)b.p[0], _mm512_set1_epi32(int32_t(mb)), (__m512i)masked(a, ma).p[0], 0xea);
#else
  KV_EACH(r.p[i_] = (part_i)(((part_u)a.p[i_] & ma) | ((part_u)b.p[i_] & mb));)
#endif
  return r;
}

// Sixteen bytes as integers.
KV_INLINE vi from_unsigned(const uint8_t* x) {
#if KVIST_PARTS == 1
  vi r; r.p[0] = (part_i)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)x)); return r;
#else
  int32_t t[LANES];
  for (int i = 0; i < LANES; ++i) t[i] = x[i];
  return load_i(t);
#endif
}
KV_INLINE vi from_signed(const uint8_t* x) {
#if KVIST_PARTS == 1
  vi r; r.p[0] = (part_i)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)x)); return r;
#else
  int32_t t[LANES];
  for (int i = 0; i < LANES; ++i) t[i] = int8_t(x[i]);
  return load_i(t);
#endif
}

// A weight vector: 16 lanes of 4 bytes, four neighbours of K each; four activations take 8 bytes beside it. As pairs, of
// 16 bits: elements 0 and 2 of a lane, then 1 and 3.

struct Pairs { vi even, odd; };
struct PairSum { vi s; };
KV_INLINE vi value(PairSum s) { return s.s; }
KV_INLINE Pairs pairs_of(vi w) { return {masked(w, 0x00ff00ffu), masked(right(w, 8), 0x00ff00ffu)}; }

#if !defined(KVIST_VARIANT_AVX512BF16)
KV_INLINE part_i part_madd(part_i a, part_i b) {  // products of signed 16-bit pairs, added in pairs
#if KVIST_PARTS == 1
  return (part_i)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif KVIST_PARTS == 2
  return (part_i)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (part_i)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
  const int16x8_t x = vreinterpretq_s16_s32((int32x4_t)a), y = vreinterpretq_s16_s32((int32x4_t)b);
  return (part_i)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
#else
  return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}
#endif
KV_INLINE void mac(PairSum& s, Pairs w, const uint8_t* a) {
  int32_t even, odd;
  std::memcpy(&even, a, 4); std::memcpy(&odd, a + 4, 4);
#if defined(KVIST_VARIANT_AVX512BF16)
  s.s.p[0] = (part_i)_mm512_dpwssd_epi32((__m512i)s.s.p[0], (__m512i)w.even.p[0], _mm512_set1_epi32(even));
  s.s.p[0] = (part_i)_mm512_dpwssd_epi32((__m512i)s.s.p[0], (__m512i)w.odd.p[0], _mm512_set1_epi32(odd));
#else
  const part_i x = part_i{} + even, y = part_i{} + odd;
  KV_EACH(s.s.p[i_] = s.s.p[i_] + (part_madd(w.even.p[i_], x) + part_madd(w.odd.p[i_], y));)
#endif
}

// Rows of one tile, strips side by side, and the rows up to which quants are unpacked in registers, tile by tile: for more,
// strips are unpacked once into scratch.
#if KVIST_PARTS == 1
constexpr int PACKED_ROWS = 6, PACKED_STRIPS = 2, FEW = 24;
#elif KVIST_PARTS == 2
constexpr int PACKED_ROWS = 3, PACKED_STRIPS = 1, FEW = 12;
#else
constexpr int PACKED_ROWS = 2, PACKED_STRIPS = 1, FEW = 4;
#endif

#if defined(KVIST_VARIANT_AVX512BF16)
// Unsigned bytes as they are, and activations in two signed bytes, x = 128 high + low: [4 high][4 low], each with one dot
// product of bytes.
struct Bytes { vi v; };
struct ByteSum { vi high, low; };
KV_INLINE Bytes bytes_of(vi w) { return {w}; }
KV_INLINE void start(ByteSum& s, vi first) { s = {iset1(0), first}; }
KV_INLINE void mac(ByteSum& s, Bytes w, const uint8_t* a) {
  int32_t high, low;
  std::memcpy(&high, a, 4); std::memcpy(&low, a + 4, 4);
  s.high.p[0] = (part_i)_mm512_dpbusd_epi32((__m512i)s.high.p[0], (__m512i)w.v.p[0], _mm512_set1_epi32(high));
  s.low.p[0] = (part_i)_mm512_dpbusd_epi32((__m512i)s.low.p[0], (__m512i)w.v.p[0], _mm512_set1_epi32(low));
}
KV_INLINE vi value(ByteSum s) { return add(left(s.high, 7), s.low); }
#else
using Bytes = Pairs;
using ByteSum = PairSum;
KV_INLINE Bytes bytes_of(vi w) { return pairs_of(w); }
#endif
KV_INLINE void start(PairSum& s, vi first) { s = {first}; }

}  // namespace KVIST_VARIANT
