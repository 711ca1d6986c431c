#include "program.h"

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define KV_DECLARE(name) namespace name { extern const kvist::Kernels table; }
#ifdef KVIST_HAVE_AVX512BF16
KV_DECLARE(avx512bf16)
#endif
#ifdef KVIST_HAVE_AVX512
KV_DECLARE(avx512)
#endif
#ifdef KVIST_HAVE_AVX2
KV_DECLARE(avx2)
#endif
KV_DECLARE(portable)

namespace kvist {

const std::vector<const Kernels*>& all_kernels() {
  static const std::vector<const Kernels*> found = [] {
    std::vector<const Kernels*> list;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    (void)avx512;
#ifdef KVIST_HAVE_AVX512BF16
    if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) list.push_back(&avx512bf16::table);
#endif
#ifdef KVIST_HAVE_AVX512
    if (avx512) list.push_back(&avx512::table);
#endif
#ifdef KVIST_HAVE_AVX2
    if (avx2) list.push_back(&avx2::table);
#endif
#endif
    list.push_back(&portable::table);
    return list;
  }();
  return found;
}

const Kernels& kernels_named(const std::string& name) {
  std::string known;
  for (const Kernels* k : all_kernels()) {
    if (name == k->name) return *k;
    known += std::string(known.empty() ? "" : ", ") + k->name;
  }
  throw std::invalid_argument("no kernel variant '" + name + "' on this machine: there are " + known);
}

uint8_t* Scratch::at(size_t need) {
  need += 64;
  if (bytes.size() < need) bytes.resize(need + need / 4);
  return (uint8_t*)(((uintptr_t)bytes.data() + 63) & ~uintptr_t(63));
}

static inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Spins, since the wait is usually under a microsecond; gives the core away when another program holds an item up.
void Team::wait(int64_t total) {
  for (int spins = 0; phase->finished.load(std::memory_order_acquire) < total;)
    if (++spins < 4096) pause_briefly(); else sched_yield();
  ++phase;
}

// Rounding to nearest, denormals kept, every exception masked: whatever the caller has set, for the time of a run.
struct FloatingPoint {
#if defined(__x86_64__)
  unsigned saved = _mm_getcsr();
  FloatingPoint() { _mm_setcsr(0x1f80); }
  ~FloatingPoint() { _mm_setcsr(saved); }
#elif defined(__aarch64__)
  uint64_t saved;
  FloatingPoint() { __asm__ volatile("mrs %0, fpcr" : "=r"(saved)); __asm__ volatile("msr fpcr, %0" ::"r"(uint64_t(0))); }
  ~FloatingPoint() { __asm__ volatile("msr fpcr, %0" ::"r"(saved)); }
#endif
};

// A wrong index would read or write another request's memory: refused before anything runs.
static void validate(const Op& op, const Step& step) {
  if (op.kind == OpKind::embed) {
    for (int64_t t = 0; t < step.num_tokens; ++t)
      if (step.tokens[t] < 0 || step.tokens[t] >= op.weight.n)
        throw std::out_of_range("token " + std::to_string(step.tokens[t]) + " in a vocabulary of " + std::to_string(op.weight.n));
    if (op.places.data)
      for (int64_t t = 0; t < step.num_tokens; ++t)
        if (step.positions[t] < 0 || step.positions[t] >= op.places.n)
          throw std::out_of_range("position " + std::to_string(step.positions[t]) + " of " + std::to_string(op.places.n) + " learned ones");
  } else if (op.kind == OpKind::append || op.kind == OpKind::append_latent) {
    const Table& table = step.tables[op.store.group];
    for (int64_t b = 0; b < step.num_requests; ++b)
      for (int64_t t = step.starts[b]; t < step.starts[b + 1]; ++t) {
        const int64_t position = step.positions[t], i = position / op.store.block_size;
        if (position < 0 || (op.rotary && position >= op.rope_rows))
          throw std::out_of_range("position " + std::to_string(position) + " beyond a rotation table of " + std::to_string(op.rope_rows));
        if (i >= table.width || table.data[b * table.width + i] < 0 || table.data[b * table.width + i] >= op.store.num_blocks)
          throw std::out_of_range("position " + std::to_string(position) + " has no block");
      }
  } else if (op.kind == OpKind::attend || op.kind == OpKind::attend_expanded) {
    const Table& table = step.tables[op.store.group];
    const int64_t size = op.store.block_size;
    for (int64_t b = 0; b < step.num_requests; ++b) {
      if (step.starts[b] == step.starts[b + 1]) continue;
      const int64_t last = step.positions[step.starts[b + 1] - 1], first = step.positions[step.starts[b]];
      const int64_t oldest = op.window ? std::max<int64_t>(0, first - op.window + 1) : 0;
      for (int64_t p = 0; p <= last; p = (p / size + 1) * size) {
        if (p >= op.sinks && p < oldest) p = oldest;
        const int64_t i = p / size, id = i < table.width ? table.data[b * table.width + i] : -1;
        if (id < 0 || id >= op.store.num_blocks)
          throw std::out_of_range("position " + std::to_string(p) + " is visible but its block is not stored");
      }
    }
  } else if (op.kind == OpKind::linear && op.wanted) {
    for (int64_t r = 0; r < step.num_rows; ++r)
      if (step.rows[r] < 0 || step.rows[r] >= step.num_tokens)
        throw std::out_of_range("wanted row " + std::to_string(step.rows[r]) + " of " + std::to_string(step.num_tokens));
  }
}

