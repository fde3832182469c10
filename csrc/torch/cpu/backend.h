// The CPU as the operators' files see it. Those of csrc/torch are compiled once for each backend, and find the
// backend.h of its folder.
#pragma once

#include <torch/csrc/stable/library.h>

#include "bias.h"
#include "partkernels/cpu.h"
#include "tensors.h"
#include "threads.h"

// Begins the block in which a file registers its kernels. Their schemas are those of partkernels/operators: Python
// defines them, without the trailing backend, before this library is loaded.
//
// Not in the namespace `partkernels` itself: a kernel there would take every call for tensors on a CPU, and which
// backend was asked for, and whether it serves the dtype, is decided in Python.
#define PARTKERNELS_KERNELS(m) STABLE_TORCH_LIBRARY_IMPL(partkernels_cpu, CPU, m)

namespace partkernels::binding {

namespace kernels = partkernels::cpu;

// Where the kernels run: constructed from the tensor whose device computes.
class Device {
 public:
  explicit Device(const Tensor&) {}

  // Calls use(T{}) with the C++ type of a dtype, of any kernel and of a product.
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

  // Calls kernel(arguments ..., out, ...), a product of so many terms.
  template <class Kernel, class T, class... Arguments>
  void product(Kernel kernel, const Matrix<T>& out, int64_t terms, const Arguments&... arguments) const {
    kernel(arguments..., out, threads_for_products(out.rows * out.cols * terms));
  }

  // Calls kernel(arguments ..., ...), a pass over so many entries.
  template <class Kernel, class... Arguments>
  void pass(Kernel kernel, int64_t entries, const Arguments&... arguments) const {
    kernel(arguments..., threads_for_entries(entries));
  }

  // One parameter after another: as many threads for each as its entries are worth. Adam's step is each one's own.
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
