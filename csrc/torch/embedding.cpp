#include "backend.h"
#include "checks.h"

namespace partkernels::binding {
namespace {

Tensor embedding(Tensor weight, Tensor ids, int64_t, int64_t active, Update, Tensor map, OptionalTensor stored,
                 int64_t count, Word kind, double step, int64_t seed, int64_t stream, int64_t row, int64_t col) {
  check_live(1, active, count);
  STD_TORCH_CHECK(
      weight.dim() == 2 && ids.scalar_type() == ScalarType::Long && device_type_of(ids) == device_type_of(weight),
      "expected a matrix and int64 ids on one device");
  const Device here(weight);
  const Partition partition{map, stored, count, kind, step, seed, stream, row, col};
  const Tensor named = dense(ids);
  Sizes sizes = sizes_of(ids);
  sizes.push_back(weight.size(1));
  const Tensor out = empty(sizes, weight);
  Device::with_type(weight.scalar_type(), [&]<class T>(T) {
    here.pass(kernels::embedding<T>, out.numel(), data<const int64_t>(named), ids.numel(),
              partition.subnetwork<T>(weight, active), data<T>(out));
  });
  return out;
}

PARTKERNELS_KERNELS(m) { m.impl("embedding", TORCH_BOX(&embedding)); }

}  // namespace
}  // namespace partkernels::binding
