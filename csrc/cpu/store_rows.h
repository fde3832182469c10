// The epilogue of an output: adds the bias and rounds the sums.
#pragma once

#include "gemm.h"
#include "simd.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

// to[i] = from[i] + shift[i], for i in [0, n).
template <class T>
void add_and_narrow(const Accumulator<T>* from, const Accumulator<T>* shift, int64_t n, T* to) {
  int64_t i = 0;
#if defined(PARTKERNELS_AVX512)
  if constexpr (kStores16<T>) {
    for (; i + 16 <= n; i += 16) {
      store16(_mm512_add_ps(_mm512_loadu_ps(from + i), _mm512_loadu_ps(shift + i)), 0xFFFF, to + i);
    }
  }
#endif
  for (; i < n; ++i) to[i] = narrow<T>(from[i] + shift[i]);
}

// y[row + r][col + c] = product[r * stride + c] + bias[col + c].
template <class T>
void store_rows(const Matrix<T>& y, int64_t row, int64_t rows, int64_t col, int64_t cols, const Accumulator<T>* product,
                int64_t stride, const T* bias) {
  Accumulator<T> shift[kCols] = {};
  if (bias) {
    for (int64_t c = 0; c < cols; ++c) shift[c] = widen(bias[col + c]);
  }
  for (int64_t r = 0; r < rows; ++r, product += stride) {
    T* const to = y.data + (row + r) * y.row_stride + col * y.col_stride;
    if (y.col_stride == 1) {
      add_and_narrow(product, shift, cols, to);
    } else {
      for (int64_t c = 0; c < cols; ++c) to[c * y.col_stride] = narrow<T>(product[c] + shift[c]);
    }
  }
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
