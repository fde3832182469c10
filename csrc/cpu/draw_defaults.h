// Draws the defaults of a tile, 16 Philox calls at a time, with the same bits as partkernels/defaults.h.
#pragma once

#include "isa.h"
#include "partkernels/defaults.h"
#include "philox_lanes.h"
#include "weight_tile.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

// The drawn defaults of a tile; each is exact in bfloat16.
struct alignas(64) Drawn {
  bfloat16 row[kTileRows][kTileCols];
};

// The number of each lane; and, if each row of a tile takes kUniformGroups lanes, the lane's row and its number within
// the row.
struct LaneNumbers {
  uint32_t lane[kLanes], row[kLanes], in_row[kLanes];
  constexpr LaneNumbers() : lane(), row(), in_row() {
    static_assert(kLanes == kTileRows * kUniformGroups);
    for (uint32_t i = 0; i < kLanes; ++i) {
      lane[i] = i;
      row[i] = i / kUniformGroups;
      in_row[i] = i % kUniformGroups;
    }
  }
};
constexpr LaneNumbers kNumbers;

#if defined(PARTKERNELS_AVX512_BF16)
// The order in which Drawer::uniform_values picks its bytes from 8 lanes of two words; lane 4 s + q has call q of row s
// of a pair.
struct PairOrder {
  alignas(64) uint8_t byte[64];
  constexpr PairOrder() : byte() {
    for (int to = 0; to < 64; ++to) {
      const int row = to / 8 % 2, col = to / 16 * 8 + to % 8;  // col in 0 .. 31
      const int in_word = 2 * (col / 8 % 2) + col % 2;
      byte[to] = static_cast<uint8_t>(8 * (4 * row + col / 2 % 4) + (col < 16 ? 4 : 0) + in_word);
    }
  }
};
constexpr PairOrder kPairOrder;
#endif

class Drawer {
 public:
  explicit Drawer(const Defaults& defaults) : defaults_(defaults) {
    if (defaults.kind != DefaultKind::uniform) return;
    for (uint32_t magnitude = 0; magnitude < 128; ++magnitude) {
      const uint16_t bits = to_bfloat16(uniform_value(magnitude, defaults.step)).bits;
      low_[magnitude] = static_cast<uint8_t>(bits);
      high_[magnitude] = static_cast<uint8_t>(bits >> 8);
    }
  }

  // For DefaultKind::uniform and normal: the part of the draws that is shared by the tiles of a strip of columns;
  // rows() computes the part that is shared by a tile's four rows.
  ColumnPart columns(int64_t col) const {
    static_assert(kTileCols == kUniformColumns && kTileCols == kLanes * kNormalColumns);
    col += defaults_.col;
    const bool is_uniform = defaults_.kind == DefaultKind::uniform;
    const Lanes groups = is_uniform
                             ? plus(same_lanes(static_cast<uint32_t>(col / kUniformColumns * kUniformGroups)),
                                    load_lanes(kNumbers.in_row))
                             : plus(same_lanes(static_cast<uint32_t>(col / kNormalColumns)), load_lanes(kNumbers.lane));
    return column_part(groups, low_word(defaults_.stream), high_word(defaults_.stream), defaults_.seed);
  }

  struct Rows {
    RowPart part[kTileRows];  // uniform defaults use only the first
  };

  Rows rows(const Tile& tile) const {
    const auto row_at = [&](int64_t r) { return static_cast<uint32_t>(defaults_.row + tile.row_at(r)); };
    Rows result;
    if (defaults_.kind == DefaultKind::uniform) {
      // Four calls give a tile's row, so a vector gives all four rows.
      Lanes lanes;
      if (tile.ids == nullptr && tile.rows == kTileRows) {
        lanes = plus(same_lanes(row_at(0)), load_lanes(kNumbers.row));
      } else {
        uint32_t each[kLanes];
        for (uint32_t lane = 0; lane < kLanes; ++lane) each[lane] = row_at(kNumbers.row[lane]);
        lanes = load_lanes(each);
      }
      result.part[0] = row_part(lanes, low_word(defaults_.stream), defaults_.seed);
      return result;
    }
    for (int64_t r = 0; r < kTileRows; ++r) {
      result.part[r] = row_part(same_lanes(row_at(r)), low_word(defaults_.stream), defaults_.seed);
    }
    return result;
  }

  void operator()(const ColumnPart& columns, const Rows& rows, Drawn* drawn) const {
    if (defaults_.kind == DefaultKind::uniform) {
      uniform_values(columns, rows.part[0], drawn);
      return;
    }
    Lanes words[4];
    for (int64_t r = 0; r < kTileRows; ++r) {
      philox_lanes(columns, rows.part[r], defaults_.seed, words);
      normal_values(words, drawn->row[r]);
    }
  }

