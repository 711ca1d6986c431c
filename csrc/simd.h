// The few primitives that differ between instruction sets. Everything above works on `vf`, sixteen float lanes,
// held in as many native registers as the variant needs. No primitive depends on data layout or thread count.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace KVIST_VARIANT {

constexpr int LANES = 16;

#if defined(KVIST_VARIANT_AVX512BF16) || defined(KVIST_VARIANT_AVX512)
#define KVIST_PARTS 1
constexpr int PART_LANES = 16;
constexpr int MAX_ACC = 24;   // accumulators of one tile: rows x vectors
constexpr int MAX_ROWS = 12;  // rows of one tile
#elif defined(KVIST_VARIANT_AVX2)
#define KVIST_PARTS 2
constexpr int PART_LANES = 8;
constexpr int MAX_ACC = 6;
constexpr int MAX_ROWS = 3;
#elif defined(__aarch64__)
#define KVIST_PARTS 4
constexpr int PART_LANES = 4;
constexpr int MAX_ACC = 6;
constexpr int MAX_ROWS = 3;
#else
#define KVIST_PARTS 4
constexpr int PART_LANES = 4;
constexpr int MAX_ACC = 4;
constexpr int MAX_ROWS = 2;
#endif
constexpr int PARTS = KVIST_PARTS;
static_assert(PARTS * PART_LANES == LANES);
constexpr int PART_BYTES = PART_LANES * 4;

typedef float part_f __attribute__((vector_size(PART_BYTES)));
typedef int32_t part_i __attribute__((vector_size(PART_BYTES)));
typedef uint32_t part_u __attribute__((vector_size(PART_BYTES)));

// The same at any address. Memory is read and written register by register: a copy of the whole would pass by the stack.
typedef float loose_f __attribute__((vector_size(PART_BYTES), aligned(1), may_alias));
typedef int32_t loose_i __attribute__((vector_size(PART_BYTES), aligned(1), may_alias));

struct vf { part_f p[PARTS]; };
struct vi { part_i p[PARTS]; };

#define KV_INLINE inline __attribute__((always_inline))
// Once for each native register, written out: loops over parts would keep tiles in memory instead of registers.
#define KV_ONCE(i, ...) { constexpr int i_ = i; __VA_ARGS__ }
#if KVIST_PARTS == 1
#define KV_EACH(...) KV_ONCE(0, __VA_ARGS__)
#elif KVIST_PARTS == 2
#define KV_EACH(...) KV_ONCE(0, __VA_ARGS__) KV_ONCE(1, __VA_ARGS__)
#else
#define KV_EACH(...) KV_ONCE(0, __VA_ARGS__) KV_ONCE(1, __VA_ARGS__) KV_ONCE(2, __VA_ARGS__) KV_ONCE(3, __VA_ARGS__)
#endif

KV_INLINE part_f part_fma(part_f a, part_f b, part_f c) {
#if defined(KVIST_VARIANT_AVX512BF16) || defined(KVIST_VARIANT_AVX512)
  return (part_f)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(KVIST_VARIANT_AVX2)
  return (part_f)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (part_f)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;  // two roundings: contraction is off, so the result is the same on every machine without FMA
#endif
}

