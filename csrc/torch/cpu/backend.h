// The CPU backend for the files in csrc/torch, which are compiled once for each backend and include the backend.h in
// its folder.
#pragma once

#include <torch/csrc/stable/library.h>

#include "bias.h"
#include "partkernels/cpu.h"
#include "tensors.h"
#include "threads.h"

// Begins the block in which a file registers its kernels. Their schemas are defined in partkernels/operators: Python
// defines them, without the trailing backend, before it loads this library.
//
// The kernels are not registered in the namespace `partkernels` itself, because they would then take every call for CPU
// tensors. Python chooses the backend by the caller's request and the dtype.
#define PARTKERNELS_KERNELS(m) STABLE_TORCH_LIBRARY_IMPL(partkernels_cpu, CPU, m)

namespace partkernels::binding {

namespace kernels = partkernels::cpu;

// The device on which the kernels run, constructed from a tensor on it.
class Device {
 public:
  explicit Device(const Tensor&) {}

  // Calls use(T{}) with the C++ type of a dtype, for any kernel and for products.
  template <class Use>
  static void with_type(ScalarType dtype, const Use& use) {
    binding::with_type(dtype, use);
  }
  template <class Use>
  static void with_product_type(ScalarType dtype, const Use& use) {
    binding::with_type(dtype, use);
  }

  template <class T>
  static LiveBias<T> live_bias(const OptionalTensor& bias, int64_t active) {
    return {bias, active};
  }

  // Calls kernel(arguments ..., out, ...), a product with `terms` terms per entry.
  template <class Kernel, class T, class... Arguments>
  void product(Kernel kernel, const Matrix<T>& out, int64_t terms, const Arguments&... arguments) const {
    kernel(arguments..., out, threads_for_products(out.rows * out.cols * terms));
  }

  // Calls kernel(arguments ..., ...), a pass over `entries` entries.
  template <class Kernel, class... Arguments>
  void pass(Kernel kernel, int64_t entries, const Arguments&... arguments) const {
    kernel(arguments..., threads_for_entries(entries));
  }

  // Steps one parameter after another, with a number of threads that depends on its size. Each parameter has its own
  // Adam step count.
  template <class T>
  void sgd_steps(const std::vector<SgdTensors<T>>& each, int update, const Sgd& sgd) const {
    for (const SgdTensors<T>& one : each) {
      pass(kernels::sgd_step<T>, one.parameter.rows * one.parameter.cols(), one.parameter, one.grad,
           one.momentum_buffer, one.owners, update, sgd);
    }
  }
  template <class T>
  void adam_steps(const std::vector<AdamTensors<T>>& each, int update, Adam adam) const {
    for (const AdamTensors<T>& one : each) {
      adam.step = one.step;
      pass(kernels::adam_step<T>, one.parameter.rows * one.parameter.cols(), one.parameter, one.grad, one.exp_avg,
           one.exp_avg_sq, one.owners, update, adam);
    }
  }
};

}  // namespace partkernels::binding
