// Rebuilds entries of a subnetwork's weight in registers, 64 columns of a row at a time.
//
// Four threads share a group of 64 columns, as the threads of a quad share a tensor core's fragment: thread q has the
// columns 16 a + 8 b + 2 q + e, in 8 pairs (a, b) of neighbours e = 0 and 1. A pair is one word of two 16-bit entries.
#pragma once

#include "intrinsics.h"
#include "partkernels/defaults.h"
#include "partkernels/packed_map.h"

namespace partkernels::cuda {

constexpr int kGroup = 64;
constexpr int kQuad = 4;
constexpr int kPairs = kGroup / kQuad / 2;

// Constants to compare all fields of a word with active - 1 at once.
struct Threshold {
  uint32_t low;     // all bits except the top one of each field
  uint32_t addend;  // carries a field's low bits into the top one if they reach active's
  uint32_t below;   // all ones if active is below the middle of a field's range
};

PARTKERNELS_FUNCTION Threshold threshold(int bits, int active) {
  if (active >= 1 << bits) return {0, 0, 0};  // all are active
  const uint32_t ones = 0xFFFFFFFFu / ((1u << bits) - 1);
  const uint32_t top = 1u << (bits - 1);
  const auto reached = static_cast<uint32_t>(active);
  return {ones * (top - 1), ones * (top - reached % top), reached < top ? 0xFFFFFFFFu : 0};
}

// Sets the top bit of each field that contains a partition beyond active; the other bits are undefined. A field reaches
// the threshold if its top bit and the top bit of the sum of the low bits are set: both of them, or either if the
// threshold has no top bit.
PARTKERNELS_FUNCTION uint32_t dead_bits(uint32_t fields, const Threshold& t) {
  const uint32_t carried = (fields & t.low) + t.addend;
  return (fields & carried) | (t.below & (fields | carried));
}

// A thread's fields of a group, from the words that its quad shares: byte j of the two words has the fields of pair j
// in its top bits. So only two words are compared, not all words of the group.
template <int kBits>
PARTKERNELS_DEVICE void own_fields(const uint32_t* words, int q, uint32_t (&own)[2]) {
  uint32_t all[2 * kBits];
  load_words(words, all);
  PARTKERNELS_UNROLL
  for (int i = 0; i < 2; ++i) {
    if constexpr (kBits == 1) {
      own[i] = all[i] << (2 * (3 - q));
    } else if constexpr (kBits == 2) {
      own[i] = select_bytes(all[2 * i], all[2 * i + 1], 0x6420 + 0x1111 * (q / 2)) << (4 * (1 - q % 2));
    } else {
      const uint32_t low = select_bytes(all[4 * i], all[4 * i + 1], 0x40 + 0x11 * q);
      own[i] = select_bytes(low, select_bytes(all[4 * i + 2], all[4 * i + 3], 0x40 + 0x11 * q), 0x5410);
    }
  }
}

// The masks of a thread's pairs: all ones for an inactive entry. `group` points to the group's bytes in the map.
template <int kBits>
PARTKERNELS_DEVICE void dead_pairs(const uint8_t* group, int q, const Threshold& t, uint32_t (&mask)[kPairs]) {
  const auto* const words = reinterpret_cast<const uint32_t*>(group);
  // A mask repeats the top bits of two bytes, each twice.
  if constexpr (kBits == 8) {
    PARTKERNELS_UNROLL
    for (int j = 0; j < kPairs; j += 2) {
      const uint32_t two = select_bytes(words[2 * j + q / 2], words[2 * j + 2 + q / 2], 0x5410 + 0x2222 * (q % 2));
      const uint32_t dead = dead_bits(two, t);
      mask[j] = select_bytes(dead, 0, 0x9988);
      mask[j + 1] = select_bytes(dead, 0, 0xBBAA);
    }
  } else {
    uint32_t own[2];
    own_fields<kBits>(words, q, own);
    PARTKERNELS_UNROLL
    for (int j = 0; j < kPairs; ++j) {
      // The second field of a pair is at the top of the byte; a shift moves the first one there.
      const uint32_t dead = dead_bits(own[j / 4], t);
      mask[j] = select_bytes(dead << kBits, dead, 0xCC88 + 0x1111 * (j % 4));
    }
  }
}

PARTKERNELS_DEVICE void dead_pairs(const uint8_t* group, int bits, int q, const Threshold& t,
                                   uint32_t (&mask)[kPairs]) {
  switch (bits) {
    case 1:
      return dead_pairs<1>(group, q, t, mask);
    case 2:
      return dead_pairs<2>(group, q, t, mask);
    case 4:
      return dead_pairs<4>(group, q, t, mask);
    default:
      return dead_pairs<8>(group, q, t, mask);
  }
}

// A thread's uniform defaults: one Philox call, one byte per entry. Each 16-bit half of a word contains the byte twice:
// the lower copy for the magnitude m, the upper copy for the sign. (m | 0x4300) is the bfloat16 number 128 + m.
PARTKERNELS_DEVICE void uniform_pairs(const Defaults& d, int64_t row, int64_t group, int q, uint32_t (&pair)[kPairs]) {
  const Philox drawn = default_words(d, row, group * kUniformGroups + q);
  const uint32_t step = float_bits(d.step) | float_bits(d.step) >> 16;
  PARTKERNELS_UNROLL
  for (int j = 0; j < kPairs; ++j) {
    const uint32_t bytes = select_bytes(drawn.word[j / 2], 0, j % 2 == 0 ? 0x1100 : 0x3322);
    const uint32_t magnitude = multiply_add_pairs(select_bits(0x007F007F, bytes, 0x43004300), 0x3F803F80, 0xC2FFC2FF);
    pair[j] = multiply_add_pairs(magnitude, step ^ (bytes & 0x80008000), 0x80008000);
  }
}

// A thread's normal defaults. A Philox call serves two neighbouring threads of a quad; each makes half of the calls.
PARTKERNELS_DEVICE void normal_pairs(const Defaults& d, int64_t row, int64_t group, int q, uint32_t (&pair)[kPairs]) {
  const bool is_odd = q % 2 != 0;
  const auto value = [&](uint32_t first, uint32_t second) {
    return pair_of_bfloat16(static_cast<float>(add_bytes(first, -510)) * d.step,
                            static_cast<float>(add_bytes(second, -510)) * d.step);
  };
  PARTKERNELS_UNROLL
  for (int t = 0; t < kPairs / 2; ++t) {
    const int mine = is_odd ? t + kPairs / 2 : t;
    const Philox drawn = default_words(d, row, group * (kGroup / kNormalColumns) + 2 * mine + q / 2);
    const uint32_t low = value(drawn.word[0], drawn.word[1]), high = value(drawn.word[2], drawn.word[3]);
    const uint32_t own = is_odd ? high : low, received = from_neighbour_lane(is_odd ? low : high);
    pair[t] = is_odd ? received : own;
    pair[t + kPairs / 2] = is_odd ? own : received;
  }
}

// A pair of bfloat16 numbers as a pair of T.
template <class T>
PARTKERNELS_DEVICE uint32_t as_pair_of(uint32_t pair) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    return pair;
  } else {
    return pair_of_float16(float_from_bits(pair << 16), float_from_bits(pair & 0xFFFF0000));
  }
}

