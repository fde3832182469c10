// The CPU operators for PyTorch.
#include "bias.h"
#include "convolution.h"
#include "operators.h"
#include "threads.h"

namespace {

using namespace partkernels;
using namespace partkernels::binding;

struct Cpu {
  explicit Cpu(const Tensor&) {}

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

  template <class T>
  void linear(Matrix<const T> x, const Subnetwork<T>& w, const T* bias, Matrix<T> y) const {
    cpu::linear(x, w, bias, y, kTorchThreads);
  }
  template <class T>
  void linear_grad_input(Matrix<const T> grad_y, const Subnetwork<T>& w, Matrix<T> grad_x) const {
    cpu::linear_grad_input(grad_y, w, grad_x, kTorchThreads);
  }
  template <class T>
  void subnetwork_weight(const Subnetwork<T>& w, int64_t first_row, int64_t first_in, Weight<T> out) const {
    cpu::subnetwork_weight(w, first_row, first_in, out, threads_for(out.rows * out.cols()));
  }
  template <class T>
  void subnetwork_weight_grad(Weight<const T> grad, Owners owners, int first, int last, Weight<T> out) const {
    cpu::subnetwork_weight_grad(grad, owners, first, last, out, threads_for(out.rows * out.cols()));
  }
  template <class T>
  void embedding(const int64_t* ids, int64_t count, const Subnetwork<T>& w, T* out) const {
    cpu::embedding(ids, count, w, out, kTorchThreads);
  }
  template <class T>
  void sgd_step(Weight<T> parameter, Weight<const T> grad, Weight<T> momentum_buffer, const Owners& owners, int update,
                const Sgd& sgd) const {
    cpu::sgd_step(parameter, grad, momentum_buffer, owners, update, sgd, threads_for(grad.rows * grad.cols()));
  }
  template <class T>
  void adam_step(Weight<T> parameter, Weight<const T> grad, Weight<T> exp_avg, Weight<T> exp_avg_sq,
                 const Owners& owners, int update, const Adam& adam) const {
    cpu::adam_step(parameter, grad, exp_avg, exp_avg_sq, owners, update, adam, threads_for(grad.rows * grad.cols()));
  }
};

Tensor linear_grad_weight(Tensor grad_y, Tensor x, int64_t update, Tensor map, int64_t count) {
  const Tensor outs = collapsible(grad_y), ins = collapsible(x);
  const Tensor grad_w = empty({grad_y.sizes().back(), x.sizes().back()}, x);
  with_type(x.scalar_type(), [&]<class T>(T) {
    cpu::linear_grad_weight(matrix<const T>(outs), matrix<const T>(ins), owners_of(map, count),
                            static_cast<int>(update), weight_of<T>(grad_w), kTorchThreads);
  });
  return grad_w;
}

Tensor conv2d(Tensor x, Tensor weight, OptionalTensor bias, Sizes stride, Sizes padding, Sizes dilation, int64_t groups,
              int64_t active, Update, Tensor map, OptionalTensor stored, int64_t count, std::string kind, double step,
              int64_t seed, int64_t stream, int64_t row, int64_t col) {
  return convolve(x, weight, live_bias(bias, active), {stride, padding, dilation, groups}, active,
                  {map, stored, count, kind, step, seed, stream, row, col});
}

Tensor conv2d_grad_input(Tensor grad_y, Tensor weight, Sizes input_size, Sizes stride, Sizes padding, Sizes dilation,
                         int64_t groups, int64_t active, Update, Tensor map, OptionalTensor stored, int64_t count,
                         std::string kind, double step, int64_t seed, int64_t stream, int64_t row, int64_t col) {
  return convolve_grad_input(grad_y, weight, input_size, {stride, padding, dilation, groups}, active,
                             {map, stored, count, kind, step, seed, stream, row, col});
}

Tensor conv2d_grad_weight(Tensor grad_y, Tensor x, Sizes kernel_size, Sizes stride, Sizes padding, Sizes dilation,
                          int64_t groups, int64_t update, Tensor map, int64_t count) {
  return convolve_grad_weight(grad_y, x, kernel_size, {stride, padding, dilation, groups}, update, map, count);
}

Tensor linear_grad_bias(Tensor grad_y, int64_t update, int64_t count) { return bias_grad(grad_y, update, count); }

void random_map(Tensor map, int64_t cols, Sizes sizes, int64_t seed) {
  cpu::random_map(map.size(0), cols, sizes, static_cast<uint64_t>(seed), data<uint8_t>(map), kTorchThreads);
}

std::string instruction_set() { return cpu::instruction_set(); }

STABLE_TORCH_LIBRARY(partkernels_cpu, m) {
  PARTKERNELS_SCHEMAS(m);
  m.def("linear_grad_weight(Tensor grad_output, Tensor x, int update, " PARTKERNELS_OWNERS);
  m.def("linear_grad_bias(Tensor grad_output, int update, int count) -> Tensor");
  m.def("conv2d(Tensor x, Tensor weight, Tensor? bias, " PARTKERNELS_GEOMETRY PARTKERNELS_SUBNETWORK);
  m.def("conv2d_grad_input(Tensor grad_output, Tensor weight, SymInt[4] input_size, " PARTKERNELS_GEOMETRY
            PARTKERNELS_SUBNETWORK);
  m.def("conv2d_grad_weight(Tensor grad_output, Tensor x, int[2] kernel_size, " PARTKERNELS_GEOMETRY
        "int update, " PARTKERNELS_OWNERS);
  m.def("random_map(Tensor(a!) map, int cols, int[] sizes, int seed) -> ()");
  m.def("instruction_set() -> str");
  m.def("limit_workspace(int bytes) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(partkernels_cpu, CompositeExplicitAutograd, m) {
  m.impl("instruction_set", TORCH_BOX(&instruction_set));
  m.impl("limit_workspace", TORCH_BOX(&limit_workspace));
}

STABLE_TORCH_LIBRARY_IMPL(partkernels_cpu, CPU, m) {
  PARTKERNELS_OPERATORS(m, Cpu);
  m.impl("linear_grad_weight", TORCH_BOX(&linear_grad_weight));
  m.impl("linear_grad_bias", TORCH_BOX(&linear_grad_bias));
  m.impl("conv2d", TORCH_BOX(&conv2d));
  m.impl("conv2d_grad_input", TORCH_BOX(&conv2d_grad_input));
  m.impl("conv2d_grad_weight", TORCH_BOX(&conv2d_grad_weight));
  m.impl("random_map", TORCH_BOX(&random_map));
}

}  // namespace
