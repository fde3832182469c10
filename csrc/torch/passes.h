// Passes over a weight that write into an existing tensor.
#pragma once

#include "backend.h"
#include "checks.h"

namespace partkernels::binding {

// Writes the subnetwork's weight into a contiguous tensor.
inline void rebuild_into(const Tensor& out, const Tensor& weight, int64_t active, Partition partition) {
  check_live(1, active, partition.count);
  const Device here(weight);
  if (partition.stored) partition.stored = of_4_dimensions(*partition.stored);
  const Tensor to = of_4_dimensions(out), from = of_4_dimensions(weight);
  Device::with_type(weight.scalar_type(), [&]<class T>(T) {
    here.pass(kernels::subnetwork_weight<T>, out.numel(), partition.subnetwork<T>(from, active), int64_t{0}, int64_t{0},
              weight_of<T>(to));
  });
}

// Writes the gradient at the entries of partitions first..last, and 0 elsewhere, into a contiguous tensor or into grad
// itself.
inline void mask_into(const Tensor& out, const Tensor& grad, int64_t first, int64_t last, const Tensor& map,
                      int64_t count) {
  check_live(first, last, count);
  const Device here(grad);
  const Tensor to = of_4_dimensions(out), from = of_4_dimensions(grad);
  Device::with_type(grad.scalar_type(), [&]<class T>(T) {
    here.pass(kernels::subnetwork_weight_grad<T>, out.numel(), weight_of<const T>(from),
              owners_of(map, count, sizes_of(grad), grad), static_cast<int>(first), static_cast<int>(last),
              weight_of<T>(to));
  });
}

}  // namespace partkernels::binding
