// Gathers the entries of one partition into a vector, and scatters them back: in the order of a contiguous weight, row
// by row with the taps of a channel together, whatever the weight's strides.
#pragma once

#include "mask.h"
#include "subnetwork_weight.h"
#include "taps_together.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

// The entries of a row that one partition owns, as bits: j % 64 of word j / 64, zeros beyond the last entry.
class OwnedOfRow {
 public:
  OwnedOfRow(const Owners& owners, int64_t in, int64_t taps, int partition)
      : in_(in),
        taps_(taps),
        words_(blocks_of(in * taps, 64)),
        decode_(owners, in * taps, partition, partition),
        put_taps_together_(in, taps <= kMaxTaps ? taps : 0),
        columns_(words_ + kStretch / 64 + 1),
        bits_(columns_.size()) {}

  int64_t words() const { return words_; }

  const uint64_t* operator()(int64_t row) {
    const int64_t cols = in_ * taps_;
    decode_(row, 0, cols, columns_.data());
    columns_[words_ - 1] &= ~uint64_t{0} >> (words_ * 64 - cols);
    if (taps_ == 1) return columns_.data();
    if (taps_ <= kMaxTaps) {
      put_taps_together_(columns_.data(), bits_.data());
      return bits_.data();
    }
    std::fill(bits_.begin(), bits_.end(), 0);
    for (int64_t j = 0; j < cols; ++j) {
      const int64_t col = j % taps_ * in_ + j / taps_;
      bits_[j / 64] |= (columns_[col / 64] >> col % 64 & 1) << j % 64;
    }
    return bits_.data();
  }

 private:
  int64_t in_, taps_, words_;
  MaskDecoder decode_;
  TapsTogether put_taps_together_;
  std::vector<uint64_t> columns_, bits_;
};

// The number of entries of a row that one partition owns. Rows are padded to whole words.
template <int bits>
int64_t count_of_row(const uint8_t* ids, int64_t cols, int partition) {
  constexpr uint64_t kLowest = ~uint64_t{0} / ((uint64_t{1} << bits) - 1);  // bit of each id
  constexpr int64_t kEach = 64 / bits;
  const uint64_t own = kLowest * static_cast<uint64_t>(partition - 1);
  const auto owned = [&](int64_t col) {  // as the lowest bit of each id
    uint64_t other;
    std::memcpy(&other, ids + col * bits / 8, sizeof(other));
    other ^= own;
    for (int step = 1; step < bits; step *= 2) other |= other >> step;
    return ~other & kLowest;
  };
  int64_t count = 0, col = 0;
  for (; col + 64 <= cols; col += 64) {
    uint64_t all = 0;
    for (int i = 0; i < bits; ++i) all |= owned(col + i * kEach) << i;
    count += std::popcount(all);
  }
  for (; col < cols; col += kEach) {
    const int64_t left = std::min(cols - col, kEach);
    count += std::popcount(owned(col) & ~uint64_t{0} >> (kEach - left) * bits);
  }
  return count;
}

inline void count_entries(int64_t rows, int64_t cols, const Owners& owners, int partition, int64_t* starts,
                          const ParallelFor& parallel_for) {
  const auto count = owners.bits == 1   ? count_of_row<1>
                     : owners.bits == 2 ? count_of_row<2>
                     : owners.bits == 4 ? count_of_row<4>
                                        : count_of_row<8>;
  starts[0] = 0;
  for_strips(rows, cols, parallel_for, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * kTileRows; row < std::min(rows, end * kTileRows); ++row) {
      starts[row + 1] = count(owners.row(row), cols, partition);
    }
  });
  std::partial_sum(starts, starts + rows + 1, starts);
}

// Calls use(k, j) for each set bit j of a word, the k-th set bit.
template <class Use>
void for_each_bit(uint64_t word, const Use& use) {
  for (int64_t k = 0; word != 0; word &= word - 1) use(k++, std::countr_zero(word));
}

#if defined(PARTKERNELS_AVX512)
// Up to this many of 64 entries are faster moved one by one than 16 at a time.
constexpr int kFew = 12;

// Calls use(k, j, mask) for each 16 bits of a word; j is the first of them, and k counts the set bits before.
template <class Use>
void for_each_16_bits(uint64_t word, const Use& use) {
  int64_t k = 0;
  for (int64_t j = 0; j < 64; j += 16) {
    const auto mask = static_cast<__mmask16>(word >> j);
    use(k, j, mask);
    k += std::popcount(mask);
  }
}

