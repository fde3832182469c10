// The kernels behind the public products, and what each asks of its operands.
#pragma once

#include <type_traits>

#include "launch.h"
#include "product.h"

namespace partkernels::cuda {

// Calls use with a subnetwork's kind of defaults as a type. Where all partitions are live, nothing is drawn.
template <class T, class Use>
Status with_kind(const Subnetwork<T>& w, const Use& use) {
  switch (w.active == w.count ? DefaultKind::zeros : w.defaults.kind) {
    case DefaultKind::uniform:
      return use(std::integral_constant<DefaultKind, DefaultKind::uniform>());
    case DefaultKind::normal:
      return use(std::integral_constant<DefaultKind, DefaultKind::normal>());
    case DefaultKind::stored:
      return use(std::integral_constant<DefaultKind, DefaultKind::stored>());
    default:
      return use(std::integral_constant<DefaultKind, DefaultKind::zeros>());
  }
}

// Rows of neighbouring entries, each at a multiple of 16 bytes.
template <class T>
bool rows_fit_copies(const T* data, int64_t row_stride, int64_t col_stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && col_stride == 1 &&
         row_stride % (16 / static_cast<int64_t>(sizeof(T))) == 0;
}

// float16 and bfloat16, of any strides.
template <class T, Work kWork>
Status run_mma(const Device& device, const Subnetwork<T>& w, const Product<T>& p, Stream stream);

// linear of float16 and bfloat16 with at most so many rows of x, whose operands fit_copies.
constexpr int kFewRows = 16;
template <class T>
Status run_few_rows(const Device& device, const Subnetwork<T>& w, const Product<T>& p, Stream stream);

// float32 and float64.
template <class T, Work kWork>
Status run_simt(const Subnetwork<T>& w, const Product<T>& p, Stream stream);

// float16 and bfloat16 on compute capability 9.0, where the copy engine takes the operands.
template <class T>
Status run_hopper_linear(const Device& device, const Subnetwork<T>& w, const Product<T>& p, Stream stream);
template <class T>
Status run_hopper_grad_input(const Device& device, const Subnetwork<T>& w, const Product<T>& p, Stream stream);
template <class T>
Status run_hopper_grad_weight(const Device& device, const Product<T>& p, Stream stream);

}  // namespace partkernels::cuda
