// Philox for 16 counters at a time.
#pragma once

#include "isa.h"
#include "partkernels/philox.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

constexpr int kLanes = 16;

#if defined(PARTKERNELS_AVX512)

// A lane has 64 bits; its upper half is undefined. So the low word of a product is used as it is, and the high word
// after a shift.
struct Lanes {
  __m512i half[2];
};

inline Lanes load_lanes(const uint32_t* from) {
  return {{_mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))),
           _mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 8)))}};
}

inline Lanes same_lanes(uint32_t value) {
  const __m512i same = _mm512_set1_epi32(static_cast<int>(value));
  return {{same, same}};
}

inline void store_lanes(const Lanes& from, uint32_t* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi64_epi32(from.half[0]));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8), _mm512_cvtepi64_epi32(from.half[1]));
}

inline Lanes plus(const Lanes& a, const Lanes& b) {
  return {{_mm512_add_epi32(a.half[0], b.half[0]), _mm512_add_epi32(a.half[1], b.half[1])}};
}

// The high and low words of the product of each lane and a constant.
inline void multiply_wide(const Lanes& a, uint32_t b, Lanes* high, Lanes* low) {
  for (int h = 0; h < 2; ++h) {
    low->half[h] = _mm512_mul_epu32(a.half[h], _mm512_set1_epi32(static_cast<int>(b)));
    high->half[h] = _mm512_srli_epi64(low->half[h], 32);
  }
}

inline Lanes xor3(const Lanes& a, const Lanes& b, uint32_t c) {
  const __m512i same = _mm512_set1_epi32(static_cast<int>(c));
  return {{_mm512_ternarylogic_epi32(a.half[0], b.half[0], same, 0x96),
           _mm512_ternarylogic_epi32(a.half[1], b.half[1], same, 0x96)}};
}

#else

// Simple loops over 16 words, which every compiler vectorises for its target.
struct Lanes {
  uint32_t lane[kLanes];
};

inline Lanes load_lanes(const uint32_t* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

inline Lanes same_lanes(uint32_t value) {
  Lanes lanes;
  for (uint32_t& lane : lanes.lane) lane = value;
  return lanes;
}

inline void store_lanes(const Lanes& from, uint32_t* to) { std::memcpy(to, &from, sizeof(from)); }

inline void multiply_wide(const Lanes& a, uint32_t b, Lanes* high, Lanes* low) {
  for (int i = 0; i < kLanes; ++i) {
    const uint64_t product = uint64_t{a.lane[i]} * b;
    high->lane[i] = static_cast<uint32_t>(product >> 32);
    low->lane[i] = static_cast<uint32_t>(product);
  }
}

inline Lanes plus(const Lanes& a, const Lanes& b) {
  Lanes lanes;
  for (int i = 0; i < kLanes; ++i) lanes.lane[i] = a.lane[i] + b.lane[i];
  return lanes;
}

inline Lanes xor3(const Lanes& a, const Lanes& b, uint32_t c) {
  Lanes lanes;
  for (int i = 0; i < kLanes; ++i) lanes.lane[i] = a.lane[i] ^ b.lane[i] ^ c;
  return lanes;
}

#endif

// The first two rounds process a counter's words c0 and c1 independently: the part that depends on a column's c0 is
// computed once for all rows, and the part that depends on a row's c1 once for all columns.
struct ColumnPart {
  Lanes c0, c1, c2;
};

struct RowPart {
  Lanes c2, c3;
};

// c2 and c3 are the same for all lanes.
inline ColumnPart column_part(Lanes c0, uint32_t c2, uint32_t c3, uint64_t seed) {
  const uint32_t k0 = low_word(seed), k1 = high_word(seed);
  Lanes high0, low0, high1, low1;
  multiply_wide(c0, kPhiloxMultiplier0, &high0, &low0);
  multiply_wide(xor3(high0, same_lanes(c3), k1), kPhiloxMultiplier1, &high1, &low1);
  const auto first = low_word(uint64_t{kPhiloxMultiplier1} * c2);
  const Lanes zero = same_lanes(0);
  return {xor3(high1, same_lanes(first), k0 + kPhiloxKeyStep0), low1, xor3(low0, zero, k1 + kPhiloxKeyStep1)};
}

inline RowPart row_part(Lanes c1, uint32_t c2, uint64_t seed) {
  const auto first = high_word(uint64_t{kPhiloxMultiplier1} * c2);
  RowPart part;
  multiply_wide(xor3(c1, same_lanes(first), low_word(seed)), kPhiloxMultiplier0, &part.c2, &part.c3);
  return part;
}

// A counter between two rounds, and the keys of the next round.
struct PhiloxRound {
  Lanes c0, c1, c2, c3;
  uint32_t k0, k1;

  void next() {
    Lanes high0, low0, high1, low1;
    multiply_wide(c0, kPhiloxMultiplier0, &high0, &low0);
    multiply_wide(c2, kPhiloxMultiplier1, &high1, &low1);
    c0 = xor3(high1, c1, k0);
    c1 = low1;
    c2 = xor3(high0, c3, k1);
    c3 = low0;
    k0 += kPhiloxKeyStep0;
    k1 += kPhiloxKeyStep1;
  }
};

// The state after `rounds` rounds. The column and row parts include the first two.
inline PhiloxRound philox_rounds(const ColumnPart& column, const RowPart& row, uint64_t seed, int rounds) {
  PhiloxRound state{column.c0,
                    column.c1,
                    xor3(column.c2, row.c2, 0),
                    row.c3,
                    low_word(seed) + 2 * kPhiloxKeyStep0,
                    high_word(seed) + 2 * kPhiloxKeyStep1};
  for (int round = 2; round < rounds; ++round) state.next();
  return state;
}

// The four words of Philox4x32-7 for each lane.
inline void philox_lanes(const ColumnPart& column, const RowPart& row, uint64_t seed, Lanes words[4]) {
  const PhiloxRound last = philox_rounds(column, row, seed, kPhiloxRounds);
  words[0] = last.c0;
  words[1] = last.c1;
  words[2] = last.c2;
  words[3] = last.c3;
}

#if defined(PARTKERNELS_AVX512_BF16)
// The same in pairs: words 0 and 1, and words 2 and 3, in the upper and lower halves of 64 bits. The products of the
// last round already have this layout; only the xor remains.
inline void philox_pairs(const ColumnPart& column, const RowPart& row, uint64_t seed, Lanes pairs[2]) {
  const PhiloxRound last = philox_rounds(column, row, seed, kPhiloxRounds - 1);
  const auto pair = [](const Lanes& factor, uint32_t multiplier, const Lanes& other, uint32_t key) {
    Lanes result;
    for (int h = 0; h < 2; ++h) {
      const __m512i product = _mm512_mul_epu32(factor.half[h], _mm512_set1_epi32(static_cast<int>(multiplier)));
      const __m512i upper = _mm512_slli_epi64(other.half[h], 32);
      result.half[h] =
          _mm512_ternarylogic_epi64(product, upper, _mm512_set1_epi64(static_cast<int64_t>(uint64_t{key} << 32)), 0x96);
    }
    return result;
  };
  pairs[0] = pair(last.c2, kPhiloxMultiplier1, last.c1, last.k0);
  pairs[1] = pair(last.c0, kPhiloxMultiplier0, last.c3, last.k1);
}
#endif

}  // namespace partkernels::cpu::PARTKERNELS_ISA