// A mask with its ones moved to the lowest bits.
inline __mmask16 first_of(__mmask16 mask) { return static_cast<__mmask16>((1u << std::popcount(mask)) - 1); }
#endif

// Gathers the owned entries among 64 contiguous ones. A compressing store is slow (Zen 4); a masked one is not.
template <class T>
void gather_word(const T* entries, uint64_t bits, T* out) {
#if defined(PARTKERNELS_AVX512)
  if constexpr (std::is_same_v<T, float>) {
    if (std::popcount(bits) > kFew) {
      for_each_16_bits(bits, [&](int64_t k, int64_t j, __mmask16 mask) {
        const __m512 packed = _mm512_maskz_compress_ps(mask, _mm512_maskz_loadu_ps(mask, entries + j));
        _mm512_mask_storeu_ps(out + k, first_of(mask), packed);
      });
      return;
    }
  }
#endif
  for_each_bit(bits, [&](int64_t k, int64_t j) { out[k] = entries[j]; });
}

template <class T>
void scatter_word(const T* values, uint64_t bits, T* entries) {
#if defined(PARTKERNELS_AVX512)
  if constexpr (std::is_same_v<T, float>) {
    if (std::popcount(bits) > kFew) {
      for_each_16_bits(bits, [&](int64_t k, int64_t j, __mmask16 mask) {
        const __m512 packed = _mm512_maskz_loadu_ps(first_of(mask), values + k);
        _mm512_mask_storeu_ps(entries + j, mask, _mm512_maskz_expand_ps(mask, packed));
      });
      return;
    }
  }
#endif
  for_each_bit(bits, [&](int64_t k, int64_t j) { entries[j] = values[k]; });
}

// Calls use(k, bits, entries, offsets) for each 64 entries of a row. The owned ones among them begin at index k of the
// vector. `offsets` are relative to `entries` in memory, or null if the entries are contiguous.
template <class T, class Use>
void for_each_owned_word(const Weight<T>& w, const Owners& owners, int partition, const int64_t* starts,
                         const ParallelFor& parallel_for, const Use& use) {
  const int64_t taps = w.height * w.width;
  const bool is_dense = taps_are_contiguous(w);
  std::vector<int64_t> offsets;
  if (!is_dense) {
    for (int64_t j = 0; j < w.cols(); ++j) {
      const int64_t tap = j % taps;
      offsets.push_back(j / taps * w.in_stride + tap / w.width * w.y_stride + tap % w.width * w.x_stride);
    }
  }
  for_strips(w.rows, w.cols(), parallel_for, [&](int64_t begin, int64_t end) {
    OwnedOfRow owned(owners, w.in, taps, partition);
    for (int64_t row = begin * kTileRows; row < std::min(w.rows, end * kTileRows); ++row) {
      const uint64_t* const bits = owned(row);
      T* const entries = w.data + row * w.row_stride;
      int64_t k = starts[row];
      for (int64_t word = 0; word < owned.words(); ++word) {
        if (is_dense) {
          use(k, bits[word], entries + 64 * word, nullptr);
        } else {
          use(k, bits[word], entries, offsets.data() + 64 * word);
        }
        k += std::popcount(bits[word]);
      }
    }
  });
}

template <class T>
void gather_entries(Weight<const T> w, const Owners& owners, int partition, const int64_t* starts, T* out,
                    const ParallelFor& parallel_for) {
  for_each_owned_word(w, owners, partition, starts, parallel_for,
                      [&](int64_t start, uint64_t bits, const T* entries, const int64_t* offsets) {
                        T* const to = out + start;
                        if (offsets == nullptr) {
                          gather_word(entries, bits, to);
                        } else {
                          for_each_bit(bits, [&](int64_t k, int64_t j) { to[k] = entries[offsets[j]]; });
                        }
                      });
}

template <class T>
void scatter_entries(const T* values, const int64_t* starts, const Owners& owners, int partition, Weight<T> w,
                     const ParallelFor& parallel_for) {
  for_each_owned_word(w, owners, partition, starts, parallel_for,
                      [&](int64_t start, uint64_t bits, T* entries, const int64_t* offsets) {
                        const T* const from = values + start;
                        if (offsets == nullptr) {
                          scatter_word(from, bits, entries);
                        } else {
                          for_each_bit(bits, [&](int64_t k, int64_t j) { entries[offsets[j]] = from[k]; });
                        }
                      });
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