KV_INLINE vf fma(vf a, vf b, vf c) { vf r; KV_EACH(r.p[i_] = part_fma(a.p[i_], b.p[i_], c.p[i_]);) return r; }
KV_INLINE vf add(vf a, vf b) { vf r; KV_EACH(r.p[i_] = a.p[i_] + b.p[i_];) return r; }
KV_INLINE vf sub(vf a, vf b) { vf r; KV_EACH(r.p[i_] = a.p[i_] - b.p[i_];) return r; }
KV_INLINE vf mul(vf a, vf b) { vf r; KV_EACH(r.p[i_] = a.p[i_] * b.p[i_];) return r; }
KV_INLINE vf div(vf a, vf b) { vf r; KV_EACH(r.p[i_] = a.p[i_] / b.p[i_];) return r; }
// One instruction from memory. (`part_f{} + x` would be an addition as well: 0 + -0 is not -0.)
KV_INLINE part_f part_set1(float x) {
#if defined(KVIST_VARIANT_AVX512BF16) || defined(KVIST_VARIANT_AVX512)
  return (part_f)_mm512_set1_ps(x);
#elif defined(KVIST_VARIANT_AVX2)
  return (part_f)_mm256_set1_ps(x);
#else
  return part_f{x, x, x, x};
#endif
}
KV_INLINE vf set1(float x) { vf r; KV_EACH(r.p[i_] = part_set1(x);) return r; }
KV_INLINE vf zero() { vf r; KV_EACH(r.p[i_] = part_f{};) return r; }
KV_INLINE vf load(const void* x) { vf r; KV_EACH(r.p[i_] = *(const loose_f*)((const char*)x + i_ * PART_BYTES);) return r; }
KV_INLINE void store(void* x, vf a) { KV_EACH(*(loose_f*)((char*)x + i_ * PART_BYTES) = a.p[i_];) }
// Lane-wise choice by comparison: the other side's value never enters an operation, so NaN and infinity stay out.
KV_INLINE vf select(vi mask, vf a, vf b) { vf r; KV_EACH(r.p[i_] = (part_f)(((part_i)a.p[i_] & mask.p[i_]) | ((part_i)b.p[i_] & ~mask.p[i_]));) return r; }
KV_INLINE vi less(vf a, vf b) { vi r; KV_EACH(r.p[i_] = a.p[i_] < b.p[i_];) return r; }
KV_INLINE vi less_equal(vi a, vi b) { vi r; KV_EACH(r.p[i_] = a.p[i_] <= b.p[i_];) return r; }
KV_INLINE vi less(vi a, vi b) { vi r; KV_EACH(r.p[i_] = a.p[i_] < b.p[i_];) return r; }
KV_INLINE vi both(vi a, vi b) { vi r; KV_EACH(r.p[i_] = a.p[i_] & b.p[i_];) return r; }
KV_INLINE vi either(vi a, vi b) { vi r; KV_EACH(r.p[i_] = a.p[i_] | b.p[i_];) return r; }
KV_INLINE vi iset1(int32_t x) { vi r; KV_EACH(r.p[i_] = part_i{} + x;) return r; }
KV_INLINE vi lanes_from(int32_t first) {
  int32_t x[LANES];
  for (int i = 0; i < LANES; ++i) x[i] = first + i;
  vi r; KV_EACH(r.p[i_] = *(const loose_i*)(x + i_ * PART_LANES);) return r;
}
// a where a > b, else b (also when either is NaN).
KV_INLINE vf max(vf a, vf b) {
#if defined(KVIST_VARIANT_AVX512BF16) || defined(KVIST_VARIANT_AVX512)
  vf r; r.p[0] = (part_f)_mm512_maskz_max_ps(0xffff, (__m512)a.p[0], (__m512)b.p[0]); return r;
#elif defined(KVIST_VARIANT_AVX2)
  vf r; KV_EACH(r.p[i_] = (part_f)_mm256_max_ps((__m256)a.p[i_], (__m256)b.p[i_]);) return r;
#else
  vf r; KV_EACH(r.p[i_] = (part_f)(((part_i)a.p[i_] & (a.p[i_] > b.p[i_])) | ((part_i)b.p[i_] & ~(a.p[i_] > b.p[i_])));) return r;
#endif
}

