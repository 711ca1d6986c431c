// Several matrices of one shape, each with the rows that chose it; the choice, and the sum of what was chosen.
//
// Rows of one matrix are gathered into tiles and multiplied as in linear.h: each output is one chain over K, so its bits
// depend neither on how many rows share the tile nor on which tokens they come from.
#pragma once
#include "linear.h"

namespace KVIST_VARIANT {

// The rows (token, slot) of a grouped product, sorted by matrix: those of used[i] are rows first[i]..first[i+1]-1.
struct Sorted {
  int64_t count = 0, uses = 0;
  int64_t *used, *first, *from, *to;  // from, to: elements at which a row of the source and of the output begins

  static size_t bytes(const Op& op, const Step& step) { return size_t(4 * rows(op, step) + int64_t(op.group->size()) + 2) * 8; }
  static int64_t rows(const Op& op, const Step& step) { return step.num_tokens * op.slots; }

  Sorted(const Op& op, const Step& step, uint8_t* memory) {
    const int64_t n = rows(op, step), matrices = int64_t(op.group->size()), width = op.weight.glu ? op.weight.n / 2 : op.weight.n;
    from = (int64_t*)memory; to = from + n; used = to + n; first = used + n;
    int64_t* place = first + n + 1;  // of each matrix: how many rows, then where its next one goes
    std::fill(place, place + matrices, 0);
    auto matrix = [&](int64_t t, int64_t s) -> int64_t {
      if (!op.ids) return s;
      const int64_t id = op.ids[t * op.ids_stride + s];
      return id >= 0 && id < matrices ? id : -1;  // chosen by `route`, which knows no others
    };
    for (int64_t t = 0; t < step.num_tokens; ++t)
      for (int64_t s = 0; s < op.slots; ++s) {
        const int64_t m = matrix(t, s);
        if (m >= 0) ++place[m];
      }
    for (int64_t m = 0; m < matrices; ++m) {
      const int64_t mine = place[m];
      if (!mine) continue;
      used[uses] = m; first[uses++] = count;
      place[m] = count;
      count += mine;
    }
    first[uses] = count;
    for (int64_t t = 0; t < step.num_tokens; ++t)
      for (int64_t s = 0; s < op.slots; ++s) {
        const int64_t m = matrix(t, s);
        if (m < 0) continue;
        from[place[m]] = t * op.source_stride + s * op.slot_stride;
        to[place[m]++] = t * op.out_stride + s * width;
      }
  }
};

// Output rows at places of their own.
struct Scattered {
  const Output& output;  // of an operation whose output rows are one element apart
  const int64_t* to;
  KV_INLINE vf first(int, int64_t) const { return zero(); }
  template <int R, int V> KV_INLINE void done(int64_t v, vf (&acc)[R][V]) const {
    for (int r = 0; r < R; ++r) {
      if (output.op.epilogue == Epilogue::glu) {
        if constexpr (V % 2 == 0)
          for (int j = 0; j < V; j += 2) output.glu(to[r], (v + j) / 2, acc[r][j], acc[r][j + 1]);
      } else {
        for (int j = 0; j < V; ++j) output.plain(to[r], (v + j) * LANES, output.op.weight.n, acc[r][j]);
      }
    }
  }
};

inline size_t grouped_common(const Op& op, const Step& step) { return size_t(Sorted::rows(op, step)) * size_t(op.weight.k) * type_bytes(op.weight.type); }

template <class E> inline void grouped_as(const Op& op, const Step& step, Team& team) {
  const Weight& w = op.weight;
  const int64_t steps = w.k / E::STEP, row_bytes = steps * 4;
  if (step.num_tokens == 0) return;
  uint8_t* mine = team.own->at((size_t(w.k) * 4 + 63) / 64 * 64 + Sorted::bytes(op, step));
  float* temp = (float*)mine;
  const Sorted rows(op, step, mine + (w.k * 4 + 63) / 64 * 64);
  const Output output{op, 0, 1};
  // Tiles of a matrix's rows stand one after the other, each [step][its rows].
  auto tile_of = [&](int64_t first, int64_t last, int64_t row, int64_t& begin) {
    begin = first + (row - first) / MAX_ROWS * MAX_ROWS;
    return int(std::min<int64_t>(MAX_ROWS, last - begin));
  };
  share(team, rows.count, MAX_ROWS, [&](int64_t row) {
    int64_t begin;
    const int64_t i = std::upper_bound(rows.first, rows.first + rows.uses, row) - rows.first - 1;
    const int count = tile_of(rows.first[i], rows.first[i + 1], row, begin);
    pack_units(op, rows.from[row], count, team.common + begin * row_bytes, row - begin, temp);
  });
  const int64_t vectors = (w.glu ? (w.n / 2 + LANES - 1) / LANES : (w.n + PANEL - 1) / PANEL) * 2, bytes = panel_bytes(w);
  // An item: a run of columns of one matrix, times up to `deep` of its tiles; not so small that handing it out would cost.
  const int64_t run = std::max<int64_t>(4, std::min<int64_t>(16, 65536 / bytes * 2)), across = (vectors + run - 1) / run;
  constexpr int64_t deep = 8 * MAX_ROWS;
  int64_t total = 0, use = 0, before = 0;
  auto items_of = [&](int64_t i) { return (rows.first[i + 1] - rows.first[i] + deep - 1) / deep * across; };
  for (int64_t i = 0; i < rows.uses; ++i) total += items_of(i);
  share(team, total, 1, [&](int64_t item) {
    while (item >= before + items_of(use)) before += items_of(use++);  // items only ever grow
    const int64_t at = item - before, v0 = at % across * run, v1 = std::min(vectors, v0 + run);
    const int64_t first = rows.first[use] + at / across * deep, last = std::min(rows.first[use + 1], first + deep);
    const uint8_t* data = (const uint8_t*)(*op.group)[size_t(rows.used[use])];
    auto columns = [&](int64_t v) { return data + v / 2 * bytes + v % 2 * 64; };
    for (int64_t r = first; r < last; r += MAX_ROWS)
      with_rows(int(std::min<int64_t>(MAX_ROWS, last - r)), [&](auto n) {
        constexpr int R = decltype(n)::value;
        Scattered sink{output, rows.to + r};
        sweep<E, Packed<R>, R>(team.common + r * row_bytes, v0, v1, 128, steps, columns, sink);
      });
  });
}

inline void grouped(const Op& op, const Step& step, Team& team) {
  if (op.weight.type == Type::bf16) grouped_as<Bf16>(op, step, team);
  else grouped_as<F32>(op, step, team);
}

// Index of the largest of `count` values that is not yet taken, the lowest of equals; NaN counts as less than all others.
inline int64_t take_best(const float* x, uint8_t* taken, int64_t count) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; ++i)
    if (!taken[i] && (best < 0 || x[i] > x[best] || (x[best] != x[best] && x[i] == x[i]))) best = i;
  taken[best] = 1;
  return best;
}