void find_leaders(Table& table, int64_t requests) {
  table.leader.resize(size_t(requests));
  table.lead.assign(size_t(requests), 0);
  for (int64_t b = 0; b < requests; ++b) {
    table.leader[size_t(b)] = int32_t(b);
    const int32_t* own = table.data + b * table.width;
    for (int64_t a = 0; a < b && table.lead[size_t(b)] == 0; ++a) {
      if (table.leader[size_t(a)] != a) continue;
      const int32_t* other = table.data + a * table.width;
      int64_t same = 0;
      while (same < table.width && own[same] == other[same] && own[same] >= 0) ++same;
      if (same) { table.leader[size_t(b)] = int32_t(a); table.lead[size_t(b)] = int32_t(same); }
    }
  }
}

void Program::run(const Step& step, size_t first, size_t last) {
  for (size_t i = first; i < last; ++i) validate(ops_[i], step);
  size_t need = 0;
  for (size_t i = first; i < last; ++i) need = std::max(need, kernels_.common_bytes(ops_[i], step));
  uint8_t* common = common_.at(need);
  own_.resize(size_t(threads_));
  size_t phases = 0;
  for (size_t i = first; i < last; ++i) phases += size_t(phases_of(ops_[i]));
  phases_ = std::make_unique<Phase[]>(phases);
#pragma omp parallel num_threads(threads_)
  {
    FloatingPoint mode;
    Team team{phases_.get(), &own_[size_t(omp_get_thread_num())], threads_, common};
    Phase* phase = phases_.get();
    for (size_t i = first; i < last; ++i) {
      team.phase = phase;
      phase += phases_of(ops_[i]);
      kernels_.exec(ops_[i], step, team);
    }
  }
}

double read_bandwidth(const uint8_t* data, size_t bytes, int threads, int passes) {
  const size_t words = bytes / 64 * 8, share = words / size_t(threads) / 64 * 64;
  uint64_t total = 0;
  const auto start = std::chrono::steady_clock::now();
#pragma omp parallel num_threads(threads) reduction(+ : total)
  for (int pass = 0; pass < passes; ++pass) {
    const uint64_t* x = (const uint64_t*)data + share * size_t(omp_get_thread_num());
    typedef uint64_t line __attribute__((vector_size(64)));
    line sum[4] = {};
    for (size_t i = 0; i + 32 <= share; i += 32)
      for (int j = 0; j < 4; ++j) sum[j] += *(const line*)(x + i + 8 * size_t(j));
    for (int j = 0; j < 4; ++j) for (int i = 0; i < 8; ++i) total += sum[j][i];
    __asm__ volatile("" ::"r"(total) : "memory");
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  return double(share) * 8 * threads * passes / took.count();
}

}  // namespace kvist
