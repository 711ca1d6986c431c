// Latent rows stand in the pool once, as keys: tiles with the position innermost. Multiplied as values they are wanted with
// the channel innermost, so a split's tiles are turned into scratch once and serve all heads and tokens that pass over it:
// [16 channels][positions of the split / e][16][e]. Bits are moved, nothing is computed (half precision becomes float32).
#pragma once
#include "pointwise.h"
#include "tile.h"

namespace KVIST_VARIANT {

// Sixteen rows of sixteen 4-byte units, rows `stride` bytes apart: out[c] holds unit c of all rows, in order of the rows.
#if defined(KVIST_VARIANT_AVX512BF16) || defined(KVIST_VARIANT_AVX512)
KV_INLINE void turn_units(const uint8_t* in, int64_t stride, __m512 (&out)[16]) {
  typedef double eight __attribute__((vector_size(64)));
  typedef int64_t order __attribute__((vector_size(64)));
  auto low = [](__m512 x, __m512 y) {
    return __builtin_shuffle((part_f)x, (part_f)y, part_i{0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29});
  };
  auto high = [](__m512 x, __m512 y) {
    return __builtin_shuffle((part_f)x, (part_f)y, part_i{2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31});
  };
  // Quarter j of row i + 4 l goes to lane l: what is left are 4 by 4 blocks, turned within the lanes.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    __m512 t[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      auto quarter = [&](int l) { return _mm_loadu_ps((const float*)(in + (i + 4 * l) * stride) + 4 * j); };
      t[i] = _mm512_castps128_ps512(quarter(0));
      t[i] = _mm512_mask_broadcast_f32x4(t[i], 0x00f0, quarter(1));
      t[i] = _mm512_mask_broadcast_f32x4(t[i], 0x0f00, quarter(2));
      t[i] = _mm512_mask_broadcast_f32x4(t[i], 0xf000, quarter(3));
    }
    const eight a = (eight)low(t[0], t[1]), b = (eight)low(t[2], t[3]), c = (eight)high(t[0], t[1]), d = (eight)high(t[2], t[3]);
    out[4 * j] = (__m512)__builtin_shuffle(a, b, order{0, 8, 2, 10, 4, 12, 6, 14});
    out[4 * j + 1] = (__m512)__builtin_shuffle(a, b, order{1, 9, 3, 11, 5, 13, 7, 15});
    out[4 * j + 2] = (__m512)__builtin_shuffle(c, d, order{0, 8, 2, 10, 4, 12, 6, 14});
    out[4 * j + 3] = (__m512)__builtin_shuffle(c, d, order{1, 9, 3, 11, 5, 13, 7, 15});
  }
}

// float32: 16 channels of 16 positions become 16 positions of 16 channels.
inline void turn_singles(const uint8_t* in, int64_t stride, uint8_t* out) {
  __m512 x[16];
  turn_units(in, stride, x);
  for (int p = 0; p < TILE; ++p) _mm512_storeu_ps((float*)(out + p * 64), x[p]);
}