inline void route(const Op& op, const Step& step, Team& team) {
  const int64_t n = op.weight.n, padded = (n + LANES - 1) / LANES * LANES, each = n / op.groups;
  float* score = (float*)team.own->at(size_t(padded) * 9 + size_t(op.groups) * 5);
  float *choice = score + padded, *of_group = choice + padded;
  uint8_t *taken = (uint8_t*)(of_group + op.groups), *group_taken = taken + padded;
  share(team, step.num_tokens, 4, [&](int64_t t) {
    const float* logits = (const float*)op.source + t * op.source_stride;
    for (int64_t i = 0; i < padded; ++i) score[i] = i < n ? logits[i] : -__builtin_inff();
    if (op.sigmoid) {
      for (int64_t i = 0; i < padded; i += LANES) store(score + i, div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), load(score + i))))));
    } else {
      vf top = set1(-__builtin_inff()), sum = zero();
      for (int64_t i = 0; i < padded; i += LANES) top = max(load(score + i), top);
      const vf m = set1(lane_max(top));
      for (int64_t i = 0; i < padded; i += LANES) {
        const vf p = exp(sub(load(score + i), m));
        store(score + i, p);
        sum = add(sum, p);
      }
      const vf total = set1(lane_sum(sum));
      for (int64_t i = 0; i < padded; i += LANES) store(score + i, div(load(score + i), total));
    }
    for (int64_t i = 0; i < n; ++i) choice[i] = op.bias ? score[i] + op.bias[i] : score[i];
    std::fill(taken, taken + n, uint8_t(0));
    if (op.groups > 1) {
      for (int64_t g = 0; g < op.groups; ++g) {
        uint8_t* mark = taken + g * each;
        const float* x = choice + g * each;
        const int64_t best = take_best(x, mark, each);
        of_group[g] = op.top2 ? x[best] + x[take_best(x, mark, each)] : x[best];
      }
      std::fill(taken, taken + n, uint8_t(1));
      std::fill(group_taken, group_taken + op.groups, uint8_t(0));
      for (int64_t i = 0; i < op.top_groups; ++i) {
        const int64_t g = take_best(of_group, group_taken, op.groups);
        std::fill(taken + g * each, taken + (g + 1) * each, uint8_t(0));
      }
    }
    int32_t* ids = op.ids + t * op.ids_stride;
    float* gates = op.gates + t * op.gates_stride;
    float sum = 0;
    for (int64_t r = 0; r < op.slots; ++r) {
      ids[r] = int32_t(take_best(choice, taken, n));
      gates[r] = score[ids[r]];
      sum = sum + gates[r];
    }
    for (int64_t r = 0; r < op.slots; ++r) gates[r] = (op.normalise ? gates[r] / (sum + 1e-20f) : gates[r]) * op.scale;
  });
}

inline void combine(const Op& op, const Step& step, Team& team) {
  const int64_t width = op.weight.k, run = 512, runs = (width + run - 1) / run;
  share(team, step.num_tokens * runs, 1, [&](int64_t item) {
    const int64_t t = item / runs, first = item % runs * run, last = std::min(width, first + run);
    const float *x = (const float*)op.source + t * op.source_stride, *gates = op.gates + t * op.gates_stride;
    float* out = (float*)op.out + t * op.out_stride;
    for (int64_t i = first; i < last; i += LANES) {
      const int64_t count = std::min<int64_t>(LANES, last - i);
      vf sum = zero();
      for (int64_t r = 0; r < op.slots; ++r) {
        const float* y = x + r * width + i;
        sum = fma(set1(gates[r]), count == LANES ? load(y) : load_some(y, count), sum);
      }
      if (count == LANES) store(out + i, add(load(out + i), sum));
      else store_some(out + i, add(load_some(out + i, count), sum), count);
    }
  });
}

}  // namespace KVIST_VARIANT
