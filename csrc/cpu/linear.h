// linear and its gradients. The operand that is spread over vectors is the weight's, in all three products; so it is
// packed, and rebuilt, once for hundreds of rows of x.
#pragma once

#include "linear_few_rows.h"
#include "masked_store.h"
#include "pack.h"
#include "rebuild.h"
#include "store_rows.h"
#if defined(PARTKERNELS_AMX)
#include "linear_by_tiles.h"
#include "linear_few_rows_by_tiles.h"
#endif

namespace partkernels::cpu::PARTKERNELS_ISA {

// y = x w^T: rows of w are rebuilt a few at a time and transposed into panels.
template <class T>
void linear(Matrix<const T> x, const Subnetwork<T>& w, const T* bias, Matrix<T> y, const ParallelFor& parallel_for) {
  using Unit = typename UnitOf<T>::type;
#if defined(PARTKERNELS_AMX)
  // A weight that is all live is read where it lies, and for a row or two as fast as memory gives it only row by row.
  if (x.rows > (w.active == w.count ? 2 : 0) && x.cols > 0) {
    (x.rows <= kFewRowsOfTiles ? linear_of_few_rows_by_tiles : linear_by_tiles)(x, w, bias, y, parallel_for);
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
  gemm<Unit, Layout::row_major>(
      x.rows, w.weight.rows, x.cols, kBatch<Unit>,
      [&](int64_t i, int64_t m, int64_t k, int64_t d, Unit* block) { pack_rows(x, i, m, k, d, block); },
      [&](int64_t k, int64_t d, int64_t j, int64_t n, Unit* block) {
        pack_right_transposed<T>(
            n, d,
            [&](int64_t c, int64_t rows, T* out, int64_t stride) {
              return rebuild.rows_of(j + c, rows, k, d, out, stride, c + rows < n ? Offset{rows, 0} : Offset{-c, d});
            },
            block);
      },
      [&](int64_t i, int64_t m, int64_t j, int64_t n, const Sum<Unit>* product) {
        store_rows(y, i, m, j, n, product, kCols, bias);
      },
      parallel_for);
}

// grad_x = grad_y w: w lies as the panels need it.
template <class T>
void linear_grad_input(Matrix<const T> grad_y, const Subnetwork<T>& w, Matrix<T> grad_x,
                       const ParallelFor& parallel_for) {
  using Unit = typename UnitOf<T>::type;
  constexpr int64_t kScratchRows = 16;
  const Rebuilder<T> rebuild(w);
  gemm<Unit, Layout::row_major>(
      grad_y.rows, w.weight.cols(), grad_y.cols, kBatch<Unit>,
      [&](int64_t i, int64_t m, int64_t k, int64_t d, Unit* block) { pack_rows(grad_y, i, m, k, d, block); },
      [&](int64_t k, int64_t d, int64_t j, int64_t n, Unit* block) {
        for (int64_t r = 0; r < d; r += kScratchRows) {
          const int64_t rows = std::min(kScratchRows, d - r);
          alignas(64) T scratch[kScratchRows][kCols];
          rebuild(k + r, rows, j, n, scratch[0], kCols, Offset{rows, 0});
          pack_right_depth(Matrix<const T>{scratch[0], rows, n, kCols, 1}, 0, rows, 0, n,
                           block + r / kUnitDepth<Unit> * kPanel<Unit>);
        }
      },
      [&](int64_t i, int64_t m, int64_t j, int64_t n, const Sum<Unit>* product) {
        store_rows<T>(grad_x, i, m, j, n, product, kCols, nullptr);
      },
      parallel_for);
}

template <class T>
void linear_grad_weight(Matrix<const T> grad_y, Matrix<const T> x, Owners owners, int update, Weight<T> grad_w,
                        const ParallelFor& parallel_for) {
  using Unit = typename UnitOf<T>::type;
  const MaskedStore<T> store(owners, update, grad_w);
  gemm<Unit, Layout::depth_major>(
      grad_y.cols, x.cols, x.rows, 3 * kRows,
      [&](int64_t i, int64_t m, int64_t k, int64_t d, Unit* block) { pack_left_depth(grad_y, k, d, i, m, block); },
      [&](int64_t k, int64_t d, int64_t j, int64_t n, Unit* block) { pack_right_depth(x, k, d, j, n, block); },
      [&](int64_t i, int64_t m, int64_t j, int64_t n, const Sum<Unit>* product) { store(i, m, j, n, product); },
      parallel_for);
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
