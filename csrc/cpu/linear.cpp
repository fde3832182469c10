#include "gemm.h"
#include "partkernels/cpu.h"
#include "rebuild.h"

namespace partkernels::cpu {
namespace {

// block[r * stride + c] = x[row + r][col + c].
template <class T>
void pack(const Matrix<const T>& x, int64_t row, int64_t rows, int64_t col, int64_t cols, int64_t stride,
          Accumulator<T>* block) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = x.data + (row + r) * x.row_stride + col * x.col_stride;
    Accumulator<T>* to = block + r * stride;
    if (x.col_stride == 1) {
      for (int64_t c = 0; c < cols; ++c) to[c] = widen(from[c]);
    } else {
      for (int64_t c = 0; c < cols; ++c) to[c] = widen(from[c * x.col_stride]);
    }
  }
}

// block[c * stride + r] = x[row + r][col + c]. Four rows at a time: each is read in order, and a store fills more of a
// cache line. Squares of 16 took 2.4 times as long where rows lie a power of two apart.
template <class T>
void pack_transposed(const Matrix<const T>& x, int64_t row, int64_t rows, int64_t col, int64_t cols, int64_t stride,
                     Accumulator<T>* block) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    const T* from = x.data + (row + r) * x.row_stride + col * x.col_stride;
    for (int64_t c = 0; c < cols; ++c, from += x.col_stride) {
      Accumulator<T>* to = block + c * stride + r;
      for (int64_t q = 0; q < 4; ++q) to[q] = widen(from[q * x.row_stride]);
    }
  }
  for (; r < rows; ++r) {
    const T* from = x.data + (row + r) * x.row_stride + col * x.col_stride;
    for (int64_t c = 0; c < cols; ++c) block[c * stride + r] = widen(from[c * x.col_stride]);
  }
}

// y[col + c][row + r] = product[r * kCols + c] + bias[row + r].
template <class T>
void store_transposed(const Matrix<T>& y, int64_t row, int64_t rows, int64_t col, int64_t cols,
                      const Accumulator<T>* product, const T* bias) {
  for (int64_t c = 0; c < cols; ++c) {
    T* to = y.data + (col + c) * y.row_stride + row * y.col_stride;
    for (int64_t r = 0; r < rows; ++r) {
      const Accumulator<T> shift = bias ? widen(bias[row + r]) : Accumulator<T>{0};
      to[r * y.col_stride] = narrow<T>(product[r * kCols + c] + shift);
    }
  }
}

}  // namespace

// In both products the weight is the left operand: it is rebuilt as it is needed, without a transpose, and if its depth
// fits the workspace, once for the whole batch.

// y^T = w x^T.
template <class T>
void linear(Matrix<const T> x, const Subnetwork<T>& w, const T* bias, Matrix<T> y, const ParallelFor& parallel_for) {
  using Acc = Accumulator<T>;
  gemm<Acc, Layout::row_major>(
      w.weight.rows, x.rows, x.cols,
      [&](int64_t i, int64_t m, int64_t k, int64_t d, Acc* block) {
        for (int64_t r = 0; r < m; ++r) rebuild(w, i + r, k, d, block + r * kDepth);
      },
      [&](int64_t k, int64_t d, int64_t j, int64_t n, Acc* block) {
        pack_transposed(x, j, n, k, d, kRightStride, block);
      },
      [&](int64_t i, int64_t m, int64_t j, int64_t n, const Acc* product) {
        store_transposed(y, i, m, j, n, product, bias);
      },
      parallel_for);
}

// grad_x^T = w^T grad_y^T.
template <class T>
void linear_grad_input(Matrix<const T> grad_y, const Subnetwork<T>& w, Matrix<T> grad_x,
                       const ParallelFor& parallel_for) {
  using Acc = Accumulator<T>;
  gemm<Acc, Layout::depth_major>(
      grad_x.cols, grad_y.rows, grad_y.cols,
      [&](int64_t i, int64_t m, int64_t k, int64_t d, Acc* block) {
        for (int64_t r = 0; r < d; ++r) rebuild(w, k + r, i, m, block + r * kRows);
      },
      [&](int64_t k, int64_t d, int64_t j, int64_t n, Acc* block) {
        pack_transposed(grad_y, j, n, k, d, kRightStride, block);
      },
      [&](int64_t i, int64_t m, int64_t j, int64_t n, const Acc* product) {
        store_transposed<T>(grad_x, i, m, j, n, product, nullptr);
      },
      parallel_for);
}

template <class T>
void linear_grad_weight(Matrix<const T> grad_y, Matrix<const T> x, Owners owners, int update, Weight<T> grad_w,
                        const ParallelFor& parallel_for) {
  using Acc = Accumulator<T>;
  gemm<Acc, Layout::depth_major>(
      grad_y.cols, x.cols, x.rows,
      [&](int64_t i, int64_t m, int64_t k, int64_t d, Acc* block) { pack(grad_y, k, d, i, m, kRows, block); },
      [&](int64_t k, int64_t d, int64_t j, int64_t n, Acc* block) { pack(x, k, d, j, n, kRightStride, block); },
      [&](int64_t i, int64_t m, int64_t j, int64_t n, const Acc* product) {
        for (int64_t r = 0; r < m; ++r) {
          uint8_t keep[kCols];
          select_owners(owners, i + r, j, n, update, update, keep);
          for_each_entry(grad_w, i + r, j, n,
                         [&](int64_t c, T* entry) { *entry = narrow<T>(keep[c] ? product[r * kCols + c] : Acc{0}); });
        }
      },
      parallel_for);
}

#define PARTKERNELS_INSTANTIATE(T)                                                                       \
  template void linear(Matrix<const T>, const Subnetwork<T>&, const T*, Matrix<T>, const ParallelFor&);  \
  template void linear_grad_input(Matrix<const T>, const Subnetwork<T>&, Matrix<T>, const ParallelFor&); \
  template void linear_grad_weight(Matrix<const T>, Matrix<const T>, Owners, int, Weight<T>, const ParallelFor&);

PARTKERNELS_INSTANTIATE(float)
PARTKERNELS_INSTANTIATE(double)
PARTKERNELS_INSTANTIATE(bfloat16)

}  // namespace partkernels::cpu
