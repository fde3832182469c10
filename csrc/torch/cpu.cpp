// The CPU operators for PyTorch, through its stable ABI: one binary serves every version from 2.10 on.
//
// Arguments are as partkernels/operators.py lists them, but for the backend; shapes were checked there.
#include <torch/csrc/stable/library.h>

#include "convolution.h"
#include "tensors.h"

namespace {

using namespace partkernels;
using namespace partkernels::binding;

// `update` says which gradient autograd asks for; the product does not depend on it.
using Update = std::optional<int64_t>;

Sizes with_last(const Tensor& x, int64_t size) {
  Sizes sizes = sizes_of(x);
  sizes.back() = size;
  return sizes;
}

Tensor linear(Tensor x, Tensor weight, OptionalTensor bias, int64_t active, Update, Tensor map, OptionalTensor stored,
              int64_t count, std::string kind, double step, int64_t seed, int64_t stream) {
  const Partition partition{map, stored, count, kind, step, seed, stream};
  const Tensor rows = collapsible(x), y = empty(with_last(x, weight.size(0)), dtype_of(x));
  const OptionalTensor dense_bias = dense(bias);
  with_type(weight.scalar_type(), [&]<class T>(T) {
    cpu::linear(matrix<const T>(rows), partition.subnetwork<T>(weight, active), bias_data<T>(dense_bias), matrix<T>(y),
                kTorchThreads);
  });
  return y;
}

Tensor linear_grad_input(Tensor grad_y, Tensor weight, int64_t active, Update, Tensor map, OptionalTensor stored,
                         int64_t count, std::string kind, double step, int64_t seed, int64_t stream) {
  const Partition partition{map, stored, count, kind, step, seed, stream};
  const Tensor rows = collapsible(grad_y), grad_x = empty(with_last(grad_y, weight.size(1)), dtype_of(grad_y));
  with_type(weight.scalar_type(), [&]<class T>(T) {
    cpu::linear_grad_input(matrix<const T>(rows), partition.subnetwork<T>(weight, active), matrix<T>(grad_x),
                           kTorchThreads);
  });
  return grad_x;
}

Tensor linear_grad_weight(Tensor grad_y, Tensor x, int64_t update, Tensor map, int64_t count) {
  const Tensor outs = collapsible(grad_y), ins = collapsible(x);
  const Tensor grad_w = empty({grad_y.sizes().back(), x.sizes().back()}, dtype_of(x));
  with_type(x.scalar_type(), [&]<class T>(T) {
    cpu::linear_grad_weight(matrix<const T>(outs), matrix<const T>(ins), owners_of(map, count),
                            static_cast<int>(update), weight_of<T>(grad_w), kTorchThreads);
  });
  return grad_w;
}

Tensor conv2d(Tensor x, Tensor weight, OptionalTensor bias, Sizes stride, Sizes padding, Sizes dilation, int64_t groups,
              int64_t active, Update, Tensor map, OptionalTensor stored, int64_t count, std::string kind, double step,
              int64_t seed, int64_t stream) {
  return convolve(x, weight, bias, {stride, padding, dilation, groups}, active,
                  {map, stored, count, kind, step, seed, stream});
}

Tensor conv2d_grad_input(Tensor grad_y, Tensor weight, Sizes input_size, Sizes stride, Sizes padding, Sizes dilation,
                         int64_t groups, int64_t active, Update, Tensor map, OptionalTensor stored, int64_t count,
                         std::string kind, double step, int64_t seed, int64_t stream) {
  return convolve_grad_input(grad_y, weight, input_size, {stride, padding, dilation, groups}, active,
                             {map, stored, count, kind, step, seed, stream});
}

Tensor conv2d_grad_weight(Tensor grad_y, Tensor x, Sizes kernel_size, Sizes stride, Sizes padding, Sizes dilation,
                          int64_t groups, int64_t update, Tensor map, int64_t count) {
  return convolve_grad_weight(grad_y, x, kernel_size, {stride, padding, dilation, groups}, update, map, count);
}

Tensor subnetwork_weight(Tensor weight, int64_t active, Tensor map, OptionalTensor stored, int64_t count,
                         std::string kind, double step, int64_t seed, int64_t stream) {
  const Partition partition{map, stored ? of_4_dimensions(*stored) : stored, count, kind, step, seed, stream};
  const Tensor out = empty(sizes_of(weight), dtype_of(weight));
  const Tensor to = of_4_dimensions(out), from = of_4_dimensions(weight);
  with_type(weight.scalar_type(), [&]<class T>(T) {
    cpu::subnetwork_weight(partition.subnetwork<T>(from, active), 0, 0, weight_of<T>(to), threads_for(out.numel()));
  });
  return out;
}

Tensor subnetwork_weight_grad(Tensor grad, int64_t first, int64_t last, Tensor map, int64_t count) {
  const Tensor out = empty(sizes_of(grad), dtype_of(grad));
  const Tensor to = of_4_dimensions(out), from = of_4_dimensions(grad);
  with_type(grad.scalar_type(), [&]<class T>(T) {
    cpu::subnetwork_weight_grad(weight_of<const T>(from), owners_of(map, count), static_cast<int>(first),
                                static_cast<int>(last), weight_of<T>(to), threads_for(out.numel()));
  });
  return out;
}

// The entries that a step of an optimiser meets. Without a map these are all, and where every tensor is dense, one row.
class Stepped {
 public:
  Stepped(const OptionalTensor& map, int64_t count, std::initializer_list<const Tensor*> tensors)
      : owners_(map ? owners_of(*map, count) : cpu::Owners{}), one_row_(!map) {
    for (const Tensor* tensor : tensors) one_row_ = one_row_ && (tensor == nullptr || tensor->is_contiguous());
  }

