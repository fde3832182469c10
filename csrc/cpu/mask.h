// Decodes the packed map: the entries of a tile, or of a row, in a range of partitions, as bits.
#pragma once

#include "isa.h"
#include "partkernels/packed_map.h"
#include "simd.h"
#include "weight_tile.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

// Bit j of row[r]: whether entry (r, j) of a tile is selected.
struct TileMask {
  uint64_t row[kTileRows];
};

// Columns of a row that are decoded together, as many entries as a tile has.
constexpr int64_t kStretch = kTileRows * kTileCols;

class MaskDecoder {
 public:
  // Selects the entries of partitions first..last of a weight with `cols` columns.
  MaskDecoder(const Owners& owners, int64_t cols, int first, int last)
      : owners_(owners),
        row_bytes_(row_bytes(cols, owners.bits)),
        low_(static_cast<uint8_t>(first - 1)),
        span_(static_cast<uint8_t>(last - first)) {
    for (int id = 0; id < 4; ++id) selected_[id] = selects(static_cast<uint8_t>(id)) ? ~uint64_t{0} : 0;
  }

  TileMask operator()(const Tile& tile) const {
    const int64_t start = tile.col * owners_.bits / 8;
    Part parts[kTileRows];
    for (int64_t r = 0; r < kTileRows; ++r) {
      parts[r] = part(tile.row_at(r), start);
    }
    return decode(parts);
  }

  // Bit j % 64 of mask[j / 64]: whether entry (row, col + j) is selected, for j in [0, cols). col is a multiple of
  // kTileCols. Writes whole multiples of kStretch columns; bits beyond `cols` are undefined.
  void operator()(int64_t row, int64_t col, int64_t cols, uint64_t* mask) const {
    const int64_t part_bytes = kTileCols * owners_.bits / 8;
    const int64_t last = (row_bytes_ - 1) / part_bytes * part_bytes;
    for (int64_t done = 0; done < cols; done += kStretch) {
      const int64_t start = (col + done) * owners_.bits / 8;
      Part parts[kTileRows];
      for (int64_t i = 0; i < kTileRows; ++i) parts[i] = part(row, std::min(start + i * part_bytes, last));
      const TileMask decoded = decode(parts);
      std::memcpy(mask + done / kTileCols, decoded.row, sizeof(decoded.row));
    }
  }

 private:
  // The ids of kTileCols columns of a row; fewer at the end of a row.
  struct Part {
    const uint8_t* ids;
    int64_t bytes;
  };

  Part part(int64_t row, int64_t start) const {
    return {owners_.row(row) + start, std::min(kTileCols * owners_.bits / 8, row_bytes_ - start)};
  }

  bool selects(uint8_t id) const { return static_cast<uint8_t>(id - low_) <= span_; }

#if defined(PARTKERNELS_AVX512_BF16)
  TileMask decode(const Part parts[kTileRows]) const {
    const __m512i low = _mm512_set1_epi8(static_cast<char>(low_)), span = _mm512_set1_epi8(static_cast<char>(span_));
    TileMask mask;
    for (int r = 0; r < kTileRows; ++r) {
      mask.row[r] = _mm512_cmple_epu8_mask(_mm512_sub_epi8(ids(parts[r]), low), span);
    }
    return mask;
  }

  // One byte per id. The bits of eight ids are copied to a word, and each of its bytes is shifted into place. Rows are
  // padded to 16 bytes, so that only larger parts are cut off.
  __m512i ids(const Part& part) const {
    const auto exist = static_cast<__mmask64>(~uint64_t{0} >> (64 - part.bytes));
    switch (owners_.bits) {
      case 1:
        return apart(_mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(part.ids))),
                     0x0706050403020100, 1);
      case 2:
        return apart(_mm512_cvtepu16_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(part.ids))),
                     0x0E0C0A0806040200, 3);
      case 4:
        return apart(_mm512_cvtepu32_epi64(_mm256_maskz_loadu_epi8(static_cast<__mmask32>(exist), part.ids)),
                     0x1C1814100C080400, 15);
      default:
        return _mm512_maskz_loadu_epi8(exist, part.ids);
    }
  }

  static __m512i apart(__m512i words, int64_t shifts, char largest) {
    return _mm512_and_si512(_mm512_multishift_epi64_epi8(_mm512_set1_epi64(shifts), words), _mm512_set1_epi8(largest));
  }
