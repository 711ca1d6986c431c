// GGUF block formats to float32, value for value what the `gguf` package gives: the same products in the same order.
#pragma once
#include <cstring>

#include "abi.h"

namespace KVIST_VARIANT {
namespace gguf {

inline float half_to(const uint8_t* p) {
  uint16_t h; std::memcpy(&h, p, 2);
  uint32_t sign = uint32_t(h & 0x8000u) << 16, e = (h >> 10) & 31u, m = h & 0x3ffu, u;
  if (e == 31u) u = sign | 0x7f800000u | (m << 13);
  else if (e) u = sign | ((e + 112u) << 23) | (m << 13);
  else { float f = float(m) * 5.9604644775390625e-8f; std::memcpy(&u, &f, 4); u |= sign; }
  float x; std::memcpy(&x, &u, 4); return x;
}

struct Format { int type; int64_t block; size_t bytes; void (*decode)(const uint8_t*, float*); };

inline void q4_0(const uint8_t* b, float* y) {
  const float d = half_to(b);
  for (int i = 0; i < 16; ++i) { y[i] = d * float(int(b[2 + i] & 15) - 8); y[i + 16] = d * float(int(b[2 + i] >> 4) - 8); }
}
inline void q4_1(const uint8_t* b, float* y) {
  const float d = half_to(b), m = half_to(b + 2);
  for (int i = 0; i < 16; ++i) { y[i] = d * float(b[4 + i] & 15) + m; y[i + 16] = d * float(b[4 + i] >> 4) + m; }
}
inline void q5_0(const uint8_t* b, float* y) {
  const float d = half_to(b);
  uint32_t high; std::memcpy(&high, b + 2, 4);
  for (int i = 0; i < 16; ++i) {
    y[i] = d * float(int((b[6 + i] & 15) | ((high >> i & 1) << 4)) - 16);
    y[i + 16] = d * float(int((b[6 + i] >> 4) | ((high >> (i + 16) & 1) << 4)) - 16);
  }
}
inline void q5_1(const uint8_t* b, float* y) {
  const float d = half_to(b), m = half_to(b + 2);
  uint32_t high; std::memcpy(&high, b + 4, 4);
  for (int i = 0; i < 16; ++i) {
    y[i] = d * float((b[8 + i] & 15) | ((high >> i & 1) << 4)) + m;
    y[i + 16] = d * float((b[8 + i] >> 4) | ((high >> (i + 16) & 1) << 4)) + m;
  }
}
inline void q8_0(const uint8_t* b, float* y) {
  const float d = half_to(b);
  for (int i = 0; i < 32; ++i) y[i] = d * float(int8_t(b[2 + i]));
}
// The eight 6-bit scales and minima of a K super-block, packed in twelve bytes.
inline void k_scales(const uint8_t* s, int i, float& scale, float& minimum) {
  if (i < 4) { scale = float(s[i] & 63); minimum = float(s[i + 4] & 63); return; }
  scale = float((s[i + 4] & 15) | (s[i - 4] >> 6 << 4));
  minimum = float((s[i + 4] >> 4) | (s[i] >> 6 << 4));
}
inline void q4_k(const uint8_t* b, float* y) {
  const float d = half_to(b), dmin = half_to(b + 2);
  for (int i = 0; i < 8; ++i) {
    float s, m; k_scales(b + 4, i, s, m);
    const float ds = d * s, dm = dmin * m;
    const uint8_t* q = b + 16 + i / 2 * 32;
    for (int j = 0; j < 32; ++j) y[i * 32 + j] = ds * float(q[j] >> (i % 2 * 4) & 15) - dm;
  }
}
inline void q5_k(const uint8_t* b, float* y) {
  const float d = half_to(b), dmin = half_to(b + 2);
  for (int i = 0; i < 8; ++i) {
    float s, m; k_scales(b + 4, i, s, m);
    const float ds = d * s, dm = dmin * m;
    const uint8_t *high = b + 16, *q = b + 48 + i / 2 * 32;
    for (int j = 0; j < 32; ++j) y[i * 32 + j] = ds * float((q[j] >> (i % 2 * 4) & 15) | ((high[j] >> i & 1) << 4)) - dm;
  }
}
inline void q6_k(const uint8_t* b, float* y) {
  const float d = half_to(b + 208);
  for (int half = 0; half < 2; ++half)
    for (int quarter = 0; quarter < 4; ++quarter)
      for (int j = 0; j < 32; ++j) {
        const uint8_t low = b[half * 64 + quarter % 2 * 32 + j], high = b[128 + half * 32 + j];
        const int q = int((quarter < 2 ? low & 15 : low >> 4) | ((high >> (quarter * 2) & 3) << 4)) - 32;
        const float ds = d * float(int8_t(b[192 + half * 8 + quarter * 2 + j / 16]));
        y[half * 128 + quarter * 32 + j] = ds * float(q);
      }
}
inline void f32(const uint8_t* b, float* y) { std::memcpy(y, b, 4); }
inline void f16(const uint8_t* b, float* y) { *y = half_to(b); }
inline void bf16(const uint8_t* b, float* y) { uint16_t h; std::memcpy(&h, b, 2); const uint32_t u = uint32_t(h) << 16; std::memcpy(y, &u, 4); }

constexpr Format formats[] = {  // ggml's type numbers
    {0, 1, 4, f32},     {1, 1, 2, f16},     {2, 32, 18, q4_0},    {3, 32, 20, q4_1},    {6, 32, 22, q5_0},   {7, 32, 24, q5_1},
    {8, 32, 34, q8_0},  {12, 256, 144, q4_k}, {13, 256, 176, q5_k}, {14, 256, 210, q6_k}, {30, 1, 2, bf16},
};
inline const Format* find(int type) {
  for (const Format& f : formats) if (f.type == type) return &f;
  return nullptr;
}

// Bytes of a row of k elements; 0 for a type that is not known here, or a k that its blocks do not divide.
inline size_t row_bytes(int type, int64_t k) {
  const Format* f = find(type);
  return f && k % f->block == 0 ? size_t(k / f->block) * f->bytes : 0;
}
inline void row(int type, const uint8_t* in, int64_t k, float* out) {
  const Format* f = find(type);
  for (int64_t i = 0; i < k / f->block; ++i) f->decode(in + size_t(i) * f->bytes, out + i * f->block);
}

}  // namespace gguf
}  // namespace KVIST_VARIANT
