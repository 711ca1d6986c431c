// Activations as packed weights meet them: each block of 32 neighbours in 15 bits and one scale, from its own row alone.
#pragma once
#include "integers.h"

namespace KVIST_VARIANT {

constexpr int BLOCK = 32;
constexpr float MOST = 16256;  // 127 * 128: two signed bytes hold -MOST..MOST

struct Rounded {
  float scale, sum;    // x is about scale * n; sum = scale * (all n added)
  int32_t low, high;   // n of the first sixteen added, and of the last
  uint8_t data[64];    // eight groups of four n, in the form that `mac` takes
};

// Sixteen n: four groups, for `mac` with Pairs.
KV_INLINE void store_pairs(uint8_t* out, vi n) {
  int32_t x[LANES];
  int16_t y[LANES];
  store_i(x, n);
  for (int i = 0; i < LANES; i += 4) { y[i] = int16_t(x[i]); y[i + 1] = int16_t(x[i + 2]); y[i + 2] = int16_t(x[i + 1]); y[i + 3] = int16_t(x[i + 3]); }
  std::memcpy(out, y, 32);
}
// The same for `mac` with Bytes.
KV_INLINE void store_bytes(uint8_t* out, vi n) {
#if defined(KVIST_VARIANT_AVX512BF16)
  const part_i high = (n.p[0] + 64) >> 7, low = n.p[0] - (high << 7);
  const __m128i h = _mm512_cvtepi32_epi8((__m512i)high), l = _mm512_cvtepi32_epi8((__m512i)low);
  _mm_storeu_si128((__m128i*)out, _mm_unpacklo_epi32(h, l));
  _mm_storeu_si128((__m128i*)(out + 16), _mm_unpackhi_epi32(h, l));
#else
  store_pairs(out, n);
#endif
}

KV_INLINE vi nearest(vf x) {  // to the nearest integer, even on a tie; |x| below 2^22
  vi r;
  KV_EACH(r.p[i_] = (part_i)(x.p[i_] + 12582912.0f) - 0x4b400000;)
  return r;
}

// k a multiple of 32. A block that holds NaN or infinity makes every product NaN; one below 2^-100 counts as zero.
// `pairs`: in the form that opened strips take, else in that of held ones.
inline void round_row(const float* x, int64_t k, bool pairs, Rounded* out) {
  for (int64_t b = 0; b < k / BLOCK; ++b, x += BLOCK, ++out) {
    const vf a = load(x), c = load(x + LANES);
    vf ma, mc;
    KV_EACH(ma.p[i_] = (part_f)((part_u)a.p[i_] & 0x7fffffffu); mc.p[i_] = (part_f)((part_u)c.p[i_] & 0x7fffffffu);)
    const float largest = lane_max(max(ma, mc)), probe = lane_sum(fma(a, zero(), mul(c, zero())));
    float scale = largest * (1 / MOST), inverse = MOST / largest;
    if (!(probe == 0)) { scale = __builtin_nanf(""); inverse = 0; }
    else if (!(largest >= 7.888609052210118e-31f)) { scale = 0; inverse = 0; }
    const vi na = probe == 0 ? nearest(mul(a, set1(inverse))) : iset1(0), nc = probe == 0 ? nearest(mul(c, set1(inverse))) : iset1(0);
    out->low = int32_t(lane_sum(to_float(na)));  // below 2^24: exact
    out->high = int32_t(lane_sum(to_float(nc)));
    out->scale = scale;
    out->sum = scale * float(out->low + out->high);
    if (pairs) { store_pairs(out->data, na); store_pairs(out->data + 32, nc); }
    else { store_bytes(out->data, na); store_bytes(out->data + 32, nc); }
  }
}

}  // namespace KVIST_VARIANT
