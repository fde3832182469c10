// linear and its gradients. In linear and its input gradient, the weight is the right operand, which vectors run over,
// so that it is rebuilt and packed once for hundreds of rows of x.
#pragma once

#include "gemm_in_output.h"
#include "linear_few_rows.h"
#include "masked_store.h"
#include "pack.h"
#include "rebuild.h"
#include "store_rows.h"
#if defined(PARTKERNELS_AMX)
#include "linear_amx.h"
#include "linear_few_rows_amx.h"
#endif

namespace partkernels::cpu::PARTKERNELS_ISA {

// output = a product of packed operands.
//
// may_add_there: whether sums may be accumulated in the output, in an order that takes the depth of all columns
// together. store(i, m, j, n, sums, stride): stores output[i : i + m, j : j + n] from its sums, which have rows
// `stride` apart and may already be in place.
template <class T, class PackLeft, class PackRight, class Store>
void multiply_packed(int64_t depth, const Matrix<T>& output, bool may_add_there, const PackLeft& pack_left,
                     const PackRight& pack_right, const Store& store, const ParallelFor& parallel_for) {
  using Unit = typename UnitOf<T>::type;
  if constexpr (std::is_same_v<Unit, T>) {
    if (may_add_there && output.col_stride == 1 && depth > 0) {
      gemm_in_output<T, Layout::row_major>(
          depth, output, kDepth<T>, pack_left, pack_right, NoMarks{},
          [&](int64_t i, int64_t m, int64_t j, int64_t n) {
            store(i, m, j, n, output.data + i * output.row_stride + j, output.row_stride);
          },
          parallel_for);
      return;
    }
  }
  gemm<Unit, Layout::row_major>(
      output.rows, output.cols, depth, kBatch<Unit>, pack_left, pack_right,
      [&](int64_t i, int64_t m, int64_t j, int64_t n, const Sum<Unit>* sums) { store(i, m, j, n, sums, kCols); },
      parallel_for);
}

// The store function of multiply_packed for y with a bias.
template <class T>
auto add_bias(const Matrix<T>& y, const T* bias) {
  return [&y, bias](int64_t i, int64_t m, int64_t j, int64_t n, const auto* sums, int64_t stride) {
    const void* const there = y.data + i * y.row_stride + j * y.col_stride;
    if (bias || sums != there) store_rows(y, i, m, j, n, sums, stride, bias);
  };
}

// y = x w^T: rows of w are rebuilt a few at a time and transposed into panels.
template <class T>
void linear(Matrix<const T> x, const Subnetwork<T>& w, const T* bias, Matrix<T> y, const ParallelFor& parallel_for) {
  using Unit = typename UnitOf<T>::type;
#if defined(PARTKERNELS_AMX)
  // If all entries are active, the weight is read in place; for one or two rows of x, only reading it row by row
  // reaches the memory's speed.
  if (x.rows > (w.active == w.count ? 2 : 0) && x.cols > 0) {
    (x.rows <= kFewRowsOfTiles ? linear_of_few_rows_amx : linear_amx)(x, w, bias, y, parallel_for);
    return;
  }
#endif
  if constexpr (std::is_same_v<Unit, T> || std::is_same_v<Unit, Pair>) {
    if (0 < x.rows && x.rows <= kFewRows) {
      linear_of_few_rows(x, w, bias, y, parallel_for);
      return;
    }
  }
  const Rebuilder<T> rebuild(w);
  const auto pack_left = [&](int64_t i, int64_t m, int64_t k, int64_t d, Unit* block) {
    pack_rows(x, i, m, k, d, block);
  };
  const auto pack_right = [&](int64_t k, int64_t d, int64_t j, int64_t n, Unit* block) {
    pack_right_transposed<T>(
        n, d,
        [&](int64_t c, int64_t rows, T* out, int64_t stride) {
          return rebuild.rows_of(j + c, rows, k, d, out, stride, c + rows < n ? Offset{rows, 0} : Offset{-c, d});
        },
        block);
  };
  // For a small batch, the weight is best read row by row.
  const bool may_add_there = x.rows > kRows / 2;
  multiply_packed(x.cols, y, may_add_there, pack_left, pack_right, add_bias(y, bias), parallel_for);
}

// grad_x = grad_y w: w already has the layout of the panels.
template <class T>
void linear_grad_input(Matrix<const T> grad_y, const Subnetwork<T>& w, Matrix<T> grad_x,
                       const ParallelFor& parallel_for) {
  using Unit = typename UnitOf<T>::type;
#if defined(PARTKERNELS_AMX)
  if (grad_y.rows > kTile && grad_y.cols > 0) {
    linear_grad_input_amx(grad_y, w, grad_x, parallel_for);
    return;
  }
#endif
  const Rebuilder<T> rebuild(w);
  const auto pack_left = [&](int64_t i, int64_t m, int64_t k, int64_t d, Unit* block) {
    pack_rows(grad_y, i, m, k, d, block);
  };
  const auto pack_right = [&](int64_t k, int64_t d, int64_t j, int64_t n, Unit* block) {
    if constexpr (std::is_same_v<Unit, T>) {
      rebuild.make(k, d, j, n, InPanels<T>{block}, Offset{16, 0});
    } else {
      pack_right_of_rows<Unit>(
          d, n,
          [&](int64_t r, int64_t rows, T* out, int64_t stride) {
            rebuild(k + r, rows, j, n, out, stride, Offset{rows, 0});
          },
          block);
    }
  };
  multiply_packed(grad_y.cols, grad_x, true, pack_left, pack_right, add_bias<T>(grad_x, nullptr), parallel_for);
}

template <class T>
void linear_grad_weight(Matrix<const T> grad_y, Matrix<const T> x, Owners owners, int update, Weight<T> grad_w,
                        const ParallelFor& parallel_for) {
  using Unit = typename UnitOf<T>::type;
  const MaskedStore<T> store(owners, update, grad_w);
#if defined(PARTKERNELS_AMX)
  if (x.rows > kFewRowsOfDepth) {
    linear_grad_weight_amx(grad_y, x, store, parallel_for);
    return;
  }
#endif
  const auto pack_left = [&](int64_t i, int64_t m, int64_t k, int64_t d, Unit* block) {
    pack_left_depth(grad_y, k, d, i, m, block);
  };
  if constexpr (std::is_same_v<Unit, T>) {
    if (x.rows > 0 && rows_are_contiguous(grad_w)) {
      const int64_t panel_depth = std::min(x.rows, kDepth<T>);
      gemm_in_output<T, Layout::depth_major>(
          x.rows, Matrix<T>{grad_w.data, grad_w.rows, x.cols, grad_w.row_stride, 1}, panel_depth, pack_left,
          [&](int64_t k, int64_t d, int64_t j, int64_t n, T* block) {
            pack_right_depth(x, k, d, j, n, block, kPanel<T> * panel_depth);
          },
          [&](int64_t i, int64_t m, int64_t j, int64_t n) { return store.marks(i, m, j, n); }, [](auto...) {},
          parallel_for);
      return;
    }
  }
  gemm<Unit, Layout::depth_major>(
      grad_w.rows, x.cols, x.rows, 3 * kRows, pack_left,
      [&](int64_t k, int64_t d, int64_t j, int64_t n, Unit* block) { pack_right_depth(x, k, d, j, n, block); },
      [&](int64_t i, int64_t m, int64_t j, int64_t n, const Sum<Unit>* sums) { store(i, m, j, n, sums, kCols); },
      parallel_for);
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
