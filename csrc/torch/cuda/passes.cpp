// Passes over a weight that write into existing memory, for products computed by PyTorch: slices of a weight are
// rebuilt in one buffer, and a gradient is masked in place. They are not operators, so their schemas are defined here.
#include "passes.h"

namespace partkernels::binding {
namespace {

void subnetwork_weight_out(Tensor out, Tensor weight, int64_t active, Tensor map, OptionalTensor stored, int64_t count,
                           Word kind, double step, int64_t seed, int64_t stream, int64_t row, int64_t col) {
  rebuild_into(out, weight, active, {map, stored, count, kind, step, seed, stream, row, col});
}

void subnetwork_weight_grad_out(Tensor out, Tensor grad, int64_t first, int64_t last, Tensor map, int64_t count) {
  mask_into(out, grad, first, last, map, count);
}

STABLE_TORCH_LIBRARY_FRAGMENT(partkernels_cuda, m) {
  m.def(
      "subnetwork_weight_out(Tensor(a!) out, Tensor weight, int active, Tensor map, Tensor? stored, int count, "
      "str kind, float step, int seed, int stream, int row, int col) -> ()");
  m.def("subnetwork_weight_grad_out(Tensor(a!) out, Tensor grad, int first, int last, Tensor map, int count) -> ()");
}

PARTKERNELS_KERNELS(m) {
  m.impl("subnetwork_weight_out", TORCH_BOX(&subnetwork_weight_out));
  m.impl("subnetwork_weight_grad_out", TORCH_BOX(&subnetwork_weight_grad_out));
}

}  // namespace
}  // namespace partkernels::binding
