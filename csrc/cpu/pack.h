// Packs blocks of matrices into units: unchanged, transposed, or with two rows of bfloat16 interleaved into pairs.
#pragma once

#include "gemm.h"
#include "transpose.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

// to[i] = from[i * stride] in T or its accumulator, for i in [0, n).
template <class To, class T>
void copy(const T* from, int64_t stride, int64_t n, To* to) {
  const auto value = [](T entry) -> To {
    if constexpr (std::is_same_v<To, T>) {
      return entry;
    } else {
      return widen(entry);
    }
  };
  if (stride == 1) {
    for (int64_t i = 0; i < n; ++i) to[i] = value(from[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = value(from[i * stride]);
  }
}

// to[i] = (even[i * stride], odd[i * stride]); a null odd stands for zeros.
inline void interleave(const bfloat16* even, const bfloat16* odd, int64_t stride, int64_t n, Pair* to) {
  int64_t i = 0;
#if defined(PARTKERNELS_AVX512)
  if (stride == 1 && odd != nullptr) {
    for (; i + 16 <= n; i += 16) {
      const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + i));
      const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd + i));
      const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16);
      _mm512_storeu_si512(to + i, _mm512_or_si512(_mm512_cvtepu16_epi32(first), high));
    }
  }
#endif
  for (; i < n; ++i) to[i] = {{even[i * stride], odd == nullptr ? bfloat16{0} : odd[i * stride]}};
}

// Packs the units of depth [k, k + d) of x at columns [col, col + n), for x with rows along the depth; where(unit)
// returns the destination of a unit's n entries.
template <class Unit, class T, class Where>
void pack_depth_rows(const Matrix<const T>& x, int64_t k, int64_t d, int64_t col, int64_t n, const Where& where) {
  const T* from = x.data + k * x.row_stride + col * x.col_stride;
  for (int64_t r = 0; r < d; r += kUnitDepth<Unit>, from += kUnitDepth<Unit> * x.row_stride) {
    if constexpr (std::is_same_v<Unit, Pair>) {
      interleave(from, r + 1 < d ? from + x.row_stride : nullptr, x.col_stride, n, where(r / 2));
    } else {
      copy<Unit>(from, x.col_stride, n, where(r));
    }
  }
}

// A row-major left block: block[r][k] = x[row + r][col + k].
template <class Unit, class T>
void pack_rows(const Matrix<const T>& x, int64_t row, int64_t rows, int64_t col, int64_t cols, Unit* block) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = x.data + (row + r) * x.row_stride + col * x.col_stride;
    Unit* const to = block + r * kDepth<Unit>;
    if (x.col_stride == 1) {  // rows are too short for the processor to predict the next one
      for (int64_t c = 0; c < cols; c += 64 / sizeof(T)) __builtin_prefetch(from + 4 * x.row_stride + c);
    }
    if constexpr (std::is_same_v<Unit, Pair>) {
      bfloat16* const entries = to->entry;
      if (x.col_stride == 1) {
        std::memcpy(entries, from, cols * sizeof(T));
      } else {
        for (int64_t c = 0; c < cols; ++c) entries[c] = from[c * x.col_stride];
      }
      if (cols % 2 == 1) entries[cols] = bfloat16{0};
    } else {
      copy<Unit>(from, x.col_stride, cols, to);
    }
  }
}

// A depth-major left block of a matrix with rows along the depth.
template <class Unit, class T>
void pack_left_depth(const Matrix<const T>& x, int64_t k, int64_t d, int64_t col, int64_t cols, Unit* block) {
  pack_depth_rows<Unit>(x, k, d, col, cols, [&](int64_t unit) { return block + unit * kRows; });
}

// A right block of such a matrix. Its panels are panel_units apart.
template <class Unit, class T>
void pack_right_depth(const Matrix<const T>& x, int64_t k, int64_t d, int64_t col, int64_t cols, Unit* block,
                      int64_t panel_units = kPanel<Unit> * kDepth<Unit>) {
  for (int64_t c = 0; c < cols; c += kPanel<Unit>) {
    Unit* const panel = block + c / kPanel<Unit> * panel_units;
    pack_depth_rows<Unit>(x, k, d, col + c, std::min(kPanel<Unit>, cols - c),
                          [&](int64_t unit) { return panel + unit * kPanel<Unit>; });
  }
}

