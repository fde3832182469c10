// The entries of one partition as a vector, and back: in the order of a contiguous weight, row by row and the taps of a
// channel together, whatever the weight's strides.
#pragma once

#include "mask.h"
#include "subnetwork_weight.h"
#include "taps_together.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

// Which entries of a row one partition owns, as bits: j % 64 of word j / 64, none beyond the last entry.
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

inline void count_entries(int64_t rows, int64_t cols, const Owners& owners, int partition, int64_t* starts,
                          const ParallelFor& parallel_for) {
  starts[0] = 0;
  for_strips(rows, cols, parallel_for, [&](int64_t begin, int64_t end) {
    OwnedOfRow owned(owners, cols, 1, partition);  // whose order makes no difference
    for (int64_t row = begin * kTileRows; row < std::min(rows, end * kTileRows); ++row) {
      const uint64_t* const bits = owned(row);
      int64_t count = 0;
      for (int64_t k = 0; k < owned.words(); ++k) count += std::popcount(bits[k]);
      starts[row + 1] = count;
    }
  });
  std::partial_sum(starts, starts + rows + 1, starts);
}

// Calls use(k, j) for the k-th bit that is set, the j-th of all.
template <class Use>
void for_each_bit(const uint64_t* bits, int64_t words, const Use& use) {
  int64_t k = 0;
  for (int64_t word = 0; word < words; ++word) {
    for (uint64_t left = bits[word]; left != 0; left &= left - 1) use(k++, 64 * word + std::countr_zero(left));
  }
}

#if defined(PARTKERNELS_AVX512)
// Calls use(k, j, mask) for the groups of 16 bits from j on of which k are set before.
template <class Use>
void for_each_16_bits(const uint64_t* bits, int64_t words, const Use& use) {
  int64_t k = 0;
  for (int64_t j = 0; j < 64 * words; j += 16) {
    const auto mask = static_cast<__mmask16>(bits[j / 64] >> j % 64);
    if (mask == 0) continue;
    use(k, j, mask);
    k += std::popcount(mask);
  }
}

// As many ones as a mask has.
inline __mmask16 first_of(__mmask16 mask) { return static_cast<__mmask16>((1u << std::popcount(mask)) - 1); }
#endif

// The owned ones of entries that lie one after another. A compressing store is slow (Zen 4); a masked one is not.
template <class T>
void gather_row(const T* entries, const uint64_t* bits, int64_t words, T* out) {
#if defined(PARTKERNELS_AVX512)
  if constexpr (std::is_same_v<T, float>) {
    for_each_16_bits(bits, words, [&](int64_t k, int64_t j, __mmask16 mask) {
      const __m512 packed = _mm512_maskz_compress_ps(mask, _mm512_maskz_loadu_ps(mask, entries + j));
      _mm512_mask_storeu_ps(out + k, first_of(mask), packed);
    });
    return;
  }
#endif
  for_each_bit(bits, words, [&](int64_t k, int64_t j) { out[k] = entries[j]; });
}

template <class T>
void scatter_row(const T* values, const uint64_t* bits, int64_t words, T* entries) {
#if defined(PARTKERNELS_AVX512)
  if constexpr (std::is_same_v<T, float>) {
    for_each_16_bits(bits, words, [&](int64_t k, int64_t j, __mmask16 mask) {
      const __m512 packed = _mm512_maskz_loadu_ps(first_of(mask), values + k);
      _mm512_mask_storeu_ps(entries + j, mask, _mm512_maskz_expand_ps(mask, packed));
    });
    return;
  }
#endif
  for_each_bit(bits, words, [&](int64_t k, int64_t j) { entries[j] = values[k]; });
}

// Calls use(row, bits, words, offsets) for each row; offsets of its entries in memory, null if one lies after another.
template <class T, class Use>
void for_each_owned_row(const Weight<T>& w, const Owners& owners, int partition, const ParallelFor& parallel_for,
                        const Use& use) {
  const int64_t taps = w.height * w.width;
  std::vector<int64_t> offsets;
  if (!taps_are_contiguous(w)) {
    for (int64_t j = 0; j < w.cols(); ++j) {
      const int64_t tap = j % taps;
      offsets.push_back(j / taps * w.in_stride + tap / w.width * w.y_stride + tap % w.width * w.x_stride);
    }
  }
  for_strips(w.rows, w.cols(), parallel_for, [&](int64_t begin, int64_t end) {
    OwnedOfRow owned(owners, w.in, taps, partition);
    for (int64_t row = begin * kTileRows; row < std::min(w.rows, end * kTileRows); ++row) {
      use(row, owned(row), owned.words(), offsets.empty() ? nullptr : offsets.data());
    }
  });
}

template <class T>
void gather_entries(Weight<const T> w, const Owners& owners, int partition, const int64_t* starts, T* out,
                    const ParallelFor& parallel_for) {
  for_each_owned_row(w, owners, partition, parallel_for,
                     [&](int64_t row, const uint64_t* bits, int64_t words, const int64_t* offsets) {
                       const T* const entries = w.data + row * w.row_stride;
                       T* const to = out + starts[row];
                       if (offsets == nullptr) {
                         gather_row(entries, bits, words, to);
                       } else {
                         for_each_bit(bits, words, [&](int64_t k, int64_t j) { to[k] = entries[offsets[j]]; });
                       }
                     });
}

template <class T>
void scatter_entries(const T* values, const int64_t* starts, const Owners& owners, int partition, Weight<T> w,
                     const ParallelFor& parallel_for) {
  for_each_owned_row(w, owners, partition, parallel_for,
                     [&](int64_t row, const uint64_t* bits, int64_t words, const int64_t* offsets) {
                       T* const entries = w.data + row * w.row_stride;
                       const T* const from = values + starts[row];
                       if (offsets == nullptr) {
                         scatter_row(from, bits, words, entries);
                       } else {
                         for_each_bit(bits, words, [&](int64_t k, int64_t j) { entries[offsets[j]] = from[k]; });
                       }
                     });
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
