// The kernels of the public products, their requirements, and the sums that blocks share.
#pragma once

#include <type_traits>

#include "launch.h"
#include "matmul_arguments.h"

namespace partkernels::cuda {

// Calls use with a subnetwork's kind of defaults as a type: zeros if all partitions are active, since no defaults are
// drawn then.
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

// Whether rows are contiguous and begin at multiples of 16 bytes.
template <class T>
bool rows_fit_copies(const T* data, int64_t row_stride, int64_t col_stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && col_stride == 1 &&
         row_stride % (16 / static_cast<int64_t>(sizeof(T))) == 0;
}
template <class T>
bool rows_fit_copies(const Operand<T>& of) {
  return rows_fit_copies(of.data, of.row_stride, of.col_stride);
}

// linear with at most kFewRows rows of x, for operands that suit copies.
constexpr int kFewRows = 16;
template <class T>
Status run_few_rows(const Device& device, const Subnetwork<T>& w, const Product<T>& p, Stream stream);

// linear on compute capability 9.0, for operands that the copy engine takes.
template <class T>
Status run_hopper_linear(const Device& device, const Subnetwork<T>& w, const Product<T>& p, Stream stream);

// --- sums that blocks share: where there are fewer tiles than multiprocessors ---

// Fewer groups of 64 terms would not fill a block's pipeline of copies.
constexpr int kLeastGroups = 4;

// The number of shares of each sum that keeps the multiprocessors busy, given the number of tiles; at most `most`.
inline int shares_of(const Device& device, int tiles, int terms, int most) {
  const int groups = divide_up(terms, kGroup);
  const int wanted = min_of(min_of(device.multiprocessors / max_of(tiles, 1), groups / kLeastGroups), most);
  return wanted < 2 ? 1 : divide_up(groups, divide_up(groups, wanted));
}

// out = the sums of the shares, in their order, plus the bias.
template <class T>
Status add_shares(const Product<T>& p, Stream stream);

// Launches a kernel that computes `tiles` tiles of a product, through launch_all(product, tasks). p.shares is the
// number of shares for which there is memory.
template <class T, class LaunchAll>
Status launch_shared(const Device& device, Product<T> p, int tiles, Stream stream, const LaunchAll& launch_all) {
  p.shares = shares_of(device, tiles, p.terms, p.shares);
  const Status status = launch_all(p, tiles * p.shares);
  return status && p.shares > 1 ? add_shares(p, stream) : status;
}

}  // namespace partkernels::cuda