// bfloat16: 16 pairs of channels of 16 positions become 8 pairs of positions of 16 channels, and of the 16 behind them.
inline void turn_pairs(const uint8_t* in, int64_t stride, uint8_t* low, uint8_t* high) {
  __m512 x[16];
  turn_units(in, stride, x);  // x[p]: 32 channels of position p
  const __m512i step = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i first = _mm512_or_si512(step, _mm512_slli_epi32(_mm512_add_epi32(step, _mm512_set1_epi32(32)), 16));
  const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
#pragma GCC unroll 8
  for (int u = 0; u < TILE / 2; ++u) {
    const __m512i a = _mm512_castps_si512(x[2 * u]), b = _mm512_castps_si512(x[2 * u + 1]);
    _mm512_storeu_si512(low + u * 64, _mm512_permutex2var_epi16(a, first, b));
    _mm512_storeu_si512(high + u * 64, _mm512_permutex2var_epi16(a, second, b));
  }
}
#else
// Four rows of four units, turned: out[c] holds unit c of all four.
KV_INLINE void turn_four(const uint8_t* in, int64_t stride, four_i (&out)[4]) {
  four_i x[4];
  for (int i = 0; i < 4; ++i) std::memcpy(&x[i], in + i * stride, 16);
  const four_i a = __builtin_shuffle(x[0], x[1], four_i{0, 4, 1, 5}), b = __builtin_shuffle(x[2], x[3], four_i{0, 4, 1, 5});
  const four_i c = __builtin_shuffle(x[0], x[1], four_i{2, 6, 3, 7}), d = __builtin_shuffle(x[2], x[3], four_i{2, 6, 3, 7});
  out[0] = __builtin_shuffle(a, b, four_i{0, 1, 4, 5});
  out[1] = __builtin_shuffle(a, b, four_i{2, 3, 6, 7});
  out[2] = __builtin_shuffle(c, d, four_i{0, 1, 4, 5});
  out[3] = __builtin_shuffle(c, d, four_i{2, 3, 6, 7});
}

inline void turn_singles(const uint8_t* in, int64_t stride, uint8_t* out) {
  for (int c = 0; c < LANES; c += 4)
    for (int p = 0; p < TILE; p += 4) {
      four_i x[4];
      turn_four(in + c * stride + p * 4, stride, x);
      for (int i = 0; i < 4; ++i) std::memcpy(out + (p + i) * 64 + c * 4, &x[i], 16);
    }
}

inline void turn_pairs(const uint8_t* in, int64_t stride, uint8_t* low, uint8_t* high) {
  typedef uint32_t four_u __attribute__((vector_size(16)));
  for (int c = 0; c < LANES; c += 4) {  // pairs of channels: eight channels, half a vector
    uint8_t* out = (c < LANES / 2 ? low : high) + c % (LANES / 2) * 8;
    for (int p = 0; p < TILE; p += 4) {
      four_i x[4];
      turn_four(in + c * stride + p * 4, stride, x);
      for (int i = 0; i < 4; i += 2) {
        const four_u a = (four_u)x[i], b = (four_u)x[i + 1];
        const four_i even = (four_i)((a & 0xffffu) | b << 16), odd = (four_i)(a >> 16 | (b & 0xffff0000u));
        const four_i first = __builtin_shuffle(even, odd, four_i{0, 4, 1, 5}), second = __builtin_shuffle(even, odd, four_i{2, 6, 3, 7});
        std::memcpy(out + (p + i) / 2 * 64, &first, 16);
        std::memcpy(out + (p + i) / 2 * 64 + 16, &second, 16);
      }
    }
  }
}
#endif

// Channels 0..channels-1 of one K tile: vector v of the tile's positions goes to out + v * pitch. Lanes beyond the last
// channel are zero. One vector more than the channels fill may be written.
template <class E> __attribute__((noinline)) void turn_tile(const uint8_t* tile, int64_t channels, uint8_t* out, int64_t pitch) {
  constexpr int64_t row = TILE * E::STEP * E::B_BYTES;  // bytes of one unit of channels
  const int64_t units = (channels + E::STEP - 1) / E::STEP;
  for (int64_t u = 0; u < units; u += LANES, tile += LANES * row) {
    const int64_t count = units - u < LANES ? units - u : LANES;
    const uint8_t* in = tile;
    uint8_t some[LANES * 64];
    if (std::is_same_v<E, F16>) {
      for (int64_t i = 0; i < count; ++i) store(some + i * 64, load_f16((const uint16_t*)(tile + i * row)));
      in = some;
    } else if (count < LANES) {
      std::memcpy(some, tile, size_t(count * row));
      in = some;
    }
    if (count < LANES) std::memset(some + count * 64, 0, size_t(LANES - count) * 64);
    if (E::STEP == 2) turn_pairs(in, 64, out + u / 8 * pitch, out + (u / 8 + 1) * pitch);
    else turn_singles(in, 64, out + u / 16 * pitch);
  }
}

}  // namespace KVIST_VARIANT
