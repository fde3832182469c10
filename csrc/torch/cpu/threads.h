// PyTorch's threads and images in the form that the CPU kernels take.
#pragma once

#include "partkernels/cpu.h"
#include "tensors.h"

namespace partkernels::binding {

inline const cpu::ParallelFor kTorchThreads = [](int64_t count, const cpu::Body& body) {
  torch::stable::parallel_for(0, count, 1, body);
};

inline const cpu::ParallelFor kThisThread = [](int64_t count, const cpu::Body& body) { body(0, count); };

// The ParallelFor for a pass over a number of entries of a weight.
inline const cpu::ParallelFor& threads_for_entries(int64_t entries) {
  return entries < cpu::kFewEntries ? kThisThread : kTorchThreads;
}

// The ParallelFor for a number of multiplications.
inline const cpu::ParallelFor& threads_for_products(int64_t products) {
  return products < cpu::kFewProducts ? kThisThread : kTorchThreads;
}

template <class T>
cpu::Images<T> images(const Tensor& x) {
  return {data<T>(x), x.size(0), x.size(1), x.size(2), x.size(3), x.stride(0), x.stride(1), x.stride(2), x.stride(3)};
}

}  // namespace partkernels::binding
