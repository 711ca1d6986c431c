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
constexpr int PART_LANES = 16;
constexpr int MAX_ACC = 24;   // accumulators of one tile: rows x vectors
constexpr int MAX_ROWS = 12;  // rows of one tile
#elif defined(KVIST_VARIANT_AVX2)
constexpr int PART_LANES = 8;
constexpr int MAX_ACC = 6;
constexpr int MAX_ROWS = 3;
#elif defined(__aarch64__)
constexpr int PART_LANES = 4;
constexpr int MAX_ACC = 6;
constexpr int MAX_ROWS = 3;
#else
constexpr int PART_LANES = 4;
constexpr int MAX_ACC = 4;
constexpr int MAX_ROWS = 2;
#endif
constexpr int PARTS = LANES / PART_LANES;
constexpr int PART_BYTES = PART_LANES * 4;

typedef float part_f __attribute__((vector_size(PART_BYTES)));
typedef int32_t part_i __attribute__((vector_size(PART_BYTES)));
typedef uint32_t part_u __attribute__((vector_size(PART_BYTES)));

struct vf { part_f p[PARTS]; };
struct vi { part_i p[PARTS]; };

#define KV_INLINE inline __attribute__((always_inline))
#define KV_EACH for (int i_ = 0; i_ < PARTS; ++i_)

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

KV_INLINE vf fma(vf a, vf b, vf c) { vf r; KV_EACH r.p[i_] = part_fma(a.p[i_], b.p[i_], c.p[i_]); return r; }
KV_INLINE vf add(vf a, vf b) { vf r; KV_EACH r.p[i_] = a.p[i_] + b.p[i_]; return r; }
KV_INLINE vf sub(vf a, vf b) { vf r; KV_EACH r.p[i_] = a.p[i_] - b.p[i_]; return r; }
KV_INLINE vf mul(vf a, vf b) { vf r; KV_EACH r.p[i_] = a.p[i_] * b.p[i_]; return r; }
KV_INLINE vf div(vf a, vf b) { vf r; KV_EACH r.p[i_] = a.p[i_] / b.p[i_]; return r; }
KV_INLINE vf set1(float x) { vf r; KV_EACH r.p[i_] = part_f{} + x; return r; }
KV_INLINE vf zero() { vf r; KV_EACH r.p[i_] = part_f{}; return r; }
KV_INLINE vf load(const float* x) { vf r; std::memcpy(&r, x, sizeof r); return r; }
KV_INLINE void store(float* x, vf a) { std::memcpy(x, &a, sizeof a); }
// Lane-wise choice by comparison: the other side's value never enters an operation, so NaN and infinity stay out.
KV_INLINE vf select(vi mask, vf a, vf b) { vf r; KV_EACH r.p[i_] = (part_f)(((part_i)a.p[i_] & mask.p[i_]) | ((part_i)b.p[i_] & ~mask.p[i_])); return r; }
KV_INLINE vi less(vf a, vf b) { vi r; KV_EACH r.p[i_] = a.p[i_] < b.p[i_]; return r; }
KV_INLINE vi less_equal(vi a, vi b) { vi r; KV_EACH r.p[i_] = a.p[i_] <= b.p[i_]; return r; }
KV_INLINE vi less(vi a, vi b) { vi r; KV_EACH r.p[i_] = a.p[i_] < b.p[i_]; return r; }
KV_INLINE vi both(vi a, vi b) { vi r; KV_EACH r.p[i_] = a.p[i_] & b.p[i_]; return r; }
KV_INLINE vi either(vi a, vi b) { vi r; KV_EACH r.p[i_] = a.p[i_] | b.p[i_]; return r; }
KV_INLINE vi iset1(int32_t x) { vi r; KV_EACH r.p[i_] = part_i{} + x; return r; }
KV_INLINE vi lanes_from(int32_t first) {
  int32_t x[LANES];
  for (int i = 0; i < LANES; ++i) x[i] = first + i;
  vi r; std::memcpy(&r, x, sizeof r); return r;
}
KV_INLINE vf max(vf a, vf b) { vf r; KV_EACH r.p[i_] = (part_f)(((part_i)a.p[i_] & (a.p[i_] > b.p[i_])) | ((part_i)b.p[i_] & ~(a.p[i_] > b.p[i_]))); return r; }