// Sums and maxima across lanes in one fixed tree: lane i with lane i + 8, then + 4, + 2, + 1.
typedef float four_f __attribute__((vector_size(16)));
typedef int32_t four_i __attribute__((vector_size(16)));
template <class F> KV_INLINE float across(vf a, F join) {
  four_f x[4];
#if defined(KVIST_VARIANT_AVX512BF16) || defined(KVIST_VARIANT_AVX512)
  x[0] = (four_f)_mm512_castps512_ps128((__m512)a.p[0]);
  x[1] = (four_f)_mm512_extractf32x4_ps((__m512)a.p[0], 1);
  x[2] = (four_f)_mm512_extractf32x4_ps((__m512)a.p[0], 2);
  x[3] = (four_f)_mm512_extractf32x4_ps((__m512)a.p[0], 3);
#else
  store(x, a);
#endif
  four_f y = join(join(x[0], x[2]), join(x[1], x[3]));
  y = join(y, __builtin_shuffle(y, four_i{2, 3, 0, 1}));
  y = join(y, __builtin_shuffle(y, four_i{1, 0, 3, 2}));
  return y[0];
}
KV_INLINE float lane_sum(vf a) { return across(a, [](four_f x, four_f y) { return x + y; }); }
KV_INLINE float lane_max(vf a) {
  return across(a, [](four_f x, four_f y) { const four_i m = x > y; return (four_f)(((four_i)x & m) | ((four_i)y & ~m)); });
}

// ---- bfloat16 and float16 -----------------------------------------------------------------------------------------

KV_INLINE uint16_t bf16_of(float x) {  // round to nearest even; NaN stays NaN; denormals kept
  uint32_t u; std::memcpy(&u, &x, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40u);
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
KV_INLINE float bf16_to(uint16_t h) { uint32_t u = uint32_t(h) << 16; float x; std::memcpy(&x, &u, 4); return x; }

KV_INLINE vf round_bf16(vf a) {  // to bfloat16 and back, as bf16_of does it
  vf r;
  KV_EACH(
    part_u u = (part_u)a.p[i_];
    part_u up = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
    part_u nan = (part_u)((u & 0x7fffffffu) > 0x7f800000u);
    r.p[i_] = (part_f)((up & ~nan) | (((u & 0xffff0000u) | 0x00400000u) & nan));
  )
  return r;
}
KV_INLINE void store_bf16(uint16_t* out, vf a) {
  vf r = round_bf16(a);
#if defined(KVIST_VARIANT_AVX512BF16) || defined(KVIST_VARIANT_AVX512)
  _mm256_storeu_si256((__m256i*)out, _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)((part_u)r.p[0] >> 16)));
#else
  uint32_t x[LANES]; store(x, r);
  for (int i = 0; i < LANES; ++i) out[i] = uint16_t(x[i] >> 16);
#endif
}
// Round and store sixteen probabilities (no denormals among them); gives back what was stored.
KV_INLINE vf keep_bf16(uint16_t* out, vf a) {
#if defined(KVIST_VARIANT_AVX512BF16)
  const __m256i h = (__m256i)_mm512_cvtneps_pbh((__m512)a.p[0]);
  _mm256_storeu_si256((__m256i*)out, h);
  vf r; r.p[0] = (part_f)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16); return r;
#else
  a = round_bf16(a);
  store_bf16(out, a);
  return a;
#endif
}
KV_INLINE vf load_bf16(const uint16_t* in) {
#if defined(KVIST_VARIANT_AVX512BF16) || defined(KVIST_VARIANT_AVX512)
  vf r; r.p[0] = (part_f)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)in)), 16); return r;
#else
  uint32_t x[LANES];
  for (int i = 0; i < LANES; ++i) x[i] = uint32_t(in[i]) << 16;
  return load(x);
#endif
}

