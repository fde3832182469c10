// Checks of the registered operators before they access memory. partkernels/operators has already checked the
// arguments, with more helpful messages. These checks are for callers who use the registered operators directly:
// without them, memory outside of the tensors could be read or written.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "tensors.h"

namespace partkernels::binding {

inline bool alike(const Tensor& one, const Tensor& other) {
  return one.scalar_type() == other.scalar_type() && device_type_of(one) == device_type_of(other);
}

inline void check_live(int64_t first, int64_t last, int64_t count) {
  STD_TORCH_CHECK(1 <= first && first <= last && last <= count && count <= kMaxPartitions, "partitions ", first, " to ",
                  last, " of ", count, "; expected 1 <= first <= last <= count <= ", kMaxPartitions);
}

// x [..., features], multiplied along dimension `dim` of a weight [rows, cols].
inline void check_product(const Tensor& x, const Tensor& weight, int64_t dim) {
  STD_TORCH_CHECK(weight.dim() == 2 && x.dim() > 0 && x.sizes().back() == weight.size(dim) && alike(x, weight),
                  "x does not fit the weight; expected [..., features] and a matrix, of one dtype, on one device");
}

// A bias [out], or rows [C, out] with C >= active.
inline void check_bias(const OptionalTensor& bias, int64_t out, int64_t active, const Tensor& weight) {
  if (!bias) return;
  const bool rows = bias->dim() == 2 && bias->size(0) >= active && bias->size(1) == out;
  STD_TORCH_CHECK((rows || (bias->dim() == 1 && bias->size(0) == out)) && alike(*bias, weight),
                  "the bias does not fit; expected [", out, "], or as many rows as partitions, of the weight's dtype");
}

// Not with ==, which PyTorch 2.11's headers do not define for sizes.
inline bool same_sizes(const Tensor& one, const Tensor& other) {
  return std::equal(one.sizes().begin(), one.sizes().end(), other.sizes().begin(), other.sizes().end());
}

// Checks that the tensors have the parameter's sizes, dtype and device; null pointers are skipped.
inline void check_state(const Tensor& parameter, std::initializer_list<const Tensor*> others) {
  for (const Tensor* other : others) {
    STD_TORCH_CHECK(other == nullptr || (same_sizes(*other, parameter) && alike(*other, parameter)),
                    "a gradient or a state differs from the parameter in shape, dtype or device");
  }
}

}  // namespace partkernels::binding
