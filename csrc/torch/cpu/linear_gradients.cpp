// The gradients of linear. On a GPU, PyTorch computes them from a rebuilt weight.
#include "backend.h"
#include "checks.h"

namespace partkernels::binding {
namespace {

Tensor linear_grad_input(Tensor grad_y, Tensor weight, int64_t active, Update, Tensor map, OptionalTensor stored,
                         int64_t count, Word kind, double step, int64_t seed, int64_t stream, int64_t row,
                         int64_t col) {
  check_product(grad_y, weight, 0);
  check_live(1, active, count);
  const Device here(grad_y);
  const Partition partition{map, stored, count, kind, step, seed, stream, row, col};
  const Tensor rows = collapsible(grad_y), grad_x = empty(with_last(grad_y, weight.size(1)), grad_y);
  Device::with_product_type(weight.scalar_type(), [&]<class T>(T) {
    here.product(cpu::linear_grad_input<T>, matrix<T>(grad_x), weight.size(0), matrix<const T>(rows),
                 partition.subnetwork<T>(weight, active));
  });
  return grad_x;
}

Tensor linear_grad_weight(Tensor grad_y, Tensor x, int64_t update, Tensor map, int64_t count) {
  check_live(update, update, count);
  STD_TORCH_CHECK(grad_y.dim() > 0 && x.dim() > 0 && alike(grad_y, x) &&
                      grad_y.numel() * x.sizes().back() == x.numel() * grad_y.sizes().back(),
                  "grad_output and x differ in their rows, dtype or device");
  const Tensor outs = collapsible(grad_y), ins = collapsible(x);
  const Tensor grad_w = empty({grad_y.sizes().back(), x.sizes().back()}, x);
  with_type(x.scalar_type(), [&]<class T>(T) {
    cpu::linear_grad_weight(matrix<const T>(outs), matrix<const T>(ins), owners_of(map, count, sizes_of(grad_w), x),
                            static_cast<int>(update), weight_of<T>(grad_w),
                            threads_for_products(outs.numel() * ins.sizes().back()));
  });
  return grad_w;
}

PARTKERNELS_KERNELS(m) {
  m.impl("linear_grad_input", TORCH_BOX(&linear_grad_input));
  m.impl("linear_grad_weight", TORCH_BOX(&linear_grad_weight));
}

}  // namespace
}  // namespace partkernels::binding
