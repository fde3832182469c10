// The gradient of a bias on the CPU. For small networks it is one call; PyTorch's sum and the rows of zeros around it
// would be three.
#include "accumulator.h"
#include "backend.h"
#include "checks.h"

namespace partkernels::binding {
namespace {

// grad_y as [outer, out, inner], with sizes and strides.
struct Sums {
  Dimension outer, out, inner;
};

// to[c] = the sum over outer and inner, in double: in float, it would be less exact than PyTorch's for this many terms.
template <class T>
void add_up(const Tensor& grad_y, const Sums& sums, T* to) {
  const auto [outer, out, inner] = sums;
  std::vector<double> totals(out.size);
  for (int64_t o = 0; o < outer.size; ++o) {
    for (int64_t c = 0; c < out.size; ++c) {
      const T* const from = data<const T>(grad_y) + o * outer.stride + c * out.stride;
      for (int64_t i = 0; i < inner.size; ++i) totals[c] += cpu::widen(from[i * inner.stride]);
    }
  }
  for (int64_t c = 0; c < out.size; ++c) to[c] = cpu::narrow<T>(static_cast<cpu::Accumulator<T>>(totals[c]));
}

// The gradient of a bias [count, out], given grad_y [..., out, ...] with the outputs in dimension dim: the sum of
// grad_y in row `update`, 0 elsewhere.
Tensor grad_bias(Tensor grad_y, int64_t dim, int64_t update, int64_t count) {
  check_live(update, update, count);
  const int64_t dims = grad_y.dim();
  STD_TORCH_CHECK(-dims <= dim && dim < dims, "dim is ", dim, ", and grad_output has ", dims, " dimensions");
  if (dim < 0) dim += dims;
  const auto outer = collapsed(grad_y, 0, dim), inner = collapsed(grad_y, dim + 1, dims);
  const int64_t out = grad_y.size(dim);
  const Tensor grad = empty({count, out}, grad_y);
  with_type(grad_y.scalar_type(), [&]<class T>(T) {
    std::fill_n(data<T>(grad), count * out, T{});
    T* const row = data<T>(grad) + (update - 1) * out;
    if (outer && inner && grad_y.numel() < cpu::kFewEntries) {
      add_up<T>(grad_y, {*outer, {out, grad_y.stride(dim)}, *inner}, row);
    } else if (grad_y.numel() > 0) {  // PyTorch's threads are faster for many entries
      int64_t before = 1;
      for (int64_t d = 0; d < dim; ++d) before *= grad_y.size(d);
      constexpr int64_t kAround[] = {0, 2};
      Tensor sum = torch::stable::select(grad, 0, update - 1);
      torch::stable::sum_out(sum, torch::stable::reshape(grad_y, Sizes{before, out, -1}), kAround);
    }
  });
  return grad;
}

PARTKERNELS_KERNELS(m) { m.impl("grad_bias", TORCH_BOX(&grad_bias)); }

}  // namespace
}  // namespace partkernels::binding
