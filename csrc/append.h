// Rotates and stores: q to its buffer, k and v to their blocks. Tiles are written column by column; the reader is favoured.
#pragma once
#include <algorithm>

#include "pointwise.h"
#include "tile.h"

namespace KVIST_VARIANT {

// x times scale, rounded once to the element type, as many as `count`.
template <Type T> inline void put_row(void* out, const float* x, float scale, int64_t count) {
  int64_t i = 0;
  if (T == Type::bf16)
    for (; i + LANES <= count; i += LANES) store_bf16((uint16_t*)out + i, mul(load(x + i), set1(scale)));
  for (; i < count; ++i) {
    const float y = x[i] * scale;
    if (T == Type::f32) ((float*)out)[i] = y;
    else if (T == Type::bf16) ((uint16_t*)out)[i] = bf16_of(y);
    else ((uint16_t*)out)[i] = f16_of(y);
  }
}

// Units of `unit` bytes, one after the other, to places `stride` bytes apart.
inline void scatter(uint8_t* out, int64_t stride, const uint8_t* in, int64_t unit, int64_t count) {
  if (unit == 4) for (int64_t i = 0; i < count; ++i) std::memcpy(out + i * stride, in + 4 * i, 4);
  else for (int64_t i = 0; i < count; ++i) std::memcpy(out + i * stride, in + 2 * i, 2);
}

// One head's row: optional norm, then rotation of channel i with i + rotary/2 by the angle of the row's position.
inline const float* turn(const Op& op, const float* x, const float* norm, int64_t position, float* temp) {
  const int64_t d = op.store.head_dim, half = op.rotary / 2;
  if (!norm && !half) return x;
  if (norm) rms_norm(x, norm, op.eps, d, temp);
  else std::memcpy(temp, x, size_t(d) * 4);
  const float *c = op.cos + position * half, *s = op.sin + position * half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = temp[i], b = temp[i + half];
    temp[i] = a * c[i] - b * s[i];
    temp[i + half] = b * c[i] + a * s[i];
  }
  return temp;
}

template <Type T> inline void append_as(const Op& op, const Step& step, Team& team) {
  const Store& s = op.store;
  const int64_t d = s.head_dim, dv = s.v_head_dim, g_count = s.kv_heads, group = op.num_heads / g_count;
  constexpr int64_t e = T == Type::bf16 ? 2 : 1, size = T == Type::f32 ? 4 : 2;
  const int64_t p_count = s.block_size;
  const int64_t head_bytes = p_count * (d + dv) * size;
  constexpr Type q_type = T == Type::bf16 ? Type::bf16 : Type::f32;
  constexpr int64_t q_size = T == Type::bf16 ? 2 : 4;
  const Table& table = step.tables[s.group];
  float* temp = (float*)team.own->at(size_t(d) * 4 + size_t(std::max(d, dv)) * 4);
  uint8_t* row_out = (uint8_t*)(temp + d);
  const int64_t items = step.num_tokens * g_count, run = items > 64 ? 8 : 1;
  int64_t request = 0;
  share(team, items, run, [&](int64_t item) {
      const int64_t t = item / g_count, g = item % g_count, position = step.positions[t];
      while (step.starts[request + 1] <= t) ++request;  // items only ever grow
      const float* row = (const float*)op.source + t * op.source_stride;
      for (int64_t h = g * group; h < (g + 1) * group; ++h) {
        const float* q = turn(op, row + h * d, op.q_norm, position, temp);
        put_row<q_type>((uint8_t*)op.out + (t * op.out_stride + h * d) * q_size, q, op.scale, d);
      }
      const int64_t block = table.data[request * table.width + position / p_count], slot = position % p_count;
      uint8_t* base = s.data + block * s.block_bytes + g * head_bytes;
      const float* k = turn(op, row + (op.num_heads + g) * d, op.k_norm, position, temp);
      uint8_t* tile = base + slot / TILE * TILE * d * size;
      put_row<T>(row_out, k, 1.0f, d);
      scatter(tile + slot % TILE * e * size, TILE * e * size, row_out, e * size, d / e);
      const float* v = row + (op.num_heads + g_count) * d + g * dv;
      uint8_t* rows = base + p_count * d * size;
      put_row<T>(row_out, v, 1.0f, dv);
      scatter(rows + (slot / e * dv * e + slot % e) * size, e * size, row_out, size, dv);
  });
}

inline void append(const Op& op, const Step& step, Team& team) {
  if (op.store.type == Type::bf16) append_as<Type::bf16>(op, step, team);
  else if (op.store.type == Type::f16) append_as<Type::f16>(op, step, team);
  else append_as<Type::f32>(op, step, team);
}

}  // namespace KVIST_VARIANT
