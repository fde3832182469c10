// The gradient of linear's weight; on a GPU it is PyTorch's.
#include "backend.h"
#include "checks.h"

namespace partkernels::binding {
namespace {

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

PARTKERNELS_KERNELS(m) { m.impl("linear_grad_weight", TORCH_BOX(&linear_grad_weight)); }

}  // namespace
}  // namespace partkernels::binding
