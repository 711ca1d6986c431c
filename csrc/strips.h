// GGUF blocks as the kernels hold them: strips of 16 rows, one row a lane, the file's own bits in another order.
//
// A strip: for each block of 32 columns its quants, [4 groups][16 lanes][4 bytes] with column 4 g + j in the low half of
// byte j and column 16 + 4 g + j in the high half (8-bit quants: eight groups of whole bytes), then the bits above the
// fourth, [16 lanes][32 or 64 bits]; behind all quants, for each super-block, its half-precision factors [d][m] a lane,
// then the bytes of each block's own two factors. Strips are padded to cache lines, rows beyond the last are zero.
#pragma once
#include "dequant.h"
#include "integers.h"
#include "rounded.h"

namespace KVIST_VARIANT {

enum class Factors { d, d_and_m, k_scale_and_min, k_two_scales };

// A weight is d (u - OFFSET) [+ m] with u of LOW + HIGH bits: everything that kernels need to know of a type.
template <int TYPE_, int LOW_, int HIGH_, int OFFSET_, Factors FACTORS_> struct Format {
  static constexpr int TYPE = TYPE_, LOW = LOW_, HIGH = HIGH_, OFFSET = OFFSET_;
  static constexpr Factors FACTORS = FACTORS_;
  static constexpr bool MIN = FACTORS == Factors::d_and_m || FACTORS == Factors::k_scale_and_min;
  static constexpr bool SUB = FACTORS == Factors::k_two_scales;  // an integer factor for each 16 columns
  static constexpr int SUPER = FACTORS == Factors::k_scale_and_min || SUB ? 8 : 1;  // blocks that share d and m
  static constexpr int64_t QUANTS = LOW == 8 ? 512 : 256 + 64 * HIGH, HEAD = MIN ? 64 : 32, OWN = SUPER == 1 ? 0 : 32;
  static constexpr int64_t FACTOR_BYTES = HEAD + SUPER * OWN;
};
using Q4_0 = Format<2, 4, 0, 8, Factors::d>;
using Q4_1 = Format<3, 4, 0, 0, Factors::d_and_m>;
using Q5_0 = Format<6, 4, 1, 16, Factors::d>;
using Q5_1 = Format<7, 4, 1, 0, Factors::d_and_m>;
using Q8_0 = Format<8, 8, 0, 128, Factors::d>;
using Q4_K = Format<12, 4, 0, 0, Factors::k_scale_and_min>;
using Q5_K = Format<13, 4, 1, 0, Factors::k_scale_and_min>;
using Q6_K = Format<14, 4, 2, 32, Factors::k_two_scales>;

template <class F> inline bool with_format(int type, F&& f) {
  switch (type) {
    case Q4_0::TYPE: f(Q4_0{}); return true;
    case Q4_1::TYPE: f(Q4_1{}); return true;
    case Q5_0::TYPE: f(Q5_0{}); return true;
    case Q5_1::TYPE: f(Q5_1{}); return true;
    case Q8_0::TYPE: f(Q8_0{}); return true;
    case Q4_K::TYPE: f(Q4_K{}); return true;
    case Q5_K::TYPE: f(Q5_K{}); return true;
    case Q6_K::TYPE: f(Q6_K{}); return true;
    default: return false;
  }
}

inline int64_t strip_bytes(int type, int64_t k) {  // 0: a type that is not held packed, or a k that blocks do not divide
  int64_t bytes = 0;
  with_format(type, [&](auto f) {
    using F = decltype(f);
    const int64_t columns = BLOCK * F::SUPER;
    if (k % columns == 0) bytes = (k / BLOCK * F::QUANTS + k / columns * F::FACTOR_BYTES + 63) / 64 * 64;
  });
  return bytes;
}

inline const Segment& segment_of(const Weight& w, int64_t row) {
  const Segment* s = w.segments.data();
  while (row >= s->first + s->rows) ++s;
  return *s;
}

// ---- a row in, a row out -------------------------------------------------------------------------------------------

// One block of the file as plain bytes: u of each column, the halves d and m, and two factor bytes for each 32 columns.
template <class F> inline void open_block(const uint8_t* b, uint8_t* u, uint8_t* halves, uint8_t* factors) {
  if constexpr (F::SUPER == 1) {
    constexpr int head = F::MIN ? 4 : 2, low = head + 4 * F::HIGH;
    std::memcpy(halves, b, head);
    if constexpr (F::LOW == 8) {
      for (int i = 0; i < 32; ++i) u[i] = uint8_t(b[low + i] ^ 0x80);  // -128..127 to 0..255
    } else {
      uint32_t high = 0;
      if constexpr (F::HIGH == 1) std::memcpy(&high, b + head, 4);
      for (int i = 0; i < 16; ++i) {
        u[i] = uint8_t((b[low + i] & 15) | (high >> i & 1) << 4);
        u[i + 16] = uint8_t((b[low + i] >> 4) | (high >> (i + 16) & 1) << 4);
      }
    }
  } else if constexpr (F::SUB) {
    std::memcpy(halves, b + 208, 2);
    std::memcpy(factors, b + 192, 16);
    for (int half = 0; half < 2; ++half)
      for (int quarter = 0; quarter < 4; ++quarter)
        for (int j = 0; j < 32; ++j) {
          const uint8_t low = b[half * 64 + quarter % 2 * 32 + j], high = b[128 + half * 32 + j];
          u[half * 128 + quarter * 32 + j] = uint8_t((quarter < 2 ? low & 15 : low >> 4) | (high >> (quarter * 2) & 3) << 4);
        }
  } else {
    std::memcpy(halves, b, 4);
    for (int i = 0; i < 8; ++i) {
      float scale, minimum;
      gguf::k_scales(b + 4, i, scale, minimum);
      factors[2 * i] = uint8_t(scale); factors[2 * i + 1] = uint8_t(minimum);
      const uint8_t* q = b + (F::HIGH ? 48 : 16) + i / 2 * 32;
      for (int j = 0; j < 32; ++j)
        u[i * 32 + j] = uint8_t((q[j] >> (i % 2 * 4) & 15) | (F::HIGH ? (b[16 + j] >> i & 1) << 4 : 0));
    }
  }
}

template <class F> inline void tile_one(uint8_t* strip, int64_t lane, int64_t k, const uint8_t* in, size_t file_bytes) {
  uint8_t *quants = strip + 4 * lane, *head = strip + k / BLOCK * F::QUANTS;
  for (int64_t s = 0; s < k / (BLOCK * F::SUPER); ++s, in += file_bytes, head += F::FACTOR_BYTES) {
    uint8_t u[BLOCK * F::SUPER], halves[4], factors[16];
    open_block<F>(in, u, halves, factors);
    std::memcpy(head + 2 * lane, halves, 2);
    if constexpr (F::MIN) std::memcpy(head + 32 + 2 * lane, halves + 2, 2);
    for (int i = 0; i < F::SUPER; ++i, quants += F::QUANTS) {
      if constexpr (F::OWN != 0) for (int j = 0; j < 2; ++j) head[F::HEAD + 32 * i + 16 * j + lane] = factors[2 * i + j];
      uint32_t group[8], high[2] = {};
      std::memcpy(group, u + BLOCK * i, 32);
      if constexpr (F::LOW == 8) {
        for (int g = 0; g < 8; ++g) std::memcpy(quants + 64 * g, group + g, 4);
      } else {
        for (int g = 0; g < 4; ++g) {
          const uint32_t both = (group[g] & 0x0f0f0f0fu) | (group[g + 4] & 0x0f0f0f0fu) << 4;
          std::memcpy(quants + 64 * g, &both, 4);
        }
        if constexpr (F::HIGH == 1) for (int g = 0; g < 8; ++g) high[0] |= (group[g] >> 4 & 0x01010101u) << g;
        if constexpr (F::HIGH == 2) for (int g = 0; g < 8; ++g) high[g / 4] |= (group[g] >> 4 & 0x03030303u) << g % 4 * 2;
        for (int h = 0; h < F::HIGH; ++h) std::memcpy(quants + 256 + 64 * h, high + h, 4);
      }
    }
  }
}

// Write one row of GGUF blocks as row `row` of a packed weight.
inline void tile_row(const Weight& w, int64_t row, const uint8_t* in) {
  const Segment& s = segment_of(w, row);
  const int64_t local = row - s.first;
  uint8_t* strip = const_cast<uint8_t*>(s.data) + local / LANES * strip_bytes(s.format, w.k);
  with_format(s.format, [&](auto f) { tile_one<decltype(f)>(strip, local % LANES, w.k, in, gguf::find(s.format)->bytes); });
}

template <class F> inline void read_one(const uint8_t* strip, int64_t lane, int64_t k, float* out) {
  const uint8_t *quants = strip + 4 * lane, *head = strip + k / BLOCK * F::QUANTS;
  for (int64_t b = 0; b < k / BLOCK; ++b, quants += F::QUANTS, out += BLOCK) {
    const uint8_t *shared = head + b / F::SUPER * F::FACTOR_BYTES, *own = shared + F::HEAD + b % F::SUPER * 32 + lane;
    const float d = gguf::half_to(shared + 2 * lane), m = F::MIN ? gguf::half_to(shared + 32 + 2 * lane) : 0;
    for (int c = 0; c < BLOCK; ++c) {
      const int g = c / 4, j = c % 4;
      int u;
      if constexpr (F::LOW == 8) u = quants[64 * g + j];
      else u = quants[64 * (g % 4) + j] >> (g / 4 * 4) & 15;
      if constexpr (F::HIGH == 1) u |= (quants[256 + j] >> g & 1) << 4;
      if constexpr (F::HIGH == 2) u |= (quants[256 + 64 * (g / 4) + j] >> g % 4 * 2 & 3) << 4;
      // The products of the `gguf` package, in its order.
      const float q = float(u - F::OFFSET);
      if constexpr (F::FACTORS == Factors::d) out[c] = d * q;
      if constexpr (F::FACTORS == Factors::d_and_m) out[c] = d * q + m;
      if constexpr (F::FACTORS == Factors::k_scale_and_min) out[c] = d * float(own[0]) * q - m * float(own[16]);
      if constexpr (F::SUB) out[c] = d * float(int8_t(own[c / 16 * 16])) * q;
    }
  }
}

inline void packed_row(const Weight& w, int64_t row, float* out) {
  const Segment& s = segment_of(w, row);
  const int64_t local = row - s.first;
  const uint8_t* strip = s.data + local / LANES * strip_bytes(s.format, w.k);
  with_format(s.format, [&](auto f) { read_one<decltype(f)>(strip, local % LANES, w.k, out); });
}

// ---- in registers --------------------------------------------------------------------------------------------------

struct Factored { vf d, m; vi first, second; };  // m only with MIN, the integers only with SUB

// A strip as it is held: quants are unpacked in registers as they are read.
template <class F> struct Held {
  static constexpr bool MIN = F::MIN, SUB = F::SUB;
  static constexpr int OFFSET = F::OFFSET;
  using Quants = Bytes;
  using Sum = ByteSum;
  const uint8_t *quants, *factors;
  int64_t ahead;
  Held(const uint8_t* strip, int64_t k, int64_t distance = 0) : quants(strip), factors(strip + k / BLOCK * F::QUANTS), ahead(distance) {}
  // Ask for what is read `ahead` bytes later: strips are short, and the machine's own guess begins anew with each.
  KV_INLINE void fetch(int64_t b) const {
    for (int64_t i = 0; i < F::QUANTS; i += 64) __builtin_prefetch(quants + b * F::QUANTS + ahead + i, 0, 3);
    if (F::SUPER == 1 || b % F::SUPER == 0)
      for (int64_t i = 0; i < F::FACTOR_BYTES; i += 64) __builtin_prefetch(factors + b / F::SUPER * F::FACTOR_BYTES + ahead + i, 0, 3);
  }
  KV_INLINE vi group(int64_t b, int g) const {  // 16 lanes of 4 bytes: columns 4 g .. 4 g + 3 of block b
    const uint8_t* q = quants + b * F::QUANTS;
    if constexpr (F::LOW == 8) return load_i(q + 64 * g);
    vi w = load_i(q + 64 * (g % 4));
    if (g >= 4) w = right(w, 4);
    if constexpr (F::HIGH == 0) return masked(w, 0x0f0f0f0fu);
    const int from = F::HIGH == 1 ? g : g % 4 * 2;  // where the higher bits stand in each byte; they belong at 4
    vi h = load_i(q + 256 + (F::HIGH == 1 ? 0 : g / 4 * 64));
    h = from <= 4 ? left(h, 4 - from) : right(h, from - 4);
    return joined(w, 0x0f0f0f0fu, h, F::HIGH == 1 ? 0x10101010u : 0x30303030u);
  }
  KV_INLINE Bytes columns(int64_t b, int g) const { return bytes_of(group(b, g)); }
  KV_INLINE Factored factored(int64_t b) const {
    const uint8_t *head = factors + b / F::SUPER * F::FACTOR_BYTES, *own = head + F::HEAD + b % F::SUPER * 32;
    Factored r;
    r.d = load_f16((const uint16_t*)head);
    if constexpr (F::MIN) r.m = load_f16((const uint16_t*)(head + 32));
    if constexpr (F::FACTORS == Factors::k_scale_and_min) {  // both products are exact: 11 bits times 6
      r.d = mul(r.d, to_float(from_unsigned(own)));
      r.m = mul(r.m, sub(zero(), to_float(from_unsigned(own + 16))));
    }
    if constexpr (F::SUB) { r.first = from_signed(own); r.second = from_signed(own + 16); }
    return r;
  }
};

// A strip unpacked once for many rows: u - OFFSET, times the factor of its 16 columns if it has one, in 16-bit pairs (6 bits
// times 8, and their sum of 32 still fits 32 bits), and the other factors as the arithmetic takes them.
template <bool MIN_> struct Opened {
  static constexpr bool MIN = MIN_, SUB = false;
  static constexpr int OFFSET = 0;
  static constexpr int64_t BYTES = 1024 + 64 * (1 + MIN);  // of a block
  using Quants = Pairs;
  using Sum = PairSum;
  const uint8_t* at;
  KV_INLINE void fetch(int64_t) const {}
  KV_INLINE Pairs columns(int64_t b, int g) const { return {load_i(at + b * BYTES + 128 * g), load_i(at + b * BYTES + 128 * g + 64)}; }
  KV_INLINE Factored factored(int64_t b) const {
    Factored r;
    r.d = load(at + b * BYTES + 1024);
    if constexpr (MIN) r.m = load(at + b * BYTES + 1088);
    return r;
  }
};
constexpr int64_t OPENED_BYTES = Opened<true>::BYTES;  // the most that a block takes

// Each 16-bit half of a, less `offset`, times the integer in b's lane (b null: times one).
KV_INLINE vi scaled_pairs(vi a, int offset, const vi* b) {
  vi r;
  KV_EACH(
    const part_i low = ((a.p[i_] << 16) >> 16) - offset, high = (a.p[i_] >> 16) - offset;
    const part_i x = b ? low * b->p[i_] : low, y = b ? high * b->p[i_] : high;
    r.p[i_] = (x & 0xffff) | (y << 16);
  )
  return r;
}

template <class F> inline void open_strip(const Held<F>& held, int64_t k, uint8_t* at) {
  for (int64_t b = 0; b < k / BLOCK; ++b, at += Opened<F::MIN>::BYTES) {
    held.fetch(b);
    const Factored f = held.factored(b);
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      Pairs w = pairs_of(held.group(b, g));
      if constexpr (F::OFFSET != 0 || F::SUB) {
        const vi* factor = !F::SUB ? nullptr : g < 4 ? &f.first : &f.second;
        w = {scaled_pairs(w.even, F::OFFSET, factor), scaled_pairs(w.odd, F::OFFSET, factor)};
      }
      store_i(at + 128 * g, w.even);
      store_i(at + 128 * g + 64, w.odd);
    }
    store(at + 1024, f.d);
    if constexpr (F::MIN) store(at + 1088, f.m);
  }
}

}  // namespace KVIST_VARIANT
