// y = act(norm(source)) W^T with its epilogue, over packed weights: the format of Weight in abi.h.
#pragma once
#include <algorithm>

#include "pointwise.h"
#include "tile.h"

namespace KVIST_VARIANT {

inline void packed_row(const Weight& w, int64_t row, float* out);                // strips.h
inline void multiply_packed(const Op& op, const Step& step, Team& team);        // packed.h
inline size_t packed_common(const Op& op, const Step& step);

inline int64_t panel_bytes(const Weight& w) { return PANEL * w.k * (w.type == Type::f32 ? 4 : 2); }

// Output row -> (panel, lane). A glu weight's gate rows 0..n/2 take lanes 0..15, its up rows lanes 16..31.
inline void place(const Weight& w, int64_t row, int64_t& panel, int64_t& lane) {
  if (!w.glu) { panel = row / PANEL; lane = row % PANEL; return; }
  const int64_t half = w.n / 2, unit = row < half ? row : row - half;
  panel = unit / LANES;
  lane = unit % LANES + (row < half ? 0 : LANES);
}

template <class T> inline void pack_row(uint8_t* panel, int64_t lane, int64_t k, Type to, const T* x) {
  if (to == Type::f32) {
    float* out = (float*)panel;
    for (int64_t i = 0; i < k; ++i) out[i * PANEL + lane] = std::is_same_v<T, float> ? float(x[i]) : bf16_to(uint16_t(x[i]));
  } else {
    uint32_t* out = (uint32_t*)panel + lane;
    uint16_t pairs[2 * LANES];
    for (int64_t i = 0; i < k; i += 2 * LANES) {
      const int64_t count = std::min<int64_t>(2 * LANES, k - i);
      if (!std::is_same_v<T, float>) std::memcpy(pairs, x + i, size_t(count) * 2);
      else if (count == 2 * LANES) { store_bf16(pairs, load((const float*)x + i)); store_bf16(pairs + LANES, load((const float*)x + i + LANES)); }
      else for (int64_t j = 0; j < count; ++j) pairs[j] = bf16_of(float(x[i + j]));
      for (int64_t j = 0; j < count / 2; ++j) std::memcpy(out + (i / 2 + j) * PANEL, pairs + 2 * j, 4);
    }
  }
}

inline void pack(const Weight& w, void* data, int64_t row, const void* rows, Type type, int64_t count, int64_t stride) {
  for (int64_t r = 0; r < count; ++r) {
    int64_t panel, lane;
    place(w, row + r, panel, lane);
    uint8_t* out = (uint8_t*)data + panel * panel_bytes(w);
    if (type == Type::f32) pack_row(out, lane, w.k, w.type, (const float*)rows + r * stride);
    else pack_row(out, lane, w.k, w.type, (const uint16_t*)rows + r * stride);
  }
}

inline void unpack_row(const Weight& w, int64_t row, float* out) {
  if (w.type == Type::packed) return packed_row(w, row, out);
  int64_t panel, lane;
  place(w, row, panel, lane);
  const uint8_t* base = (const uint8_t*)w.data + panel * panel_bytes(w);
  for (int64_t i = 0; i < w.k; ++i)
    out[i] = w.type == Type::f32 ? ((const float*)base)[i * PANEL + lane] : bf16_to(((const uint16_t*)base)[((i / 2) * PANEL + lane) * 2 + i % 2]);
}

// What happens to a finished tile. Row r of the tile is output row `row + r`; vector v holds columns 16 v .. 16 v + 15.
struct Output {
  const Op& op;
  int64_t row, stride;  // stride: elements from one output row to the next
  KV_INLINE vf first(int, int64_t) const { return zero(); }
  template <int R, int V> KV_INLINE void done(int64_t v, vf (&acc)[R][V]) const {
    for (int r = 0; r < R; ++r) {
      if (op.epilogue == Epilogue::glu) {
        if constexpr (V % 2 == 0)
          for (int j = 0; j < V; j += 2) glu(row + r, (v + j) / 2, acc[r][j], acc[r][j + 1]);
      } else {
        for (int j = 0; j < V; ++j) plain(row + r, (v + j) * LANES, op.weight.n, acc[r][j]);
      }
    }
  }
  KV_INLINE void plain(int64_t r, int64_t column, int64_t end, vf y) const {
    const int64_t count = std::min<int64_t>(LANES, end - column);
    if (count <= 0) return;
    if (op.epilogue == Epilogue::act) {
      if (op.bias) y = add(y, count == LANES ? load(op.bias + column) : load_some(op.bias + column, count));
      keep(r, column, count, activate(op.activation, y));
      return;
    }
    float* out = (float*)op.out + r * stride + column;
    if (count == LANES) {
      if (op.bias) y = add(y, load(op.bias + column));
      if (op.scale != 1) y = mul(y, set1(op.scale));
      if (op.softcap != 0) y = cap(y, op.softcap);
      if (op.epilogue == Epilogue::add) y = add(load(out), y);
      store(out, y);
      return;
    }
    if (op.bias) y = add(y, load_some(op.bias + column, count));
    if (op.scale != 1) y = mul(y, set1(op.scale));
    if (op.softcap != 0) y = cap(y, op.softcap);
    if (op.epilogue == Epilogue::add) y = add(load_some(out, count), y);
    store_some(out, y, count);
  }
  KV_INLINE void glu(int64_t r, int64_t unit, vf gate, vf up) const {
    const int64_t half = op.weight.n / 2, column = unit * LANES, count = std::min<int64_t>(LANES, half - column);
    if (count <= 0) return;
    if (op.bias) {
      gate = add(gate, load_some(op.bias + column, count));
      up = add(up, load_some(op.bias + half + column, count));
    }
    keep(r, column, count, mul(activate(op.activation, gate), up));
  }
  // `count` columns in the act type, each rounded once.
  KV_INLINE void keep(int64_t r, int64_t column, int64_t count, vf x) const {
    float y[LANES];
    store(y, x);
    if (op.act == Type::bf16) {
      uint16_t* out = (uint16_t*)op.out + r * stride + column;
      if (count == LANES) store_bf16(out, load(y));
      else for (int64_t i = 0; i < count; ++i) out[i] = bf16_of(y[i]);
    } else {
      float* out = (float*)op.out + r * stride + column;
      for (int64_t i = 0; i < count; ++i) out[i] = y[i];
    }
  }
};

// One row of the source, which begins at element `from`, into its tile: [step][rows of the tile] units of 4 bytes.
inline void pack_units(const Op& op, int64_t from, int64_t rows, uint8_t* tile, int64_t lane, float* temp) {
  const int64_t k = op.weight.k;
  uint32_t* out = (uint32_t*)tile;
  if (op.source_type == Type::f32) {
    const float* x = (const float*)op.source + from;
    if (op.norm) { row_norm(op, x, k, temp); x = temp; }
    if (op.weight.type == Type::f32) {
      for (int64_t i = 0; i < k; ++i) std::memcpy(out + i * rows + lane, x + i, 4);
    } else {
      for (int64_t i = 0; i < k; i += 2) out[(i / 2) * rows + lane] = uint32_t(bf16_of(x[i])) | uint32_t(bf16_of(x[i + 1])) << 16;
    }
    return;
  }
  const uint8_t* x = (const uint8_t*)((const uint16_t*)op.source + from);
  for (int64_t i = 0; i < k / 2; ++i) std::memcpy(out + i * rows + lane, x + 4 * i, 4);
}
inline void pack_a(const Op& op, const Step& step, int64_t r, int64_t rows, uint8_t* tile, int64_t lane, float* temp) {
  pack_units(op, (op.wanted ? step.rows[r] : r) * op.source_stride, rows, tile, lane, temp);
}

inline size_t linear_common(const Op& op, const Step& step) {
  if (op.weight.type == Type::packed) return packed_common(op, step);
  return size_t(op.wanted ? step.num_rows : step.num_tokens) * op.weight.k * 4;
}

template <class E> inline void multiply(const Op& op, const Step& step, Team& team) {
  const Weight& w = op.weight;
  const int64_t m = op.wanted ? step.num_rows : step.num_tokens, steps = w.k / E::STEP;
  if (m == 0) return;
  const int64_t tiles = (m + MAX_ROWS - 1) / MAX_ROWS, tile_bytes = MAX_ROWS * steps * 4;
  const bool alone = m <= 4;  // few rows: each thread prepares them itself, which costs less than waiting for others
  uint8_t* mine = team.own->at(w.k * 4 + 64 + (alone ? tiles * tile_bytes : 0));
  float* temp = (float*)mine;
  uint8_t* a = alone ? mine + (w.k * 4 + 63) / 64 * 64 : team.common;
  auto rows_of = [&](int64_t t) { return int(std::min<int64_t>(MAX_ROWS, m - t * MAX_ROWS)); };
  auto prepare = [&](int64_t r) {
    pack_a(op, step, r, rows_of(r / MAX_ROWS), a + r / MAX_ROWS * tile_bytes, r % MAX_ROWS, temp);
  };
  if (!alone) share(team, m, MAX_ROWS, prepare);
  bool ready = !alone;
  const int64_t vectors = (w.glu ? (w.n / 2 + LANES - 1) / LANES : (w.n + PANEL - 1) / PANEL) * 2;
  const int64_t bytes = panel_bytes(w);
  const uint8_t* data = (const uint8_t*)w.data;
  auto columns = [&](int64_t v) { return data + v / 2 * bytes + v % 2 * 64; };
  // Items: a run of columns times a run of row tiles, small enough to share out evenly, large enough to stay in cache.
  const int64_t run = m <= MAX_ROWS ? 4 : 8, deep = 8;
  const int64_t across = (vectors + run - 1) / run, down = (tiles + deep - 1) / deep;
  share(team, across * down, 1, [&](int64_t item) {
    if (!ready) for (int64_t r = 0; r < m; ++r) prepare(r);
    ready = true;
    const int64_t v0 = item % across * run, v1 = std::min(vectors, v0 + run), t0 = item / across * deep;
    for (int64_t t = t0; t < std::min(tiles, t0 + deep); ++t)
      with_rows(rows_of(t), [&](auto rows) {
        constexpr int R = decltype(rows)::value;
        Output sink{op, t * MAX_ROWS, op.out_stride};
        if (t == t0 && !alone) sweep<E, Packed<R>, R, Fetch::kept>(a + t * tile_bytes, v0, v1, 128, steps, columns, sink, 8192);
        else sweep<E, Packed<R>, R>(a + t * tile_bytes, v0, v1, 128, steps, columns, sink);
      });
  });
}

inline void linear(const Op& op, const Step& step, Team& team) {
  if (op.weight.type == Type::packed) multiply_packed(op, step, team);
  else if (op.weight.type == Type::bf16) multiply<Bf16>(op, step, team);
  else multiply<F32>(op, step, team);
}

}  // namespace KVIST_VARIANT
