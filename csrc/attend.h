// Cuts a step's attention into work for the team, and merges what comes back.
#pragma once
#include "split.h"

namespace KVIST_VARIANT {

// How the work of a step is cut: `unit` is one kv head of a run of tokens of one request. With few units, splits are
// shared out too and their partial results merged afterwards. The cut never reaches the arithmetic.
struct Cut {
  int64_t tokens_per_unit, units, splits, splits_per_item;  // splits > 0: shared out
  int64_t per_unit_floats;
};

inline int64_t last_split(const Step& s) {
  int64_t most = 0;
  for (int64_t t = 0; t < s.num_tokens; ++t) most = std::max<int64_t>(most, s.positions[t] / SPLIT + 1);
  return most;
}

inline Cut cut_of(const Op& op, const Step& step) {
  const int64_t group = op.num_heads / op.store.kv_heads, width = (op.store.v_head_dim + LANES - 1) / LANES * LANES;
  Cut c{};
  c.tokens_per_unit = std::max<int64_t>(1, 4 * MAX_ROWS / group);
  for (int64_t b = 0; b < step.num_requests; ++b)
    c.units += (step.starts[b + 1] - step.starts[b] + c.tokens_per_unit - 1) / c.tokens_per_unit * op.store.kv_heads;
  const int64_t splits = last_split(step), rows = c.tokens_per_unit * group;
  if (c.units < 16 && splits > 1 && step.num_tokens <= 16) {
    c.splits = splits;
    c.splits_per_item = std::max<int64_t>(1, std::min<int64_t>(4, c.units * splits / 32));
    c.per_unit_floats = rows * splits * (width + 2);
  }
  return c;
}

inline size_t attend_common(const Op& op, const Step& step) {
  const Cut c = cut_of(op, step);
  return c.splits ? size_t(c.units) * c.per_unit_floats * 4 : 0;
}

struct Unit { int64_t request, head, first, count; };  // kv head; tokens first..first+count-1 of the step

inline Unit unit_of(const Op& op, const Step& step, const Cut& c, int64_t i) {
  for (int64_t b = 0;; ++b) {
    const int64_t n = step.starts[b + 1] - step.starts[b], runs = (n + c.tokens_per_unit - 1) / c.tokens_per_unit;
    if (i >= runs * op.store.kv_heads) { i -= runs * op.store.kv_heads; continue; }
    const int64_t run = runs - 1 - i / op.store.kv_heads;  // the last tokens see most: they go first
    const int64_t first = run * c.tokens_per_unit;
    return {b, i % op.store.kv_heads, step.starts[b] + first, std::min(c.tokens_per_unit, n - first)};
  }
}

template <class E> inline void attend_as(const Op& op, const Step& step, Team& team) {
  const Cut c = cut_of(op, step);
  const int64_t group = op.num_heads / op.store.kv_heads, width = Attention<E>::v_width(op), most = c.tokens_per_unit * group;
  const size_t own = (Attention<E>::own_bytes(op, most) + 63) / 64 * 64;
  uint8_t* memory = team.own->at(own + 64 + size_t(most) * ((width + 2) * 4 + 3 * 8));
  Attention<E> a(op, step, memory, most);
  Partial* state = (Partial*)(memory + own);
  int64_t *token = (int64_t*)(state + most), *head = token + most, *position = head + most;
  float* sums = (float*)(position + most);
  float* shared = c.splits ? (float*)team.common : nullptr;

  // Splits s0..s1 of unit u, each for all its rows; `emit(row, count, split, part)` takes a tile's results.
  auto walk = [&](const Unit& u, int64_t s0, int64_t s1, auto&& emit) {
    const int64_t rows = u.count * group;
    for (int64_t r = 0; r < rows; ++r) {
      token[r] = u.first + r / group;
      head[r] = u.head * group + r % group;
      position[r] = step.positions[token[r]];
    }
    for (int64_t r0 = 0; r0 < rows; r0 += MAX_ROWS)
      a.load_queries(a.queries + r0 * a.d * 4, std::min<int64_t>(MAX_ROWS, rows - r0), token + r0, head + r0);
    const int64_t begin = op.window && !op.sinks ? std::max<int64_t>(0, position[0] - op.window + 1) / SPLIT : 0;
    for (int64_t s = std::max(s0, begin); s < std::min(s1, position[rows - 1] / SPLIT + 1); ++s) {
      const Keys keys = a.find(u.request, u.head, s);
      for (int64_t r0 = 0; r0 < rows; r0 += MAX_ROWS)
        with_rows(int(std::min<int64_t>(MAX_ROWS, rows - r0)), [&](auto n) {
          constexpr int R = decltype(n)::value;
          Partial part[R];
          a.template split<R>(keys, a.queries + r0 * a.d * 4, s, position + r0, part);
          emit(r0, R, s, part);
        });
    }
  };

  if (!c.splits) {
    for (int64_t i; (i = team.take(1)) < c.units;) {
      const Unit u = unit_of(op, step, c, i);
      for (int64_t r = 0; r < u.count * group; ++r) state[r] = {-__builtin_inff(), 0};
      std::fill(sums, sums + u.count * group * width, 0.0f);
      walk(u, 0, INT64_MAX, [&](int64_t row, int count, int64_t, const Partial* part) {
        fold(count, state + row, sums + row * width, [&](int r) { return part[r]; }, [&](int r) { return a.values + r * width; }, width);
      });
      for (int64_t r = 0; r < u.count * group; ++r) a.finish(u.first + r / group, u.head * group + r % group, state[r], sums + r * width);
    }
    return;
  }
  const int64_t record = width + 2, runs = (c.splits + c.splits_per_item - 1) / c.splits_per_item;
  for (int64_t i; (i = team.take(1)) < c.units * runs;) {
    const int64_t index = i / runs, s0 = i % runs * c.splits_per_item, s1 = std::min(c.splits, s0 + c.splits_per_item);
    const Unit u = unit_of(op, step, c, index);
    float* base = shared + index * c.per_unit_floats;
    for (int64_t r = 0; r < u.count * group; ++r)
      for (int64_t s = s0; s < s1; ++s) base[(r * c.splits + s) * record] = -__builtin_inff();
    walk(u, s0, s1, [&](int64_t row, int count, int64_t s, const Partial* part) {
      for (int r = 0; r < count; ++r) {
        float* to = base + ((row + r) * c.splits + s) * record;
        to[0] = part[r].m; to[1] = part[r].l;
        std::memcpy(to + 2, a.values + r * width, size_t(width) * 4);
      }
    });
  }
  team.barrier();
  for (int64_t i; (i = team.take(1)) < c.units;) {
    const Unit u = unit_of(op, step, c, i);
    const float* base = shared + i * c.per_unit_floats;
    for (int64_t r0 = 0; r0 < u.count * group; r0 += LANES) {
      const int count = int(std::min<int64_t>(LANES, u.count * group - r0));
      for (int r = 0; r < count; ++r) state[r] = {-__builtin_inff(), 0};
      std::fill(sums, sums + count * width, 0.0f);
      for (int64_t s = 0; s < c.splits; ++s) {
        auto from = [&](int r) { return base + ((r0 + r) * c.splits + s) * record; };
        fold(count, state, sums, [&](int r) { return Partial{from(r)[0], from(r)[1]}; }, [&](int r) { return from(r) + 2; }, width);
      }
      for (int r = 0; r < count; ++r) a.finish(u.first + (r0 + r) / group, u.head * group + (r0 + r) % group, state[r], sums + r * width);
    }
  }
}

inline void attend(const Op& op, const Step& step, Team& team) {
  if (op.store.type == Type::bf16) attend_as<Bf16>(op, step, team);
  else if (op.store.type == Type::f16) attend_as<F16>(op, step, team);
  else attend_as<F32>(op, step, team);
}

}  // namespace KVIST_VARIANT