#else
  TileMask decode(const Part parts[kTileRows]) const {
    TileMask mask;
    // Rows are padded to 16 bytes, so that only larger parts are cut off.
    if (owners_.bits == 2) {
      of_two_bits(parts, mask.row);
      return mask;
    }
    if (owners_.bits == 1) {
      for (int r = 0; r < kTileRows; ++r) mask.row[r] = choose(word(parts[r].ids), selected_[1], selected_[0]);
      return mask;
    }
    // A part has as many 64-bit words as an id has bits.
    uint64_t words[kTileRows * 8] = {};
    for (int64_t r = 0; r < kTileRows; ++r) std::memcpy(words + r * owners_.bits, parts[r].ids, parts[r].bytes);
    if (owners_.bits == 4) {
      of_four_bits(words, mask.row);
    } else {
      of_bytes(words, mask.row);
    }
    return mask;
  }

  static uint64_t word(const uint8_t* bytes) {
    uint64_t word;
    std::memcpy(&word, bytes, sizeof(word));
    return word;
  }

  // Bit by bit, which ? a : b.
  template <class Words>
  static Words choose(Words which, Words a, Words b) {
    return b ^ (which & (a ^ b));
  }

  // 32 ids at once, from their two bit planes; then the even bits are compacted. Words is a vector of words, or one
  // word.
  template <class Words>
  Words of_two_bits(Words ids) const {
    const Words high = ids >> 1;
    Words bits = choose(high, choose(ids, Words{} + selected_[3], Words{} + selected_[2]),
                        choose(ids, Words{} + selected_[1], Words{} + selected_[0])) &
                 0x5555555555555555;
    bits = (bits | bits >> 1) & 0x3333333333333333;
    bits = (bits | bits >> 2) & 0x0F0F0F0F0F0F0F0F;
    bits = (bits | bits >> 4) & 0x00FF00FF00FF00FF;
    bits = (bits | bits >> 8) & 0x0000FFFF0000FFFF;
    return (bits | bits >> 16) & 0x00000000FFFFFFFF;
  }

  void of_two_bits(const Part parts[kTileRows], uint64_t mask[kTileRows]) const {
#if defined(PARTKERNELS_AVX512)
    // Joined in registers: a wide load that spans four recent stores would stall.
    typedef uint64_t Words __attribute__((vector_size(64)));
    const auto load = [&](int r) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(parts[r].ids)); };
    __m512i ids = _mm512_castsi128_si512(load(0));
    ids = _mm512_inserti32x4(ids, load(1), 1);
    ids = _mm512_inserti32x4(ids, load(2), 2);
    ids = _mm512_inserti32x4(ids, load(3), 3);
    const __m256i halves = _mm512_cvtepi64_epi32((__m512i)of_two_bits((Words)ids));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(mask), halves);
#else
    for (int64_t r = 0; r < kTileRows; ++r) {
      mask[r] = of_two_bits(word(parts[r].ids)) | of_two_bits(word(parts[r].ids + 8)) << 32;
    }
#endif
  }

  // Sets the high bit of each byte that is at least `least`, for bytes below 128 and `least` at most 128.
  static uint64_t at_least(uint64_t bytes, uint64_t least) {
    return ((bytes | 0x8080808080808080) - least * 0x0101010101010101) & 0x8080808080808080;
  }

  void of_four_bits(const uint64_t words[4 * kTileRows], uint64_t mask[kTileRows]) const {
    const uint64_t first = low_, after = uint64_t{low_} + span_ + 1;
    uint16_t quarters[4 * kTileRows];
    for (int i = 0; i < 4 * kTileRows; ++i) {
      const uint64_t even = words[i] & 0x0F0F0F0F0F0F0F0F, odd = words[i] >> 4 & 0x0F0F0F0F0F0F0F0F;
      uint64_t bits = (at_least(even, first) & ~at_least(even, after)) >> 7;
      bits |= (at_least(odd, first) & ~at_least(odd, after)) >> 6;
      bits = (bits | bits >> 6) & 0x000F000F000F000F;
      bits = (bits | bits >> 12) & 0x000000FF000000FF;
      quarters[i] = static_cast<uint16_t>(bits | bits >> 24);
    }
    std::memcpy(mask, quarters, sizeof(quarters));
  }

  void of_bytes(const uint64_t words[8 * kTileRows], uint64_t mask[kTileRows]) const {
    uint8_t ids[kTileRows * kTileCols];
    uint8_t eighths[kTileRows * kTileCols / 8];
    std::memcpy(ids, words, sizeof(ids));
    for (uint8_t& id : ids) id = selects(id) ? 1 : 0;
    for (int64_t i = 0; i < kTileRows * kTileCols / 8; ++i) {
      eighths[i] = static_cast<uint8_t>(word(ids + 8 * i) * 0x0102040810204080 >> 56);
    }
    std::memcpy(mask, eighths, sizeof(eighths));
  }

#endif

  Owners owners_;
  int64_t row_bytes_;
  uint8_t low_, span_;
  uint64_t selected_[4];  // by id: all bits set or cleared
};

// to[j] = mask bit j ? from[j] : 0 for j in [0, n), n at most 64.
template <class T>
void copy_masked(uint64_t mask, const Accumulator<T>* from, int64_t n, T* to) {
#if defined(PARTKERNELS_AVX512)
  if constexpr (kStores16<T>) {
    for (int64_t j = 0; j < n; j += 16) {
      const auto exist = static_cast<__mmask16>(n - j < 16 ? (1u << (n - j)) - 1 : 0xFFFF);
      store16(_mm512_maskz_loadu_ps(exist & static_cast<__mmask16>(mask >> j), from + j), exist, to + j);
    }
    return;
  }
#endif
  for (int64_t j = 0; j < n; ++j) to[j] = mask >> j & 1 ? narrow<T>(from[j]) : T{};
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
