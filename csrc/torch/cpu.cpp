// The CPU operators for PyTorch, through its stable ABI: one binary serves every version from 2.10 on.
//
// Each writes into its first argument. Arguments are as partkernels/operators.py lists them; shapes were checked there.
#include "partkernels/cpu.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "partkernels/packed_map.h"

namespace {

using namespace partkernels;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Sizes = std::vector<int64_t>;

const cpu::ParallelFor kTorchThreads = [](int64_t count, const cpu::Body& body) {
  torch::stable::parallel_for(0, count, 1, body);
};

// Calls use(T{}) with the C++ type of a dtype.
template <class Use>
void with_type(ScalarType dtype, const Use& use) {
  switch (dtype) {
    case ScalarType::Float:
      return use(float{});
    case ScalarType::Double:
      return use(double{});
    case ScalarType::BFloat16:
      return use(bfloat16{});
    default:
      STD_TORCH_CHECK(false, "dtype ", static_cast<int>(dtype), "; expected float32, float64 or bfloat16");
  }
}

template <class T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

// The leading dimensions of x are one dimension of the matrix; the caller has made sure that they collapse.
template <class T>
cpu::Matrix<T> matrix(const Tensor& x) {
  return {data<T>(x), x.size(0), x.size(1), x.stride(0), x.stride(1)};
}

template <class T>
cpu::Images<T> images(const Tensor& x) {
  return {data<T>(x), x.size(0), x.size(1), x.size(2), x.size(3), x.stride(0), x.stride(1), x.stride(2), x.stride(3)};
}

template <class T>
cpu::Weight<T> weight_of(const Tensor& w) {
  if (w.dim() == 4) {
    return {data<T>(w), w.size(0), w.size(1), w.size(2), w.size(3), w.stride(0), w.stride(1), w.stride(2), w.stride(3)};
  }
  STD_TORCH_CHECK(w.dim() <= 2, "a weight of ", w.dim(), " dimensions; expected 1, 2 or 4");
  const bool is_vector = w.dim() == 1;
  return {data<T>(w), w.size(0), is_vector ? 1 : w.size(1), 1, 1, w.stride(0), is_vector ? 0 : w.stride(1), 0, 0};
}

cpu::Owners owners_of(const Tensor& map, int64_t count) {
  return {data<const uint8_t>(map), map.stride(0), bits_for(static_cast<int>(count))};
}

// How a partition crosses the boundary; the order is that of operators.PARTITION.
struct PartitionArguments {
  Tensor map;
  OptionalTensor stored;
  int64_t count;
  std::string kind;
  double step;
  int64_t seed, stream;

