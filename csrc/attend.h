// Cuts a step's attention into work for the team, and merges what comes back. No cut reaches the arithmetic of a row.
//
// Two ways. `Whole`: a unit (one kv head of a run of tokens of one request) goes through all its splits and merges them as
// it goes; good when there are many units. `Parted`: few tokens, so the splits are shared out too and their results are
// merged afterwards; requests that begin with the same blocks are then served by one pass over those. Over latents, whose
// results are as wide as a row, this goes in waves of splits, so that results are merged before they leave the cache.
#pragma once
#include "split.h"

namespace KVIST_VARIANT {

constexpr int64_t PARTED_BYTES = int64_t(256) << 20;  // most memory for unmerged results
constexpr int64_t WAVE_BYTES = int64_t(2) << 20;      // of one wave, while there are waves enough
constexpr int64_t LATENT_ROWS = 128;                  // of one unit over latents: a split's turned values serve them all

struct Cut {
  int64_t tokens_per_unit, units;  // of a step that is not parted
  int64_t splits, per_item;        // splits > 0: parted, in items of per_item splits
  int64_t record, head;            // floats of one row's result, and of what stands before its values: maximum, sum
  int64_t heads_per_unit, wave;    // of a kv head's query heads; wave: splits that are computed before a merge
  bool shared;                     // some requests begin with the same blocks
  int64_t waves() const { return (splits + wave - 1) / wave; }
};

// The splits that queries at positions first..last see: those of the sinks, then those from the window's on. `at` counts
// them from 0, so that what lies between the two is neither walked nor given room.
struct Road {
  int64_t sinks, begin, end;
  int64_t count() const { return sinks + end - begin; }
  int64_t at(int64_t i) const { return i < sinks ? i : begin + i - sinks; }
  int64_t index(int64_t split) const { return split < sinks ? split : split - begin + sinks; }
  bool has(int64_t split) const { return split < sinks || (split >= begin && split < end); }
};
inline Road road_of(const Op& op, int64_t first, int64_t last) {
  const int64_t begin = op.window ? std::max<int64_t>(0, first - op.window + 1) / SPLIT : 0;
  return {std::min<int64_t>(begin, (op.sinks + SPLIT - 1) / SPLIT), begin, last / SPLIT + 1};
}

inline int64_t units_of(const Op& op, const Step& step, const Cut& c) {
  const int64_t group = op.num_heads / op.store.kv_heads, parts = (group + c.heads_per_unit - 1) / c.heads_per_unit;
  int64_t units = 0;
  for (int64_t b = 0; b < step.num_requests; ++b)
    units += (step.starts[b + 1] - step.starts[b] + c.tokens_per_unit - 1) / c.tokens_per_unit * op.store.kv_heads * parts;
  return units;
}

inline Cut cut_of(const Op& op, const Step& step) {
  const int64_t group = op.num_heads / op.store.kv_heads, width = (op.store.v_head_dim + LANES - 1) / LANES * LANES;
  const Table& table = step.tables[op.store.group];
  const bool latent = op.store.value_in_key;
  Cut c{std::max<int64_t>(1, (latent ? LATENT_ROWS : 4 * MAX_ROWS) / group), 0, 0, 0, 0, latent ? LANES : 2, group, 1, false};
  c.record = c.head + width;
  int64_t splits = 0;
  bool few = true;
  for (int64_t b = 0; b < step.num_requests; ++b) {
    const int64_t n = step.starts[b + 1] - step.starts[b];
    if (n == 0) continue;
    splits = std::max(splits, road_of(op, step.positions[step.starts[b]], step.positions[step.starts[b + 1] - 1]).count());
    few = few && (n <= 4 || (latent && n * group <= 2 * LATENT_ROWS));
    c.shared = c.shared || table.lead[size_t(b)] > 0;
  }
  c.units = units_of(op, step, c);
  const int64_t row_bytes = step.num_tokens * op.num_heads * c.record * 4;
  const bool scarce = c.units < 16 && step.num_tokens <= 16;
  int64_t wave = splits;
  if (latent && !op.window && splits) {
    const int64_t most = std::max<int64_t>(16, WAVE_BYTES / std::max<int64_t>(1, row_bytes)), waves = std::min<int64_t>(WAVES, (splits + most - 1) / most);
    wave = (splits + waves - 1) / waves;
  }
  if (splits > 1 && few && (scarce || c.shared) && row_bytes * wave <= PARTED_BYTES) {
    c.splits = splits;
    c.wave = wave;
    c.per_item = latent ? 1 : std::max<int64_t>(1, std::min<int64_t>(4, c.units * splits / 32));
  } else if (latent) {  // a few large units become more
    while (c.units < 16 && c.tokens_per_unit * group > 4 * MAX_ROWS && c.tokens_per_unit > 1) {
      c.tokens_per_unit = (c.tokens_per_unit + 1) / 2;
      c.units = units_of(op, step, c);
    }
    while (c.units < 8 && c.heads_per_unit > 8) {
      c.heads_per_unit = (c.heads_per_unit + 1) / 2;
      c.units = units_of(op, step, c);
    }
  }
  return c;
}

// Unmerged results of one wave, then, when there are several, what the waves before it gave.
inline size_t attend_common(const Op& op, const Step& step) {
  const Cut c = cut_of(op, step);
  return c.splits ? size_t(step.num_tokens * op.num_heads * (c.wave + (c.waves() > 1)) * c.record) * 4 : 0;
}

// One split of one kv head's keys; request -1: none.
struct Spot { int64_t request, head, split; };

// Query rows that go through the same blocks together: token, head and position of each.
struct Rows {
  int64_t count = 0, *token = nullptr, *head = nullptr, *position = nullptr;
  void add(const Step& step, int64_t t, int64_t h) {
    token[count] = t; head[count] = h; position[count] = step.positions[t];
    ++count;
  }
};

template <class E> struct Attending {
  const Op& op;
  const Step& step;
  Team& team;
  const Cut c;
  const int64_t group, width;
  Attention<E>* a = nullptr;
  Rows rows;
  Partial* state = nullptr;
  float *sums = nullptr, *parted = nullptr;
  int64_t* packed = nullptr;  // which rows each tile of queries was packed for: the first, and how many

  void whole() {
    share(team, c.units, 1, [&](int64_t i) {
      int64_t request, head, first, count, part;
      unit(i, request, head, part, first, count);
      rows.count = 0;
      for (int64_t t = first; t < first + count; ++t)
        for (int64_t h = part * c.heads_per_unit; h < std::min(group, (part + 1) * c.heads_per_unit); ++h) rows.add(step, t, head * group + h);
      clear(rows.count);
      for (int64_t r = 0; r < rows.count; ++r) state[r] = {-__builtin_inff(), 0};
      std::fill(sums, sums + rows.count * width, 0.0f);
      const Road road = road_of(op, rows.position[0], rows.position[rows.count - 1]);
      const Spot later = beginning(i + team.members);
      for (int64_t j = 0; j < road.count(); ++j)
        pass({request, head, road.at(j)}, j + 1 < road.count() ? Spot{request, head, road.at(j + 1)} : later, rows.count, [](int64_t, int) {}, [&](int64_t row, int n, const Partial* part) {
          fold(n, state + row, sums + row * width, [&](int r) { return part[r]; }, [&](int r) { return a->values + r * width; }, width);
        });
      for (int64_t r = 0; r < rows.count; ++r) a->finish(rows.token[r], rows.head[r], state[r], sums + r * width);
    });
  }

  void in_parts() {
    for (int64_t first = 0; first < c.splits; first += c.wave) one_wave(first, std::min(c.splits, first + c.wave));
  }

  // Splits begin..end-1 along each request's road: computed, then merged to what the waves before gave.
  void one_wave(int64_t begin, int64_t end) {
    const Table& table = step.tables[op.store.group];
    const int64_t heads = op.store.kv_heads;
    int64_t from, to, total = 0, last_b = -1, last_head = -1;
    auto items = [&](int64_t b) {
      span(table, b, from, to);
      from = std::max(from, begin);
      to = std::max(from, std::min(to, end));
      return (to - from + c.per_item - 1) / c.per_item * heads;
    };
    for (int64_t b = 0; b < step.num_requests; ++b) total += items(b);
    struct Run { int64_t request, head, first, stop; };  // splits first..stop-1 along the request's road
    auto run_of = [&](int64_t i) -> Run {
      int64_t b = 0;
      for (int64_t n; i >= (n = items(b)); ++b) i -= n;
      const int64_t first = from + i / heads * c.per_item;
      return {b, i % heads, first, std::min(to, first + c.per_item)};
    };
    auto item = [&](int64_t i, int64_t follower) {
      const auto [b, head, first, stop] = run_of(i);
      const Road way = road(b);
      Spot later{-1, 0, 0};  // where this thread goes on after the item
      if (follower < total) {
        const Run next = run_of(follower);
        later = {next.request, next.head, road(next.request).at(next.first)};
      }
      if (c.shared || b != last_b || head != last_head) {  // else the rows, and their queries as packed, are the last item's
        rows.count = 0;
        take_rows(b, head);
        gather_followers(table, b, head, way.at(first));
        clear(rows.count);
        last_b = b; last_head = head;
      }
      for (int64_t j = first; j < stop; ++j)
        pass({b, head, way.at(j)}, j + 1 < stop ? Spot{b, head, way.at(j + 1)} : later, present(table, b, way.at(j)), [&](int64_t row, int n) { aim(row, n, way.at(j) - begin); }, [&](int64_t row, int n, const Partial* part) {
          const bool copied = a->result == a->values;
          for (int r = 0; r < n; ++r) {
            const Road own = road_of(op, rows.position[row + r], rows.position[row + r]);
            if (!own.has(way.at(j))) continue;
            float* out = record(rows.token[row + r], rows.head[row + r], own.index(way.at(j)) - begin);
            out[0] = part[r].m; out[1] = part[r].l;
            if (copied) std::memcpy(out + c.head, a->values + r * width, size_t(width) * 4);
          }
        });
      a->into(a->values, width);
    };
    if (op.store.value_in_key) {  // an item is taken before the one that goes first, so that its keys can be asked for
      int64_t i = team.take(1);
      while (i < total) {
        const int64_t follower = team.take(1);
        item(i, follower);
        team.finish(1);
        i = follower;
      }
      team.wait(total);
    } else {
      share(team, total, 1, [&](int64_t i) { item(i, i + team.members); });  // a guess: threads mostly take turns
    }
    const int64_t run = std::min<int64_t>(op.store.value_in_key ? 4 : LANES, group);
    const int64_t runs = (op.num_heads + run - 1) / run;
    share(team, step.num_tokens * runs, 1, [&](int64_t i) {
      merge(i / runs, i % runs * run, int(std::min(run, op.num_heads - i % runs * run)), begin, end);
    });
  }

 private:
  // The last tokens of a request see most: they go first.
  void unit(int64_t i, int64_t& request, int64_t& head, int64_t& part, int64_t& first, int64_t& count) const {
    const int64_t parts = (group + c.heads_per_unit - 1) / c.heads_per_unit, wide = op.store.kv_heads * parts;
    for (request = 0;; ++request) {
      const int64_t n = step.starts[request + 1] - step.starts[request], runs = (n + c.tokens_per_unit - 1) / c.tokens_per_unit;
      if (i >= runs * wide) { i -= runs * wide; continue; }
      first = (runs - 1 - i / wide) * c.tokens_per_unit;
      count = std::min(c.tokens_per_unit, n - first);
      first += step.starts[request];
      head = i % wide / parts;
      part = i % parts;
      return;
    }
  }

  // The first split of unit i, if there is such a unit.
  Spot beginning(int64_t i) const {
    if (i >= c.units) return {-1, 0, 0};
    int64_t request, head, first, count, part;
    unit(i, request, head, part, first, count);
    return {request, head, road_of(op, step.positions[first], step.positions[first + count - 1]).at(0)};
  }

  Road road(int64_t request) const {
    return road_of(op, step.positions[step.starts[request]], step.positions[step.starts[request + 1] - 1]);
  }

  // Of the splits that request b sees, counted along its road, those that it reads itself: the first are its leader's.
  void span(const Table& table, int64_t b, int64_t& from, int64_t& to) const {
    if (step.starts[b] == step.starts[b + 1]) { from = to = 0; return; }
    to = road(b).count();
    from = std::min(shared_splits(table, b), to);
  }
  int64_t shared_splits(const Table& table, int64_t b) const {
    const int64_t leader = table.leader[size_t(b)];
    if (leader == b || step.starts[b] == step.starts[b + 1] || step.starts[leader] == step.starts[leader + 1]) return 0;
    // Only splits that both have whole: a later one may be read by each on its own.
    const int64_t reach = std::min(step.positions[step.starts[leader]], step.positions[step.starts[b]]) / SPLIT;
    if (road(leader).begin || road(b).begin) return 0;
    return std::min(reach, int64_t(table.lead[size_t(b)]) * op.store.block_size / SPLIT);
  }
  void take_rows(int64_t b, int64_t head) {
    for (int64_t t = step.starts[b]; t < step.starts[b + 1]; ++t)
      for (int64_t h = 0; h < group; ++h) rows.add(step, t, head * group + h);
  }
  // Followers in order of how long they stay, so that those of a later split are a beginning of the list.
  void gather_followers(const Table& table, int64_t b, int64_t head, int64_t split) {
    for (int64_t want = c.splits; want > split; --want)
      for (int64_t f = b + 1; f < step.num_requests; ++f)
        if (table.leader[size_t(f)] == b && shared_splits(table, f) == want) take_rows(f, head);
  }
  int64_t present(const Table& table, int64_t b, int64_t split) const {
    int64_t n = step.starts[b + 1] - step.starts[b];
    for (int64_t f = b + 1; f < step.num_requests; ++f)
      if (table.leader[size_t(f)] == b && shared_splits(table, f) > split) n += step.starts[f + 1] - step.starts[f];
    return n * group;
  }

  float* record(int64_t token, int64_t head, int64_t i) const {
    return parted + ((token * op.num_heads + head) * c.wave + i) * c.record;
  }
  float* merged(int64_t token, int64_t head) const {
    return parted + (step.num_tokens * op.num_heads * c.wave + token * op.num_heads + head) * c.record;
  }

  // Values go straight to their records where those of the next rows stand at one distance. (Without a window the records
  // of a row are counted by split, so that one a row does not see is there too, and is not merged.)
  void aim(int64_t row, int n, int64_t i) const {
    if (!op.store.value_in_key || op.window) return;
    const int64_t apart = c.wave * c.record;
    float* first = record(rows.token[row], rows.head[row], i);
    bool even = true;
    for (int r = 1; r < n; ++r) even = even && record(rows.token[row + r], rows.head[row + r], i) == first + r * apart;
    if (even) a->into(first + c.head, apart);
    else a->into(a->values, width);
  }

  void clear(int64_t count) { std::fill(packed, packed + (count + MAX_ROWS - 1) / MAX_ROWS, 0); }

  // One split for the first `count` rows, tile of rows by tile of rows, all of about one height: sixteen are 8 and 8, not
  // 12 and 4. Between two `clear`s `count` never grows, so a tile packed for other rows is always seen by its key.
  // `soon` is the split that this thread reads after it; `before` is told which rows are next.
  template <class Before, class Emit>
  void pass(const Spot& now, const Spot& soon, int64_t count, Before&& before, Emit&& emit) {
    const Keys keys = a->find(now.request, now.head, now.split);
    const Keys later = soon.request < 0 ? keys : a->find(soon.request, soon.head, soon.split);
    if (a->latent) {
      a->done = 0;
      a->next.start(soon.request < 0 ? nullptr : &later, a->k_tile);
    }
    const int64_t tiles = (count + MAX_ROWS - 1) / MAX_ROWS, height = tiles ? (count + tiles - 1) / tiles : 1;
    a->again = tiles > 1;
    for (int64_t r0 = 0; r0 < count; r0 += height)
      with_rows(int(std::min<int64_t>(height, count - r0)), [&](auto n) {
        constexpr int R = decltype(n)::value;
        uint8_t* q = a->queries + r0 * a->d * 4;
        const int64_t key = r0 * 16 + R;
        if (packed[r0 / height] != key) {
          a->load_queries(q, R, rows.token + r0, rows.head + r0);
          packed[r0 / height] = key;
        }
        before(r0, R);
        Partial part[R];
        a->template split<R>(keys, r0 == 0 && a->fetches ? &later : nullptr, q, now.split, rows.position + r0, part);
        emit(r0, R, part);
      });
  }

  // Results of one token's heads head..head+count-1 (at most LANES), in order of their splits begin..end-1.
  void merge(int64_t token, int64_t head, int count, int64_t begin, int64_t end) {
    const int64_t splits = road_of(op, step.positions[token], step.positions[token]).count();
    if (splits <= begin) return;
    const bool first = begin == 0, last = splits <= end;
    for (int r = 0; r < count; ++r) {
      const float* kept = first ? nullptr : merged(token, head + r);
      state[r] = first ? Partial{-__builtin_inff(), 0} : Partial{kept[0], kept[1]};
      if (first) std::fill(sums + r * width, sums + (r + 1) * width, 0.0f);
      else std::memcpy(sums + r * width, kept + c.head, size_t(width) * 4);
    }
    for (int64_t j = begin; j < std::min(splits, end); ++j) {
      auto from = [&](int r) { return record(token, head + r, j - begin); };
      fold(count, state, sums, [&](int r) { return Partial{from(r)[0], from(r)[1]}; }, [&](int r) { return from(r) + c.head; }, width);
    }
    for (int r = 0; r < count; ++r) {
      if (last) { a->finish(token, head + r, state[r], sums + r * width); continue; }
      float* kept = merged(token, head + r);
      kept[0] = state[r].m; kept[1] = state[r].l;
      std::memcpy(kept + c.head, sums + r * width, size_t(width) * 4);
    }
  }
};

template <class E> inline void attend_as(const Op& op, const Step& step, Team& team) {
  const Cut c = cut_of(op, step);
  const int64_t group = op.num_heads / op.store.kv_heads, width = Attention<E>::v_width(op.store);
  const int64_t most = (c.splits ? step.num_tokens : c.tokens_per_unit) * group, wide = std::max<int64_t>(most, LANES);
  const size_t own = (Attention<E>::own_bytes(op.store, most) + 63) / 64 * 64;
  uint8_t* memory = team.own->at(own + 64 + size_t(wide) * ((width + 2) * 4 + 4 * 8));
  Attention<E> a(op, op.store, step, memory, most);
  Attending<E> work{op, step, team, c, group, width};
  work.a = &a;
  work.state = (Partial*)(memory + own);
  int64_t* lists = (int64_t*)(work.state + wide);
  work.rows.token = lists;
  work.rows.head = lists + wide;
  work.rows.position = lists + 2 * wide;
  work.packed = lists + 3 * wide;
  work.sums = (float*)(lists + 4 * wide);
  work.parted = (float*)team.common;
  if (c.splits) work.in_parts();
  else work.whole();
}

inline void attend(const Op& op, const Step& step, Team& team) {
  if (op.store.type == Type::bf16) attend_as<Bf16>(op, step, team);
  else if (op.store.type == Type::f16) attend_as<F16>(op, step, team);
  else attend_as<F32>(op, step, team);
}

}  // namespace KVIST_VARIANT
