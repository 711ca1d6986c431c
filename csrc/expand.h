// Attention over latents by way of every head's own keys and values, made split by split for many queries at once: fewer
// operations than meeting the latents themselves from about 170 queries on. The sums are others than the absorbed form's.
#pragma once
#include "attend.h"
#include "linear.h"

namespace KVIST_VARIANT {

constexpr int64_t EXPAND_TOKENS = 512;             // of one unit: an expanded split serves them all
constexpr int EXPAND_R = MAX_ROWS >= 8 ? 8 : 2;    // channels, or positions, of one tile: whole pairs

struct PanelRows { static constexpr int ROW = 4, STEP = 128; };  // outputs of a packed weight as rows of A
struct TileRows { static constexpr int ROW = 4, STEP = 64; };    // positions of a K tile as rows of A

// Two rows rounded, the elements of the second behind those of the first: pairs for one dot product.
KV_INLINE vf pair_bf16(vf a, vf b) {
  a = round_bf16(a);
  b = round_bf16(b);
  vf r;
  KV_EACH(r.p[i_] = (part_f)((part_u)a.p[i_] >> 16 | (part_u)b.p[i_]);)
  return r;
}

template <class E> struct Expanding {
  const Op& op;
  uint8_t *k, *v;  // one split of one head: K tiles of nope + rope channels, V of `value` channels
  const int64_t nope, rope, value, rank;
  int64_t k_tile() const { return TILE * (nope + rope) * E::B_BYTES; }

  struct KeySink {
    uint8_t* out;
    int64_t channel, k_tile;
    KV_INLINE vf first(int, int64_t) const { return zero(); }
    template <int R, int V> KV_INLINE void done(int64_t t, vf (&acc)[R][V]) const {
      for (int j = 0; j < V; ++j)
        for (int r = 0; r < R; r += E::STEP) {
          uint8_t* to = out + (t + j) * k_tile + (channel + r) / E::STEP * 64;
          if constexpr (E::STEP == 2) store(to, pair_bf16(acc[r][j], acc[r + 1][j]));
          else store(to, acc[r][j]);
        }
    }
  };
  struct ValueSink {
    uint8_t* out;
    int64_t position, value;
    KV_INLINE vf first(int, int64_t) const { return zero(); }
    template <int R, int V> KV_INLINE void done(int64_t c, vf (&acc)[R][V]) const {
      for (int j = 0; j < V; ++j)
        for (int r = 0; r < R; r += E::STEP) {
          uint8_t* to = out + ((position + r) / E::STEP * value + (c + j) * LANES) * 4;
          if constexpr (E::STEP == 2) store(to, pair_bf16(acc[r][j], acc[r + 1][j]));
          else store(to, acc[r][j]);
        }
    }
  };

  // Keys and values of `head` for the tiles of one split, of which none is missing.
  void split(const Keys& latents, int64_t head, int tiles) {
    const int64_t steps = rank / E::STEP;
    const uint8_t *uk = (const uint8_t*)(*op.group)[size_t(head)], *uv = (const uint8_t*)(*op.group)[size_t(op.num_heads + head)];
    auto positions = [&](int64_t t) { return latents.k[t]; };
    for (int64_t c = 0; c < nope; c += EXPAND_R) {
      KeySink sink{k, c, k_tile()};
      sweep<E, PanelRows, EXPAND_R>(uk + c / PANEL * panel_bytes(op.weight) + c % PANEL * 4, 0, tiles, 64, steps, positions, sink);
    }
    const int64_t bytes = panel_bytes(op.places);
    auto channels = [&](int64_t i) { return uv + i / 2 * bytes + i % 2 * 64; };
    for (int t = 0; t < tiles; ++t) {
      std::memcpy(k + t * k_tile() + nope / E::STEP * 64, latents.k[t] + steps * 64, size_t(rope / E::STEP * 64));
      for (int p = 0; p < TILE; p += EXPAND_R) {
        ValueSink sink{v, t * TILE + p, value};
        sweep<E, TileRows, EXPAND_R>(latents.k[t] + p * 4, 0, value / LANES, 128, steps, channels, sink);
      }
    }
  }
};

template <class E> inline void attend_expanded_as(const Op& op, const Step& step, Team& team) {
  const int64_t rank = op.store.v_head_dim, nope = op.weight.n, rope = op.store.head_dim - rank, value = op.places.n;
  Store plain = op.store;  // as the heads' own keys and values would be stored
  plain.kv_heads = op.num_heads;
  plain.head_dim = int32_t(nope + rope);
  plain.v_head_dim = int32_t(value);
  plain.value_in_key = false;
  const size_t own = (Attention<E>::own_bytes(plain, EXPAND_TOKENS) + 63) / 64 * 64;
  const size_t k_bytes = size_t(SPLIT * (nope + rope) * E::B_BYTES), v_bytes = size_t(SPLIT * value * E::B_BYTES);
  uint8_t* memory = team.own->at(own + k_bytes + v_bytes + size_t(EXPAND_TOKENS) * (size_t(value) * 4 + sizeof(Partial) + 3 * 8));
  Attention<E> a(op, plain, step, memory, EXPAND_TOKENS);
  Expanding<E> expanding{op, memory + own, memory + own + k_bytes, nope, rope, value, rank};
  float* sums = (float*)(memory + own + k_bytes + v_bytes);
  Partial* state = (Partial*)(sums + EXPAND_TOKENS * value);
  int64_t *tokens = (int64_t*)(state + EXPAND_TOKENS), *heads = tokens + EXPAND_TOKENS, *positions = heads + EXPAND_TOKENS;
  Keys keys;
  for (int t = 0; t < TILES; ++t) {
    keys.k[t] = expanding.k + t * expanding.k_tile();
    keys.v[t] = expanding.v + t * TILE * value * E::B_BYTES;
  }
  int64_t units = 0;
  for (int64_t b = 0; b < step.num_requests; ++b)
    units += (step.starts[b + 1] - step.starts[b] + EXPAND_TOKENS - 1) / EXPAND_TOKENS * op.num_heads;
  share(team, units, 1, [&](int64_t i) {
    int64_t b = 0, runs;
    for (;; ++b) {
      runs = (step.starts[b + 1] - step.starts[b] + EXPAND_TOKENS - 1) / EXPAND_TOKENS;
      if (i < runs * op.num_heads) break;
      i -= runs * op.num_heads;
    }
    const int64_t head = i % op.num_heads, first = step.starts[b] + (runs - 1 - i / op.num_heads) * EXPAND_TOKENS;
    const int64_t count = std::min(EXPAND_TOKENS, step.starts[b + 1] - first);
    for (int64_t r = 0; r < count; ++r) {
      tokens[r] = first + r; heads[r] = head; positions[r] = step.positions[first + r];
      state[r] = {-__builtin_inff(), 0};
    }
    std::fill(sums, sums + count * value, 0.0f);
    for (int64_t r0 = 0; r0 < count; r0 += MAX_ROWS) {
      const int64_t n = std::min<int64_t>(MAX_ROWS, count - r0);
      a.load_queries(a.queries + r0 * a.d * 4, n, tokens + r0, heads + r0);
    }
    const int64_t last = positions[count - 1];
    for (int64_t s = 0; s * SPLIT <= last; ++s) {
      const int tiles = int(std::min<int64_t>(TILES, (last - s * SPLIT) / TILE + 1));
      Keys latents;
      locate(op, step, b, s, [&](int64_t t, const uint8_t* block, int64_t inside) { latents.k[t] = block ? block + inside * TILE * op.store.head_dim * E::B_BYTES : nullptr; });
      expanding.split(latents, head, tiles);
      for (int64_t r0 = 0; r0 < count; r0 += MAX_ROWS)
        with_rows(int(std::min<int64_t>(MAX_ROWS, count - r0)), [&](auto n) {
          constexpr int R = decltype(n)::value;
          if (positions[r0 + R - 1] < s * SPLIT) return;
          Partial part[R];
          a.template split<R>(keys, nullptr, a.queries + r0 * a.d * 4, s, positions + r0, part);
          fold(R, state + r0, sums + r0 * value, [&](int r) { return part[r]; }, [&](int r) { return a.values + r * value; }, value);
        });
    }
    for (int64_t r = 0; r < count; ++r) a.finish(tokens[r], head, state[r], sums + r * value);
  });
}

inline void attend_expanded(const Op& op, const Step& step, Team& team) {
  if (op.store.type == Type::bf16) attend_expanded_as<Bf16>(op, step, team);
  else attend_expanded_as<F32>(op, step, team);
}

}  // namespace KVIST_VARIANT
