// Latent rows into the pool: [c_KV, k_R] of a token, once for all heads, and the queries that will meet them.
#pragma once
#include "append.h"

namespace KVIST_VARIANT {

// Channel i with i + count/2, by the angle of the row's position; as it comes when there is no table.
inline void rotate_some(const Op& op, const float* x, int64_t count, int64_t position, float* out) {
  if (!op.rotary) { std::memcpy(out, x, size_t(count) * 4); return; }
  const int64_t half = count / 2;
  const float *c = op.cos + position * half, *s = op.sin + position * half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    out[i] = a * c[i] - b * s[i];
    out[i + half] = b * c[i] + a * s[i];
  }
}

template <Type T> inline void append_latent_as(const Op& op, const Step& step, Team& team) {
  const Store& s = op.store;
  const int64_t d = s.head_dim, rank = s.v_head_dim, rope = d - rank, p_count = s.block_size, heads = op.num_heads;
  constexpr int64_t e = T == Type::bf16 ? 2 : 1, size = T == Type::f32 ? 4 : 2;
  constexpr Type q_type = T == Type::bf16 ? Type::bf16 : Type::f32;
  constexpr int64_t q_size = T == Type::bf16 ? 2 : 4;
  const Table& table = step.tables[s.group];
  const int64_t kept_width = op.absorbed ? rank : op.nope, widest = std::max(d, kept_width + rope);
  float* temp = (float*)team.own->at(size_t(widest) * 8);
  uint8_t* row_out = (uint8_t*)(temp + widest);
  // An item: up to 16 heads' queries of a token; the first of a token stores its row too.
  const int64_t runs = (heads + 15) / 16, items = step.num_tokens * runs;
  int64_t request = 0;
  share(team, items, items > 64 ? 8 : 1, [&](int64_t item) {
    const int64_t t = item / runs, first = item % runs * 16, position = step.positions[t];
    for (int64_t h = first; h < std::min(heads, first + 16); ++h) {
      const float *query = (const float*)op.source + t * op.source_stride + h * (op.nope + rope), *kept = query;
      if (op.absorbed) kept = op.absorbed + t * op.absorbed_stride + h * rank;
      std::memcpy(temp, kept, size_t(kept_width) * 4);
      rotate_some(op, query + op.nope, rope, position, temp + kept_width);
      put_row<q_type>((uint8_t*)op.out + (t * op.out_stride + h * (kept_width + rope)) * q_size, temp, op.scale, kept_width + rope);
    }
    if (first) return;
    while (step.starts[request + 1] <= t) ++request;  // items only ever grow
    const float* row = op.latents + t * op.latents_stride;
    if (op.norm) rms_norm(row, op.norm, op.eps, rank, temp);
    else std::memcpy(temp, row, size_t(rank) * 4);
    rotate_some(op, row + rank, rope, position, temp + rank);
    put_row<T>(row_out, temp, 1.0f, d);
    const int64_t block = table.data[request * table.width + position / p_count], slot = position % p_count;
    uint8_t* tile = s.data + block * s.block_bytes + slot / TILE * TILE * d * size;
    scatter(tile + slot % TILE * e * size, TILE * e * size, row_out, e * size, d / e);
  });
}

inline void append_latent(const Op& op, const Step& step, Team& team) {
  if (op.store.type == Type::bf16) append_latent_as<Type::bf16>(op, step, team);
  else if (op.store.type == Type::f16) append_latent_as<Type::f16>(op, step, team);
  else append_latent_as<Type::f32>(op, step, team);
}

}  // namespace KVIST_VARIANT
