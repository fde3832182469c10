// Rebuilding a piece of a subnetwork's weight: the seam between the packed map and a multiplication.
#pragma once

#include <cstdint>

#include "accumulate.h"
#include "partkernels/cpu.h"

namespace partkernels::cpu {

// Columns that are decoded and drawn at once: one vector of Philox calls serves 256 uniform entries.
constexpr int64_t kPiece = 256;

// out[j] = w_k[row][col + j] for j in [0, n), in the accumulator's type.
template <class T>
void rebuild(const Subnetwork<T>& w, int64_t row, int64_t col, int64_t n, Accumulator<T>* out);

// keep[j] = whether the partition of entry (row, col + j) is in first..last.
void select_owners(const Owners& owners, int64_t row, int64_t col, int64_t n, int first, int last, uint8_t* keep);

// Calls use(j, pointer) for j in [0, n) with the address of the entry (row, col + j) of a weight.
template <class T, class Use>
void for_each_entry(const Weight<T>& weight, int64_t row, int64_t col, int64_t n, const Use& use) {
  T* const base = weight.data + row * weight.row_stride;
  for (int64_t j = 0; j < n;) {
    const int64_t pixel = (col + j) / weight.in;
    const int64_t in = (col + j) % weight.in;
    T* entry =
        base + pixel / weight.width * weight.y_stride + pixel % weight.width * weight.x_stride + in * weight.in_stride;
    const int64_t end = j + weight.in - in < n ? j + weight.in - in : n;
    for (; j < end; ++j, entry += weight.in_stride) use(j, entry);
  }
}

}  // namespace partkernels::cpu