// The same for rows of bfloat16 that are made a few at a time: make(r, rows, out, stride) writes rows r .. r + rows.
template <class Unit, class Make>
void pack_right_of_rows(int64_t d, int64_t cols, const Make& make, Unit* block,
                        int64_t panel_units = kPanel<Unit> * kDepth<Unit>) {
  constexpr int64_t kSome = 16;
  for (int64_t r = 0; r < d; r += kSome) {
    const int64_t rows = std::min(kSome, d - r);
    alignas(64) bfloat16 out[kSome][kCols];
    make(r, rows, out[0], kCols);
    pack_right_depth(Matrix<const bfloat16>{out[0], rows, cols, kCols, 1}, 0, rows, 0, cols,
                     block + r / kUnitDepth<Unit> * kPanel<Unit>, panel_units);
  }
}

// A right block of entries as the destination of a rebuilt weight, with rows along the depth.
template <class T>
struct InPanels {
  static constexpr int64_t kPiece = kPanel<T>;
  static_assert(kTileCols % kPiece == 0);
  T* data;

  T* at(int64_t row, int64_t col) const { return data + col * kDepth<T> + row * kPiece; }
  InPanels from(int64_t row, int64_t col) const { return {at(row, col)}; }
};

// Columns first + c of a right block, for c in [0, cols): from[c * from_stride + k] for k in [0, units). first is a
// multiple of 16.
template <class Unit>
void transpose_into_panels(const Unit* from, int64_t from_stride, int64_t first, int64_t cols, int64_t units,
                           Unit* block) {
  const auto unit = [&](int64_t c) {
    return block + (first + c) / kPanel<Unit> * kPanel<Unit> * kDepth<Unit> + (first + c) % kPanel<Unit>;
  };
  int64_t c = 0;
  if constexpr (sizeof(Unit) == 4) {
    for (; kPanel<Unit> % 16 == 0 && c + 16 <= cols; c += 16) {
      for (int64_t k = 0; k < units; k += 16) {  // there is memory past the last unit, up to kDepth
        transpose16(reinterpret_cast<const uint32_t*>(from + c * from_stride + k), from_stride,
                    reinterpret_cast<uint32_t*>(unit(c) + k * kPanel<Unit>), kPanel<Unit>);
      }
    }
  }
  for (; c < cols; ++c) {
    for (int64_t k = 0; k < units; ++k) unit(c)[k * kPanel<Unit>] = from[c * from_stride + k];
  }
}

// A right block from the rows of its transpose, which are made a few at a time. make(c, rows, out, stride) returns the
// location of columns c .. c + rows of the block, d entries each. It writes them to `out`, in rows `stride` apart, or
// returns other memory if this is readable in words of 4 bytes, up to a multiple of 32 entries.
template <class T, class Make>
void pack_right_transposed(int64_t cols, int64_t d, const Make& make, typename UnitOf<T>::type* block) {
  using Unit = typename UnitOf<T>::type;
  constexpr int64_t kSome = 16;
  // 16 entries more than the depth: rows a power of two apart would share sets of the cache.
  constexpr int64_t kStride = kDepth<Unit> * kUnitDepth<Unit> + 16;
  for (int64_t c = 0; c < cols; c += kSome) {
    const int64_t rows = std::min(kSome, cols - c);
    alignas(64) T out[kSome][kStride];
    const Rows<T> made = make(c, rows, out[0], kStride);
    if constexpr (std::is_same_v<Unit, Pair>) {
      if (d % 2 == 1) {
        for (int64_t r = 0; r < rows; ++r) out[r][d] = bfloat16{0};
      }
      transpose_into_panels(reinterpret_cast<const Pair*>(made.data), made.stride / 2, c, rows, (d + 1) / 2, block);
    } else if constexpr (std::is_same_v<Unit, T>) {
      transpose_into_panels(made.data, made.stride, c, rows, d, block);
    } else {
      alignas(64) Unit widened[kSome][kStride];
      for (int64_t r = 0; r < rows; ++r) copy(made.data + r * made.stride, 1, d, widened[r]);
      transpose_into_panels(widened[0], kStride, c, rows, d, block);
    }
  }
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
