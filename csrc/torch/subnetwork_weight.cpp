#include "passes.h"

namespace partkernels::binding {
namespace {

Tensor subnetwork_weight(Tensor weight, int64_t active, Tensor map, OptionalTensor stored, int64_t count, Word kind,
                         double step, int64_t seed, int64_t stream, int64_t row, int64_t col) {
  const Tensor out = empty(sizes_of(weight), weight);
  rebuild_into(out, weight, active, {map, stored, count, kind, step, seed, stream, row, col});
  return out;
}

Tensor subnetwork_weight_grad(Tensor grad, int64_t first, int64_t last, Tensor map, int64_t count) {
  const Tensor out = empty(sizes_of(grad), grad);
  mask_into(out, grad, first, last, map, count);
  return out;
}

PARTKERNELS_KERNELS(m) {
  m.impl("subnetwork_weight", TORCH_BOX(&subnetwork_weight));
  m.impl("subnetwork_weight_grad", TORCH_BOX(&subnetwork_weight_grad));
}

}  // namespace
}  // namespace partkernels::binding
