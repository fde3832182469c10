// Convolutions by PyTorch's own: oneDNN's run at the processor's peak, and a weight is small beside the images that it
// meets. A subnetwork's weight is rebuilt for them, at most a MiB of it at a time, in a workspace of the thread's.
//
// All of it is C++ because a convolution leaves nothing in the caches: Python between its parts cost 100 us and more.
#pragma once

#include "tensors.h"

namespace partkernels::binding {

struct Geometry {
  Sizes stride, padding, dilation;
  int64_t groups;
};

// x [batch, in, height, width], weight [out, in / groups, height, width]; a bias is dense, and may be absent.
Tensor convolve(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Geometry& geometry,
                int64_t active, const Partition& partition);

// input_size is x's.
Tensor convolve_grad_input(const Tensor& grad_y, const Tensor& weight, const Sizes& input_size,
                           const Geometry& geometry, int64_t active, const Partition& partition);

// The entries of partition update; 0 elsewhere.
Tensor convolve_grad_weight(const Tensor& grad_y, const Tensor& x, const Sizes& kernel_size, const Geometry& geometry,
                            int64_t update, const Tensor& map, int64_t count);

// Sets the most bytes of a rebuilt weight, 0 for none, and returns what they were: for tests of larger weights.
int64_t limit_workspace(int64_t bytes);

}  // namespace partkernels::binding
