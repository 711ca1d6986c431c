// Rotates and stores: q to its buffer, k and v to their blocks. Tiles are written column by column; the reader is favoured.
#pragma once
#include "pointwise.h"
#include "tile.h"

namespace KVIST_VARIANT {

inline void put(void* out, int64_t i, Type type, float x) {
  if (type == Type::f32) ((float*)out)[i] = x;
  else if (type == Type::bf16) ((uint16_t*)out)[i] = bf16_of(x);
  else ((uint16_t*)out)[i] = f16_of(x);
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

inline void append(const Op& op, const Step& step, Team& team) {
  const Store& s = op.store;
  const int64_t d = s.head_dim, dv = s.v_head_dim, g_count = s.kv_heads, group = op.num_heads / g_count;
  const int64_t e = s.type == Type::bf16 ? 2 : 1, size = int64_t(type_bytes(s.type)), p_count = s.block_size;
  const int64_t head_bytes = p_count * (d + dv) * size;
  const Type q_type = s.type == Type::bf16 ? Type::bf16 : Type::f32;
  const Table& table = step.tables[s.group];
  float* temp = (float*)team.own->at(size_t(d) * 4);
  const int64_t items = step.num_tokens * g_count, run = items > 64 ? 8 : 1;
  int64_t request = 0;
  for (int64_t first; (first = team.take(run)) < items;)
    for (int64_t item = first; item < first + run && item < items; ++item) {
      const int64_t t = item / g_count, g = item % g_count, position = step.positions[t];
      while (step.starts[request + 1] <= t) ++request;  // items only ever grow
      const float* row = (const float*)op.source + t * op.source_stride;
      for (int64_t h = g * group; h < (g + 1) * group; ++h) {
        const float* q = turn(op, row + h * d, op.q_norm, position, temp);
        const int64_t at = t * op.out_stride + h * d;
        for (int64_t i = 0; i < d; ++i) put(op.out, at + i, q_type, q[i] * op.scale);
      }
      const int64_t block = table.data[request * table.width + position / p_count], slot = position % p_count;
      uint8_t* base = s.data + block * s.block_bytes + g * head_bytes;
      const float* k = turn(op, row + (op.num_heads + g) * d, op.k_norm, position, temp);
      uint8_t* tile = base + slot / TILE * TILE * d * size;
      for (int64_t i = 0; i < d; ++i) put(tile, (i / e * TILE + slot % TILE) * e + i % e, s.type, k[i]);
      const float* v = row + (op.num_heads + g_count) * d + g * dv;
      uint8_t* rows = base + p_count * d * size;
      for (int64_t i = 0; i < dv; ++i) put(rows, (slot / e * dv + i) * e + slot % e, s.type, v[i]);
    }
}

}  // namespace KVIST_VARIANT
