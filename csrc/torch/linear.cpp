#include "backend.h"
#include "checks.h"

namespace partkernels::binding {
namespace {

Tensor linear(Tensor x, Tensor weight, OptionalTensor bias, int64_t active, Update, Tensor map, OptionalTensor stored,
              int64_t count, Word kind, double step, int64_t seed, int64_t stream, int64_t row, int64_t col) {
  check_product(x, weight, 1);
  check_live(1, active, count);
  check_bias(bias, weight.size(0), active, weight);
  const Device here(x);
  const Partition partition{map, stored, count, kind, step, seed, stream, row, col};
  const Tensor rows = collapsible(x), y = empty(with_last(x, weight.size(0)), x);
  Device::with_product_type(weight.scalar_type(), [&]<class T>(T) {
    const auto live_bias = here.live_bias<T>(bias, active);
    here.product(kernels::linear<T>, matrix<T>(y), weight.size(1), matrix<const T>(rows),
                 partition.subnetwork<T>(weight, active), live_bias.data());
  });
  return y;
}

PARTKERNELS_KERNELS(m) { m.impl("linear", TORCH_BOX(&linear)); }

}  // namespace
}  // namespace partkernels::binding