 private:
  // Lane i holds the draws of columns 4 i .. 4 i + 3, one word each.
#if defined(PARTKERNELS_AVX512)
  void normal_values(const Lanes words[4], bfloat16 row[kTileCols]) const {
    for (int half = 0; half < 2; ++half) {
      const __m512i front = two_normal_values(joined(words[0].half[half], words[1].half[half]));
      const __m512i back = two_normal_values(joined(words[2].half[half], words[3].half[half]));
      _mm512_storeu_si512(row + 32 * half, joined(front, back));
    }
  }

  // The lower 32-bit words of `low`, and the lower words of `high` as upper words.
  static __m512i joined(__m512i low, __m512i high) {
    return _mm512_mask_mov_epi32(low, 0xAAAA, _mm512_slli_epi64(high, 32));
  }

  // The values of two words in 64 bits, in the lower half. Sums are finite, so rounding needs no case for NaN.
  __m512i two_normal_values(__m512i words) const {
    const __m512i bytes = _mm512_set1_epi16(0xFF);
    const __m512i pairs =
        _mm512_add_epi16(_mm512_and_si512(words, bytes), _mm512_and_si512(_mm512_srli_epi32(words, 8), bytes));
    const __m512i total = _mm512_sub_epi32(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)), _mm512_set1_epi32(510));
    const __m512i bits = _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(total), _mm512_set1_ps(defaults_.step)));
    const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), even), 16);
    return _mm512_or_si512(rounded, _mm512_srli_epi64(rounded, 16));
  }
#else
  void normal_values(const Lanes words[4], bfloat16 row[kTileCols]) const {
    uint32_t word[4][kLanes];
    for (int w = 0; w < 4; ++w) store_lanes(words[w], word[w]);
    uint16_t values[4][kLanes];
    for (int w = 0; w < 4; ++w) {
      for (int lane = 0; lane < kLanes; ++lane) {
        values[w][lane] = to_bfloat16(normal_value(word[w][lane], defaults_.step)).bits;
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int w = 0; w < 4; ++w) row[4 * lane + w].bits = values[w][lane];
    }
  }
#endif

#if defined(PARTKERNELS_AVX512_BF16)
  // Half p of the lanes of word a holds the bytes of columns 16 a .. 16 a + 15 of rows 2 p and 2 p + 1.
  void uniform_values(const ColumnPart& columns, const RowPart& rows, Drawn* drawn) const {
    Lanes pairs[2];
    philox_pairs(columns, rows, defaults_.seed, pairs);
    const __m512i order = _mm512_load_si512(kPairOrder.byte);
    const __m512i low0 = _mm512_load_si512(low_), low1 = _mm512_load_si512(low_ + 64);
    const __m512i high0 = _mm512_load_si512(high_), high1 = _mm512_load_si512(high_ + 64);
    const __m512i sign = _mm512_set1_epi8(-128);
    for (int p = 0; p < 2; ++p) {
      for (int part = 0; part < 2; ++part) {  // columns 32 part .. 32 part + 31
        // In each 128 bits, 8 columns of the first row, then of the second.
        const __m512i bytes = _mm512_permutexvar_epi8(order, pairs[part].half[p]);
        // The index uses the lower 7 bits, the magnitude.
        const __m512i low = _mm512_permutex2var_epi8(low0, bytes, low1);
        const __m512i high = _mm512_permutex2var_epi8(high0, bytes, high1);
        const __m512i with_sign = _mm512_ternarylogic_epi32(high, bytes, sign, 0xF8);
        _mm512_store_si512(drawn->row[2 * p] + 32 * part, _mm512_unpacklo_epi8(low, with_sign));
        _mm512_store_si512(drawn->row[2 * p + 1] + 32 * part, _mm512_unpackhi_epi8(low, with_sign));
      }
    }
  }

#else
  void uniform_values(const ColumnPart& columns, const RowPart& rows, Drawn* drawn) const {
    Lanes words[4];
    philox_lanes(columns, rows, defaults_.seed, words);
    uint32_t word[4][kLanes];
    for (int w = 0; w < 4; ++w) store_lanes(words[w], word[w]);
    uint8_t bytes[kTileRows][kTileCols];
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int half = 0; half < 8; ++half) {
        // Columns 16 a + 8 b + 2 q + {0, 1} take the half-word b of word a of call q: two bytes, low one first.
        const uint32_t pair = word[half / 2][lane] >> (16 * (half % 2));
        uint8_t* const to = bytes[lane / kUniformGroups] + 8 * half + 2 * (lane % kUniformGroups);
        to[0] = static_cast<uint8_t>(pair);
        to[1] = static_cast<uint8_t>(pair >> 8);
      }
    }
    for (int64_t i = 0; i < kTileRows * kTileCols; ++i) {
      (&drawn->row[0][0])[i] = to_bfloat16(uniform_value((&bytes[0][0])[i], defaults_.step));
    }
  }
#endif

  Defaults defaults_;
  alignas(64) uint8_t low_[128];  // low byte of the bfloat16 number of each magnitude
  alignas(64) uint8_t high_[128];
};

}  // namespace partkernels::cpu::PARTKERNELS_ISA
