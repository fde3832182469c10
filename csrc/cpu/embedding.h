// embedding: rows of a subnetwork's weight, four at a time, so that they share a vector of Philox calls like
// neighbouring rows.
#pragma once

#include "subnetwork_weight.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

template <class T>
void embedding(const int64_t* ids, int64_t count, const Subnetwork<T>& w, T* out, const ParallelFor& parallel_for) {
  const Rebuilder<T> rebuild(w);
  const int64_t cols = w.weight.cols();
  for_strips(count, cols, parallel_for, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kTileRows;
    rebuild.gather(ids + first, std::min(count, end * kTileRows) - first, out + first * cols, cols);
  });
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