KV_INLINE float f16_to(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  uint32_t sign = uint32_t(h & 0x8000u) << 16, exp = (h >> 10) & 31u, man = h & 0x3ffu, u;
  if (exp == 31u) u = sign | 0x7f800000u | (man << 13) | (man ? 0x400000u : 0u);
  else if (exp) u = sign | ((exp + 112u) << 23) | (man << 13);
  else { float f = float(man) * 5.9604644775390625e-8f; std::memcpy(&u, &f, 4); u |= sign; }
  float x; std::memcpy(&x, &u, 4); return x;
#endif
}
KV_INLINE uint16_t f16_of(float x) {
#if defined(__F16C__)
  return uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
  uint32_t u; std::memcpy(&u, &x, 4);
  uint32_t sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return uint16_t(sign | 0x7e00u | ((a >> 13) & 0x3ffu));
  if (a >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
  if (a < 0x38800000u) {  // a denormal half: adding 0.5 rounds at the right bit
    float f; std::memcpy(&f, &a, 4); f += 0.5f; std::memcpy(&a, &f, 4);
    return uint16_t(sign | (a - 0x3f000000u));
  }
  return uint16_t(sign | ((a + 0xfffu + ((a >> 13) & 1u) - 0x38000000u) >> 13));
#endif
}
KV_INLINE vf load_f16(const uint16_t* in) {
#if defined(KVIST_VARIANT_AVX512BF16) || defined(KVIST_VARIANT_AVX512)
  vf r; r.p[0] = (part_f)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)in)); return r;
#elif defined(KVIST_VARIANT_AVX2)
  vf r;
  for (int i = 0; i < 2; ++i) r.p[i] = (part_f)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(in + 8 * i)));
  return r;
#elif defined(__aarch64__)
  vf r;
  for (int i = 0; i < 4; ++i) r.p[i] = (part_f)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(in + 4 * i)));
  return r;
#else
  float x[LANES];
  for (int i = 0; i < LANES; ++i) x[i] = f16_to(in[i]);
  return load(x);
#endif
}

// ---- elementary functions ------------------------------------------------------------------------------------------

// x as n ln 2 + y (two-part reduction, Cody and Waite); gives back exp(y) by a polynomial of degree 6, and 1.5 * 2^23 + n.
KV_INLINE part_f part_exp(part_f x, part_f& shifted) {
  const part_f shift = part_f{} + 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  shifted = part_fma(x, part_f{} + 1.44269504088896341f, shift);
  const part_f n = shifted - shift;
  part_f y = part_fma(n, part_f{} - 0.693359375f, x);
  y = part_fma(n, part_f{} + 2.12194440e-4f, y);
  part_f q = part_f{} + 1.9875691500e-4f;
  q = part_fma(q, y, part_f{} + 1.3981999507e-3f);
  q = part_fma(q, y, part_f{} + 8.3334519073e-3f);
  q = part_fma(q, y, part_f{} + 4.1665795894e-2f);
  q = part_fma(q, y, part_f{} + 1.6666665459e-1f);
  q = part_fma(q, y, part_f{} + 5.0000001201e-1f);
  return part_fma(q * y, y, y) + 1.0f;
}

// exp, within 2 ulp. Results that would be denormal are exactly 0, so exp(-inf) is 0; above 88.72 the result is +inf; NaN
// stays NaN.
KV_INLINE vf exp(vf x) {
  vf r;
  KV_EACH(
    const part_f v = x.p[i_];
    const part_i low = v < -87.33654f, high = v > 88.72283f, nan = v != v;
    part_f shifted;
    const part_f q = part_exp((part_f)((part_i)v & ~(low | high | nan)), shifted);  // 0 in lanes decided below
    const part_i power = (part_i)shifted - 0x4b400000, half = power >> 1;  // in two factors: 2^128 alone is not a float
    part_f s = q * (part_f)((half + 127) << 23) * (part_f)((power - half + 127) << 23);
    const part_f inf = part_f{} + __builtin_inff();
    s = (part_f)((part_i)s & ~low);
    s = (part_f)(((part_i)s & ~high) | ((part_i)inf & high));
    r.p[i_] = (part_f)(((part_i)s & ~nan) | ((part_i)v & nan));
  )
  return r;
}

