#include <algorithm>

#include "partkernels/cpu.h"
#include "rebuild.h"

namespace partkernels::cpu {
namespace {

// Calls use(row, col, n) for pieces of at most kPiece entries that cover a weight.
template <class Use>
void for_each_piece(int64_t rows, int64_t cols, const ParallelFor& parallel_for, const Use& use) {
  parallel_for(rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t col = 0; col < cols; col += kPiece) use(row, col, std::min(kPiece, cols - col));
    }
  });
}

}  // namespace

template <class T>
void subnetwork_weight(const Subnetwork<T>& w, Weight<T> out, const ParallelFor& parallel_for) {
  for_each_piece(out.rows, out.cols(), parallel_for, [&](int64_t row, int64_t col, int64_t n) {
    Accumulator<T> values[kPiece];
    rebuild(w, row, col, n, values);
    for_each_entry(out, row, col, n, [&](int64_t j, T* entry) { *entry = narrow<T>(values[j]); });
  });
}

template <class T>
void subnetwork_weight_grad(Weight<const T> grad, Owners owners, int first, int last, Weight<T> out,
                            const ParallelFor& parallel_for) {
  for_each_piece(out.rows, out.cols(), parallel_for, [&](int64_t row, int64_t col, int64_t n) {
    uint8_t keep[kPiece];
    T values[kPiece];
    select_owners(owners, row, col, n, first, last, keep);
    for_each_entry(grad, row, col, n, [&](int64_t j, const T* entry) { values[j] = keep[j] ? *entry : T{}; });
    for_each_entry(out, row, col, n, [&](int64_t j, T* entry) { *entry = values[j]; });
  });
}

#define PARTKERNELS_INSTANTIATE(T)                                                      \
  template void subnetwork_weight(const Subnetwork<T>&, Weight<T>, const ParallelFor&); \
  template void subnetwork_weight_grad(Weight<const T>, Owners, int, int, Weight<T>, const ParallelFor&);

PARTKERNELS_INSTANTIATE(float)
PARTKERNELS_INSTANTIATE(double)
PARTKERNELS_INSTANTIATE(bfloat16)

}  // namespace partkernels::cpu