  const cpu::Owners& owners() const { return owners_; }

  Tensor view(const Tensor& tensor) const {
    return one_row_ ? borrowed(tensor.data_ptr(), {1, tensor.numel()}, {tensor.numel(), 1}, dtype_of(tensor))
                    : of_4_dimensions(tensor);
  }

  // Where no view in 4 dimensions has a tensor's strides, it was a copy.
  static void write_back(Tensor tensor, const Tensor& view) {
    if (view.data_ptr() != tensor.data_ptr()) {
      torch::stable::copy_(tensor, torch::stable::reshape(view, tensor.sizes()));
    }
  }

 private:
  cpu::Owners owners_;
  bool one_row_;
};

void sgd_step(Tensor parameter, Tensor grad, OptionalTensor momentum_buffer, OptionalTensor map, int64_t count,
              int64_t update, double lr, double momentum, double weight_decay, bool nesterov) {
  const Stepped stepped(map, count, {&parameter, &grad, momentum_buffer ? &*momentum_buffer : nullptr});
  const Tensor w = stepped.view(parameter), g = stepped.view(grad);
  const OptionalTensor buffer = momentum_buffer ? OptionalTensor(stepped.view(*momentum_buffer)) : std::nullopt;
  with_type(parameter.scalar_type(), [&]<class T>(T) {
    cpu::sgd_step(weight_of<T>(w), weight_of<const T>(g), buffer ? weight_of<T>(*buffer) : cpu::Weight<T>{},
                  stepped.owners(), static_cast<int>(update), {lr, momentum, weight_decay, nesterov},
                  threads_for(w.numel()));
  });
  Stepped::write_back(parameter, w);
  if (buffer) Stepped::write_back(*momentum_buffer, *buffer);
}

void adam_step(Tensor parameter, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, OptionalTensor map, int64_t count,
               int64_t update, int64_t step, double lr, double beta1, double beta2, double eps, double weight_decay,
               bool decoupled) {
  const Stepped stepped(map, count, {&parameter, &grad, &exp_avg, &exp_avg_sq});
  const Tensor w = stepped.view(parameter), g = stepped.view(grad);
  const Tensor m = stepped.view(exp_avg), v = stepped.view(exp_avg_sq);
  with_type(parameter.scalar_type(), [&]<class T>(T) {
    cpu::adam_step(weight_of<T>(w), weight_of<const T>(g), weight_of<T>(m), weight_of<T>(v), stepped.owners(),
                   static_cast<int>(update), {lr, beta1, beta2, eps, weight_decay, decoupled, step},
                   threads_for(w.numel()));
  });
  Stepped::write_back(parameter, w);
  Stepped::write_back(exp_avg, m);
  Stepped::write_back(exp_avg_sq, v);
}

void random_map(Tensor map, int64_t cols, Sizes sizes, int64_t seed) {
  cpu::random_map(map.size(0), cols, sizes, static_cast<uint64_t>(seed), data<uint8_t>(map), kTorchThreads);
}

std::string instruction_set() { return cpu::instruction_set(); }

#define PARTKERNELS_SUBNETWORK "int active, int? update, " PARTKERNELS_PARTITION
#define PARTKERNELS_PARTITION \
  "Tensor map, Tensor? stored, int count, str kind, float step, int seed, int stream) -> Tensor"
#define PARTKERNELS_OWNERS "Tensor map, int count) -> Tensor"
#define PARTKERNELS_STEPPED "Tensor? map, int count, int update, "
#define PARTKERNELS_GEOMETRY "int[2] stride, int[2] padding, int[2] dilation, int groups, "

STABLE_TORCH_LIBRARY(partkernels_cpu, m) {
  m.def("linear(Tensor x, Tensor weight, Tensor? bias, " PARTKERNELS_SUBNETWORK);
  m.def("linear_grad_input(Tensor grad_output, Tensor weight, " PARTKERNELS_SUBNETWORK);
  m.def("linear_grad_weight(Tensor grad_output, Tensor x, int update, " PARTKERNELS_OWNERS);
  m.def("conv2d(Tensor x, Tensor weight, Tensor? bias, " PARTKERNELS_GEOMETRY PARTKERNELS_SUBNETWORK);
  m.def("conv2d_grad_input(Tensor grad_output, Tensor weight, SymInt[4] input_size, " PARTKERNELS_GEOMETRY
            PARTKERNELS_SUBNETWORK);
  m.def("conv2d_grad_weight(Tensor grad_output, Tensor x, int[2] kernel_size, " PARTKERNELS_GEOMETRY
        "int update, " PARTKERNELS_OWNERS);
  m.def("subnetwork_weight(Tensor weight, int active, " PARTKERNELS_PARTITION);
  m.def("subnetwork_weight_grad(Tensor grad, int first, int last, " PARTKERNELS_OWNERS);
  m.def("sgd_step(Tensor(a!) parameter, Tensor grad, Tensor(b!)? momentum_buffer, " PARTKERNELS_STEPPED
        "float lr, float momentum, float weight_decay, bool nesterov) -> ()");
  m.def("adam_step(Tensor(a!) parameter, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, " PARTKERNELS_STEPPED
        "SymInt step, float lr, float beta1, float beta2, float eps, float weight_decay, bool decoupled) -> ()");
  m.def("random_map(Tensor(a!) map, int cols, int[] sizes, int seed) -> ()");
  m.def("instruction_set() -> str");
  m.def("limit_workspace(int bytes) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(partkernels_cpu, CompositeExplicitAutograd, m) {
  m.impl("instruction_set", TORCH_BOX(&instruction_set));
  m.impl("limit_workspace", TORCH_BOX(&limit_workspace));
}

STABLE_TORCH_LIBRARY_IMPL(partkernels_cpu, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("linear_grad_input", TORCH_BOX(&linear_grad_input));
  m.impl("linear_grad_weight", TORCH_BOX(&linear_grad_weight));
  m.impl("conv2d", TORCH_BOX(&conv2d));
  m.impl("conv2d_grad_input", TORCH_BOX(&conv2d_grad_input));
  m.impl("conv2d_grad_weight", TORCH_BOX(&conv2d_grad_weight));
  m.impl("subnetwork_weight", TORCH_BOX(&subnetwork_weight));
  m.impl("subnetwork_weight_grad", TORCH_BOX(&subnetwork_weight_grad));
  m.impl("sgd_step", TORCH_BOX(&sgd_step));
  m.impl("adam_step", TORCH_BOX(&adam_step));
  m.impl("random_map", TORCH_BOX(&random_map));
}

}  // namespace