// exp for x <= 0 (or NaN, which stays NaN), to the same bits as `exp`: the checks for large x are left out.
KV_INLINE vf exp_negative(vf x) {
  vf r;
#if defined(KVIST_VARIANT_AVX512BF16) || defined(KVIST_VARIANT_AVX512)
  const __mmask16 seen = _mm512_cmp_ps_mask((__m512)x.p[0], _mm512_set1_ps(-87.33654f), _CMP_NLT_UQ);
  part_f shifted;
  const part_f q = part_exp(x.p[0], shifted), n = shifted - 12582912.0f;
  r.p[0] = (part_f)_mm512_maskz_scalef_ps(seen, (__m512)q, (__m512)n);
#else
  KV_EACH(
    const part_f v = x.p[i_];
    const part_i low = v < -87.33654f;
    part_f shifted;
    const part_f q = part_exp((part_f)((part_i)v & ~low), shifted);
    const part_i power = (part_i)shifted - 0x4b400000;
    r.p[i_] = (part_f)((part_i)(q * (part_f)((power + 127) << 23)) & ~low);
  )
#endif
  return r;
}

// tanh: odd polynomial below 0.625 (Cephes), else 1 - 2 / (exp(2|x|) + 1), sign restored.
KV_INLINE vf tanh(vf x) {
  vf a, sign, small;
  KV_EACH(
    part_u u = (part_u)x.p[i_];
    a.p[i_] = (part_f)(u & 0x7fffffffu);
    sign.p[i_] = (part_f)(u & 0x80000000u);
    part_f v = x.p[i_], z = v * v;
    part_f q = part_f{} - 5.70498872745e-3f;
    q = part_fma(q, z, part_f{} + 2.06390887954e-2f);
    q = part_fma(q, z, part_f{} - 5.37397155531e-2f);
    q = part_fma(q, z, part_f{} + 1.33314422036e-1f);
    q = part_fma(q, z, part_f{} - 3.33332819422e-1f);
    small.p[i_] = part_fma(q * z, v, v);
  )
  vf big = sub(set1(1.0f), div(set1(2.0f), add(exp(add(a, a)), set1(1.0f))));
  KV_EACH(big.p[i_] = (part_f)((part_u)big.p[i_] | (part_u)sign.p[i_]);)
  return select(less(a, set1(0.625f)), small, big);
}

// erf within 2e-7: x P(x^2) below 1, else 1 - exp(-R(|x|)) with R fitted to -ln erfc on [1, 4]; from 4 on it is 1.
KV_INLINE vf erf(vf x) {
  vf a, small, tail;
  KV_EACH(
    a.p[i_] = (part_f)((part_u)x.p[i_] & 0x7fffffffu);
    part_f v = x.p[i_], z = v * v;
    part_f q = part_f{} + -9.673590238e-06f;
    q = part_fma(q, z, part_f{} + 1.126825370e-04f);
    q = part_fma(q, z, part_f{} + -8.484396524e-04f);
    q = part_fma(q, z, part_f{} + 5.221053411e-03f);
    q = part_fma(q, z, part_f{} + -2.686543831e-02f);
    q = part_fma(q, z, part_f{} + 1.128378262e-01f);
    q = part_fma(q, z, part_f{} + -3.761263848e-01f);
    q = part_fma(q, z, part_f{} + 1.128379167e+00f);
    small.p[i_] = v * q;
    part_i far = a.p[i_] > 4.0f;
    part_f t = (part_f)(((part_i)a.p[i_] & ~far) | ((part_i)(part_f{} + 4.0f) & far));
    part_f r = part_f{} + 1.330939038e-05f;
    r = part_fma(r, t, part_f{} + -3.175720344e-04f);
    r = part_fma(r, t, part_f{} + 3.436867597e-03f);
    r = part_fma(r, t, part_f{} + -2.262198592e-02f);
    r = part_fma(r, t, part_f{} + 1.033189800e-01f);
    r = part_fma(r, t, part_f{} + 6.390933195e-01f);
    r = part_fma(r, t, part_f{} + 1.125925949e+00f);
    r = part_fma(r, t, part_f{} + 7.569686285e-04f);
    tail.p[i_] = -r;
  )
  vf wide = sub(set1(1.0f), exp(tail));
  KV_EACH(wide.p[i_] = (part_f)((part_u)wide.p[i_] | ((part_u)x.p[i_] & 0x80000000u));)
  return select(less(a, set1(1.0f)), small, wide);
}

}  // namespace KVIST_VARIANT