// A thread's drawn defaults, or zeros, of the 64 columns of group `group`. All threads of a warp must call it.
template <class T, DefaultKind kKind>
PARTKERNELS_DEVICE void default_pairs(const Defaults& d, int64_t row, int64_t group, int q, uint32_t (&pair)[kPairs]) {
  row += d.row;
  group += d.col / kGroup;
  if constexpr (kKind == DefaultKind::uniform) {
    uniform_pairs(d, row, group, q, pair);
  } else if constexpr (kKind == DefaultKind::normal) {
    normal_pairs(d, row, group, q, pair);
  } else {
    PARTKERNELS_UNROLL
    for (int j = 0; j < kPairs; ++j) pair[j] = 0;
  }
  PARTKERNELS_UNROLL
  for (int j = 0; j < kPairs; ++j) pair[j] = as_pair_of<T>(pair[j]);
}

// A group of 16 rows as the four operands [16, 16] of tensor cores: a thread has the rows `row` and `row` + 8. `map`
// points to the group of the first row in the map; the group of the second row is `pitch` bytes further on.
template <class T, DefaultKind kKind>
PARTKERNELS_DEVICE void rebuild_fragments(const uint8_t* map, int pitch, int bits, const Threshold& t,
                                          const Defaults& d, int64_t row, int64_t group, int q,
                                          const uint32_t (&stored)[kGroup / 16][4], uint32_t (&a)[kGroup / 16][4]) {
  PARTKERNELS_UNROLL
  for (int half = 0; half < 2; ++half) {
    uint32_t mask[kPairs], dead[kPairs];
    dead_pairs(map + half * pitch, bits, q, t, mask);
    if constexpr (kKind != DefaultKind::stored) default_pairs<T, kKind>(d, row + 8 * half, group, q, dead);
    PARTKERNELS_UNROLL
    for (int j = 0; j < kPairs; ++j) {
      const int word = half + 2 * (j % 2);
      a[j / 2][word] =
          select_bits(mask[j], kKind == DefaultKind::stored ? stored[j / 2][word] : dead[j], a[j / 2][word]);
    }
  }
}

}  // namespace partkernels::cuda