  template <class T>
  cpu::Subnetwork<T> subnetwork(const Tensor& weight, int64_t active) const {
    const DefaultKind kind_of = kind == "uniform"  ? DefaultKind::uniform
                                : kind == "normal" ? DefaultKind::normal
                                : kind == "stored" ? DefaultKind::stored
                                                   : DefaultKind::zeros;
    return {weight_of<const T>(weight),
            owners_of(map, count),
            static_cast<int>(count),
            static_cast<int>(active),
            {kind_of, static_cast<float>(step), static_cast<uint64_t>(seed), static_cast<uint64_t>(stream)},
            stored ? weight_of<const T>(*stored) : cpu::Weight<const T>{}};
  }
};

template <class T>
const T* bias_data(const OptionalTensor& bias) {
  return bias ? data<const T>(*bias) : nullptr;
}

void linear(Tensor y, Tensor x, Tensor weight, OptionalTensor bias, int64_t active, Tensor map, OptionalTensor stored,
            int64_t count, std::string kind, double step, int64_t seed, int64_t stream) {
  const PartitionArguments partition{map, stored, count, kind, step, seed, stream};
  with_type(weight.scalar_type(), [&]<class T>(T) {
    cpu::linear(matrix<const T>(x), partition.subnetwork<T>(weight, active), bias_data<T>(bias), matrix<T>(y),
                kTorchThreads);
  });
}

void linear_grad_input(Tensor grad_x, Tensor grad_y, Tensor weight, int64_t active, Tensor map, OptionalTensor stored,
                       int64_t count, std::string kind, double step, int64_t seed, int64_t stream) {
  const PartitionArguments partition{map, stored, count, kind, step, seed, stream};
  with_type(weight.scalar_type(), [&]<class T>(T) {
    cpu::linear_grad_input(matrix<const T>(grad_y), partition.subnetwork<T>(weight, active), matrix<T>(grad_x),
                           kTorchThreads);
  });
}

void linear_grad_weight(Tensor grad_w, Tensor grad_y, Tensor x, int64_t update, Tensor map, int64_t count) {
  with_type(x.scalar_type(), [&]<class T>(T) {
    cpu::linear_grad_weight(matrix<const T>(grad_y), matrix<const T>(x), owners_of(map, count),
                            static_cast<int>(update), weight_of<T>(grad_w), kTorchThreads);
  });
}

cpu::Convolution convolution(const Sizes& stride, const Sizes& padding, const Sizes& dilation, int64_t groups) {
  return {{stride[0], stride[1]}, {padding[0], padding[1]}, {dilation[0], dilation[1]}, groups};
}

void conv2d(Tensor y, Tensor x, Tensor weight, OptionalTensor bias, Sizes stride, Sizes padding, Sizes dilation,
            int64_t groups, int64_t active, Tensor map, OptionalTensor stored, int64_t count, std::string kind,
            double step, int64_t seed, int64_t stream) {
  const PartitionArguments partition{map, stored, count, kind, step, seed, stream};
  with_type(weight.scalar_type(), [&]<class T>(T) {
    cpu::conv2d(images<const T>(x), partition.subnetwork<T>(weight, active), bias_data<T>(bias),
                convolution(stride, padding, dilation, groups), images<T>(y), kTorchThreads);
  });
}

void conv2d_grad_input(Tensor grad_x, Tensor grad_y, Tensor weight, Sizes stride, Sizes padding, Sizes dilation,
                       int64_t groups, int64_t active, Tensor map, OptionalTensor stored, int64_t count,
                       std::string kind, double step, int64_t seed, int64_t stream) {
  const PartitionArguments partition{map, stored, count, kind, step, seed, stream};
  with_type(weight.scalar_type(), [&]<class T>(T) {
    cpu::conv2d_grad_input(images<const T>(grad_y), partition.subnetwork<T>(weight, active),
                           convolution(stride, padding, dilation, groups), images<T>(grad_x), kTorchThreads);
  });
}

void few_channels_grad_input(Tensor grad_x, Tensor grad_y, Tensor weight, Sizes stride, Sizes padding, Sizes dilation,
                             int64_t groups) {
  with_type(weight.scalar_type(), [&]<class T>(T) {
    cpu::few_channels_grad_input(images<const T>(grad_y), weight_of<const T>(weight),
                                 convolution(stride, padding, dilation, groups), images<T>(grad_x), kTorchThreads);
  });
}

void conv2d_grad_weight(Tensor grad_w, Tensor grad_y, Tensor x, Sizes stride, Sizes padding, Sizes dilation,
                        int64_t groups, int64_t update, Tensor map, int64_t count) {
  with_type(x.scalar_type(), [&]<class T>(T) {
    cpu::conv2d_grad_weight(images<const T>(grad_y), images<const T>(x), convolution(stride, padding, dilation, groups),
                            owners_of(map, count), static_cast<int>(update), weight_of<T>(grad_w), kTorchThreads);
  });
}

void subnetwork_weight(Tensor out, Tensor weight, int64_t first_row, int64_t first_in, int64_t active, Tensor map,
                       OptionalTensor stored, int64_t count, std::string kind, double step, int64_t seed,
                       int64_t stream) {
  const PartitionArguments partition{map, stored, count, kind, step, seed, stream};
  with_type(weight.scalar_type(), [&]<class T>(T) {
    cpu::subnetwork_weight(partition.subnetwork<T>(weight, active), first_row, first_in, weight_of<T>(out),
                           kTorchThreads);
  });
}

void subnetwork_weight_grad(Tensor out, Tensor grad, int64_t first, int64_t last, Tensor map, int64_t count) {
  with_type(grad.scalar_type(), [&]<class T>(T) {
    cpu::subnetwork_weight_grad(weight_of<const T>(grad), owners_of(map, count), static_cast<int>(first),
                                static_cast<int>(last), weight_of<T>(out), kTorchThreads);
  });
}

// Without a map, every entry is stepped.
cpu::Owners owners_of(const OptionalTensor& map, int64_t count) { return map ? owners_of(*map, count) : cpu::Owners{}; }

void sgd_step(Tensor parameter, OptionalTensor momentum_buffer, Tensor grad, OptionalTensor map, int64_t count,
              int64_t update, double lr, double momentum, double weight_decay, bool nesterov) {
  with_type(parameter.scalar_type(), [&]<class T>(T) {
    cpu::sgd_step(weight_of<T>(parameter), weight_of<const T>(grad),
                  momentum_buffer ? weight_of<T>(*momentum_buffer) : cpu::Weight<T>{}, owners_of(map, count),
                  static_cast<int>(update), {lr, momentum, weight_decay, nesterov}, kTorchThreads);
  });
}

void adam_step(Tensor parameter, Tensor exp_avg, Tensor exp_avg_sq, Tensor grad, OptionalTensor map, int64_t count,
               int64_t update, int64_t step, double lr, double beta1, double beta2, double eps, double weight_decay,
               bool decoupled) {
  with_type(parameter.scalar_type(), [&]<class T>(T) {
    cpu::adam_step(weight_of<T>(parameter), weight_of<const T>(grad), weight_of<T>(exp_avg), weight_of<T>(exp_avg_sq),
                   owners_of(map, count), static_cast<int>(update),
                   {lr, beta1, beta2, eps, weight_decay, decoupled, step}, kTorchThreads);
  });
}

void random_map(Tensor map, int64_t cols, Sizes sizes, int64_t seed) {
  cpu::random_map(map.size(0), cols, sizes, static_cast<uint64_t>(seed), data<uint8_t>(map), kTorchThreads);
}

std::string instruction_set() { return cpu::instruction_set(); }

#define PARTKERNELS_PARTITION "Tensor map, Tensor? stored, int count, str kind, float step, int seed, int stream) -> ()"
#define PARTKERNELS_OWNERS "Tensor map, int count) -> ()"
#define PARTKERNELS_STEPPED "Tensor? map, int count, int update, "
#define PARTKERNELS_GEOMETRY "int[] stride, int[] padding, int[] dilation, int groups, "

STABLE_TORCH_LIBRARY(partkernels_cpu, m) {
  m.def("linear(Tensor(a!) y, Tensor x, Tensor weight, Tensor? bias, int active, " PARTKERNELS_PARTITION);
  m.def("linear_grad_input(Tensor(a!) grad_x, Tensor grad_y, Tensor weight, int active, " PARTKERNELS_PARTITION);
  m.def("linear_grad_weight(Tensor(a!) grad_w, Tensor grad_y, Tensor x, int update, " PARTKERNELS_OWNERS);
  m.def("conv2d(Tensor(a!) y, Tensor x, Tensor weight, Tensor? bias, " PARTKERNELS_GEOMETRY
        "int active, " PARTKERNELS_PARTITION);
  m.def("conv2d_grad_input(Tensor(a!) grad_x, Tensor grad_y, Tensor weight, " PARTKERNELS_GEOMETRY
        "int active, " PARTKERNELS_PARTITION);
  m.def(
      "few_channels_grad_input(Tensor(a!) grad_x, Tensor grad_y, Tensor weight, int[] stride, int[] padding, "
      "int[] dilation, int groups) -> ()");
  m.def("conv2d_grad_weight(Tensor(a!) grad_w, Tensor grad_y, Tensor x, " PARTKERNELS_GEOMETRY
        "int update, " PARTKERNELS_OWNERS);
  m.def(
      "subnetwork_weight(Tensor(a!) out, Tensor weight, int first_row, int first_in, int "
      "active, " PARTKERNELS_PARTITION);
  m.def("subnetwork_weight_grad(Tensor(a!) out, Tensor grad, int first, int last, " PARTKERNELS_OWNERS);
  m.def("sgd_step(Tensor(a!) parameter, Tensor(b!)? momentum_buffer, Tensor grad, " PARTKERNELS_STEPPED
        "float lr, float momentum, float weight_decay, bool nesterov) -> ()");
  m.def("adam_step(Tensor(a!) parameter, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor grad, " PARTKERNELS_STEPPED
        "int step, float lr, float beta1, float beta2, float eps, float weight_decay, bool decoupled) -> ()");
  m.def("random_map(Tensor(a!) map, int cols, int[] sizes, int seed) -> ()");
  m.def("instruction_set() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(partkernels_cpu, CompositeExplicitAutograd, m) {
  m.impl("instruction_set", TORCH_BOX(&instruction_set));
}

STABLE_TORCH_LIBRARY_IMPL(partkernels_cpu, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("linear_grad_input", TORCH_BOX(&linear_grad_input));
  m.impl("linear_grad_weight", TORCH_BOX(&linear_grad_weight));
  m.impl("conv2d", TORCH_BOX(&conv2d));
  m.impl("conv2d_grad_input", TORCH_BOX(&conv2d_grad_input));
  m.impl("few_channels_grad_input", TORCH_BOX(&few_channels_grad_input));
  m.impl("conv2d_grad_weight", TORCH_BOX(&conv2d_grad_weight));
  m.impl("subnetwork_weight", TORCH_BOX(&subnetwork_weight));
  m.impl("subnetwork_weight_grad", TORCH_BOX(&subnetwork_weight_grad));
  m.impl("sgd_step", TORCH_BOX(&sgd_step));
  m.impl("adam_step", TORCH_BOX(&adam_step));
  m.impl("random_map", TORCH_BOX(&random_map));
}

}  // namespace