// Sums and maxima across lanes in one fixed tree: lane i with lane i + 8, then + 4, + 2, + 1.
KV_INLINE float lane_sum(vf a) {
  float x[LANES]; store(x, a);
  for (int step = 8; step; step >>= 1) for (int i = 0; i < step; ++i) x[i] = x[i] + x[i + step];
  return x[0];
}
KV_INLINE float lane_max(vf a) {
  float x[LANES]; store(x, a);
  for (int step = 8; step; step >>= 1) for (int i = 0; i < step; ++i) x[i] = x[i] > x[i + step] ? x[i] : x[i + step];
  return x[0];
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
  KV_EACH {
    part_u u = (part_u)a.p[i_];
    part_u up = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
    part_u nan = (part_u)((u & 0x7fffffffu) > 0x7f800000u);
    r.p[i_] = (part_f)((up & ~nan) | (((u & 0xffff0000u) | 0x00400000u) & nan));
  }
  return r;
}
KV_INLINE void store_bf16(uint16_t* out, vf a) {
  vf r = round_bf16(a);
#if defined(KVIST_VARIANT_AVX512BF16) || defined(KVIST_VARIANT_AVX512)
  _mm256_storeu_si256((__m256i*)out, _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)((part_u)r.p[0] >> 16)));
#else
  uint32_t x[LANES]; std::memcpy(x, &r, sizeof r);
  for (int i = 0; i < LANES; ++i) out[i] = uint16_t(x[i] >> 16);
#endif
}
KV_INLINE vf load_bf16(const uint16_t* in) {
#if defined(KVIST_VARIANT_AVX512BF16) || defined(KVIST_VARIANT_AVX512)
  vf r; r.p[0] = (part_f)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)in)), 16); return r;
#else
  uint32_t x[LANES];
  for (int i = 0; i < LANES; ++i) x[i] = uint32_t(in[i]) << 16;
  vf r; std::memcpy(&r, x, sizeof r); return r;
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

// exp, within 2 ulp: two-part reduction by ln 2 (Cody and Waite), degree 6 polynomial on [-ln2/2, ln2/2].
// Results that would be denormal are exactly 0, so exp(-inf) is 0; above 88.72 the result is +inf; NaN stays NaN.
KV_INLINE vf exp(vf x) {
  vf r;
  KV_EACH {
    part_f v = x.p[i_];
    part_i low = v < -87.33654f, high = v > 88.72283f, nan = v != v;
    part_f c = (part_f)((part_i)v & ~(low | high | nan));  // 0 in lanes decided below
    part_f shift = part_f{} + 12582912.0f;                 // 1.5 * 2^23: adding it rounds to an integer
    part_f n = part_fma(c, part_f{} + 1.44269504088896341f, shift) - shift;
    part_f y = part_fma(n, part_f{} - 0.693359375f, c);
    y = part_fma(n, part_f{} + 2.12194440e-4f, y);
    part_f q = part_f{} + 1.9875691500e-4f;
    q = part_fma(q, y, part_f{} + 1.3981999507e-3f);
    q = part_fma(q, y, part_f{} + 8.3334519073e-3f);
    q = part_fma(q, y, part_f{} + 4.1665795894e-2f);
    q = part_fma(q, y, part_f{} + 1.6666665459e-1f);
    q = part_fma(q, y, part_f{} + 5.0000001201e-1f);
    q = part_fma(q * y, y, y) + 1.0f;
    part_i e = __builtin_convertvector(n, part_i);
    part_i half = e >> 1;  // in two factors: 2^128 alone is not a float
    part_f s = q * (part_f)((half + 127) << 23) * (part_f)((e - half + 127) << 23);
    part_f inf = part_f{} + __builtin_inff();
    s = (part_f)((part_i)s & ~low);
    s = (part_f)(((part_i)s & ~high) | ((part_i)inf & high));
    r.p[i_] = (part_f)(((part_i)s & ~nan) | ((part_i)v & nan));
  }
  return r;
}

// tanh: odd polynomial below 0.625 (Cephes), else 1 - 2 / (exp(2|x|) + 1), sign restored.
KV_INLINE vf tanh(vf x) {
  vf a, sign, small;
  KV_EACH {
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
  }
  vf big = sub(set1(1.0f), div(set1(2.0f), add(exp(add(a, a)), set1(1.0f))));
  KV_EACH big.p[i_] = (part_f)((part_u)big.p[i_] | (part_u)sign.p[i_]);
  return select(less(a, set1(0.625f)), small, big);
}

}  // namespace KVIST_VARIANT
