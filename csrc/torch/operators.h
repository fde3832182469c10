// The operators that a CPU and a GPU share, through PyTorch's stable ABI: one binary serves every version from 2.10 on.
//
// Arguments are as partkernels/operators.py lists them, but for the backend; shapes were checked there.
#pragma once

#include <torch/csrc/stable/library.h>

#include "tensors.h"

namespace partkernels::binding {

// `update` says which gradient autograd asks for; the product does not depend on it.
using Update = std::optional<int64_t>;

// A Backend is constructed from the tensor whose device computes, has the kernels as members, with_type for its types,
// and with_product_type for those of its products.
template <class Backend>
struct Operators {
  static Tensor linear(Tensor x, Tensor weight, OptionalTensor bias, int64_t active, Update, Tensor map,
                       OptionalTensor stored, int64_t count, std::string kind, double step, int64_t seed,
                       int64_t stream, int64_t row, int64_t col) {
    const Backend here(x);
    const Partition partition{map, stored, count, kind, step, seed, stream, row, col};
    const Tensor rows = collapsible(x), y = empty(with_last(x, weight.size(0)), x);
    Backend::with_product_type(weight.scalar_type(), [&]<class T>(T) {
      const auto live_bias = here.template live_bias<T>(bias, active);
      here.linear(matrix<const T>(rows), partition.subnetwork<T>(weight, active), live_bias.data(), matrix<T>(y));
    });
    return y;
  }

  static Tensor linear_grad_input(Tensor grad_y, Tensor weight, int64_t active, Update, Tensor map,
                                  OptionalTensor stored, int64_t count, std::string kind, double step, int64_t seed,
                                  int64_t stream, int64_t row, int64_t col) {
    const Backend here(grad_y);
    const Partition partition{map, stored, count, kind, step, seed, stream, row, col};
    const Tensor rows = collapsible(grad_y), grad_x = empty(with_last(grad_y, weight.size(1)), grad_y);
    Backend::with_product_type(weight.scalar_type(), [&]<class T>(T) {
      here.linear_grad_input(matrix<const T>(rows), partition.subnetwork<T>(weight, active), matrix<T>(grad_x));
    });
    return grad_x;
  }

  // Into a contiguous tensor.
  static void subnetwork_weight_out(Tensor out, Tensor weight, int64_t active, Tensor map, OptionalTensor stored,
                                    int64_t count, std::string kind, double step, int64_t seed, int64_t stream,
                                    int64_t row, int64_t col) {
    const Backend here(weight);
    const Partition partition{map, stored ? of_4_dimensions(*stored) : stored, count, kind, step, seed, stream, row,
                              col};
    const Tensor to = of_4_dimensions(out), from = of_4_dimensions(weight);
    Backend::with_type(weight.scalar_type(), [&]<class T>(T) {
      here.subnetwork_weight(partition.subnetwork<T>(from, active), 0, 0, weight_of<T>(to));
    });
  }

  static Tensor subnetwork_weight(Tensor weight, int64_t active, Tensor map, OptionalTensor stored, int64_t count,
                                  std::string kind, double step, int64_t seed, int64_t stream, int64_t row,
                                  int64_t col) {
    const Tensor out = empty(sizes_of(weight), weight);
    subnetwork_weight_out(out, weight, active, map, stored, count, kind, step, seed, stream, row, col);
    return out;
  }

  // Into a contiguous tensor, or into grad itself.
  static void subnetwork_weight_grad_out(Tensor out, Tensor grad, int64_t first, int64_t last, Tensor map,
                                         int64_t count) {
    const Backend here(grad);
    const Tensor to = of_4_dimensions(out), from = of_4_dimensions(grad);
    Backend::with_type(grad.scalar_type(), [&]<class T>(T) {
      here.subnetwork_weight_grad(weight_of<const T>(from), owners_of(map, count), static_cast<int>(first),
                                  static_cast<int>(last), weight_of<T>(to));
    });
  }

  static Tensor subnetwork_weight_grad(Tensor grad, int64_t first, int64_t last, Tensor map, int64_t count) {
    const Tensor out = empty(sizes_of(grad), grad);
    subnetwork_weight_grad_out(out, grad, first, last, map, count);
    return out;
  }

  static Tensor embedding(Tensor weight, Tensor ids, int64_t, int64_t active, Update, Tensor map, OptionalTensor stored,
                          int64_t count, std::string kind, double step, int64_t seed, int64_t stream, int64_t row,
                          int64_t col) {
    const Backend here(weight);
    const Partition partition{map, stored, count, kind, step, seed, stream, row, col};
    const Tensor named = dense(ids);
    Sizes sizes = sizes_of(ids);
    sizes.push_back(weight.size(1));
    const Tensor out = empty(sizes, weight);
    Backend::with_type(weight.scalar_type(), [&]<class T>(T) {
      here.embedding(data<const int64_t>(named), ids.numel(), partition.subnetwork<T>(weight, active), data<T>(out));
    });
    return out;
  }

  static void sgd_step(Tensor parameter, Tensor grad, OptionalTensor momentum_buffer, OptionalTensor map, int64_t count,
                       int64_t update, double lr, double momentum, double weight_decay, bool nesterov) {
    const Backend here(parameter);
    const Stepped stepped(map, count, {&parameter, &grad, momentum_buffer ? &*momentum_buffer : nullptr});
    const Tensor w = stepped.view(parameter), g = stepped.view(grad);
    const OptionalTensor buffer = momentum_buffer ? OptionalTensor(stepped.view(*momentum_buffer)) : std::nullopt;
    Backend::with_type(parameter.scalar_type(), [&]<class T>(T) {
      here.sgd_step(weight_of<T>(w), weight_of<const T>(g), buffer ? weight_of<T>(*buffer) : Weight<T>{},
                    stepped.owners(), static_cast<int>(update), {lr, momentum, weight_decay, nesterov});
    });
    Stepped::write_back(parameter, w);
    if (buffer) Stepped::write_back(*momentum_buffer, *buffer);
  }

  static void adam_step(Tensor parameter, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, OptionalTensor map,
                        int64_t count, int64_t update, int64_t step, double lr, double beta1, double beta2, double eps,
                        double weight_decay, bool decoupled) {
    const Backend here(parameter);
    const Stepped stepped(map, count, {&parameter, &grad, &exp_avg, &exp_avg_sq});
    const Tensor w = stepped.view(parameter), g = stepped.view(grad);
    const Tensor m = stepped.view(exp_avg), v = stepped.view(exp_avg_sq);
    Backend::with_type(parameter.scalar_type(), [&]<class T>(T) {
      here.adam_step(weight_of<T>(w), weight_of<const T>(g), weight_of<T>(m), weight_of<T>(v), stepped.owners(),
                     static_cast<int>(update), {lr, beta1, beta2, eps, weight_decay, decoupled, step});
    });
    Stepped::write_back(parameter, w);
    Stepped::write_back(exp_avg, m);
    Stepped::write_back(exp_avg_sq, v);
  }
};

#define PARTKERNELS_SUBNETWORK "int active, int? update, " PARTKERNELS_PARTITION
#define PARTKERNELS_PARTITION \
  "Tensor map, Tensor? stored, int count, str kind, float step, int seed, int stream, int row, int col) -> Tensor"
#define PARTKERNELS_OWNERS "Tensor map, int count) -> Tensor"
#define PARTKERNELS_STEPPED "Tensor? map, int count, int update, "
#define PARTKERNELS_GEOMETRY "int[2] stride, int[2] padding, int[2] dilation, int groups, "
#define PARTKERNELS_SCHEMAS(m)                                                                                         \
  m.def("linear(Tensor x, Tensor weight, Tensor? bias, " PARTKERNELS_SUBNETWORK);                                      \
  m.def("linear_grad_input(Tensor grad_output, Tensor weight, " PARTKERNELS_SUBNETWORK);                               \
  m.def("subnetwork_weight(Tensor weight, int active, " PARTKERNELS_PARTITION);                                        \
  m.def("subnetwork_weight_grad(Tensor grad, int first, int last, " PARTKERNELS_OWNERS);                               \
  m.def("embedding(Tensor weight, Tensor ids, int padding_idx, " PARTKERNELS_SUBNETWORK);                              \
  m.def("sgd_step(Tensor(a!) parameter, Tensor grad, Tensor(b!)? momentum_buffer, " PARTKERNELS_STEPPED                \
        "float lr, float momentum, float weight_decay, bool nesterov) -> ()");                                         \
  m.def("adam_step(Tensor(a!) parameter, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, " PARTKERNELS_STEPPED \
        "SymInt step, float lr, float beta1, float beta2, float eps, float weight_decay, "                             \
        "bool decoupled) -> ()")

#define PARTKERNELS_OPERATORS(m, Backend)                                                   \
  m.impl("linear", TORCH_BOX(&Operators<Backend>::linear));                                 \
  m.impl("linear_grad_input", TORCH_BOX(&Operators<Backend>::linear_grad_input));           \
  m.impl("subnetwork_weight", TORCH_BOX(&Operators<Backend>::subnetwork_weight));           \
  m.impl("subnetwork_weight_grad", TORCH_BOX(&Operators<Backend>::subnetwork_weight_grad)); \
  m.impl("embedding", TORCH_BOX(&Operators<Backend>::embedding));                           \
  m.impl("sgd_step", TORCH_BOX(&Operators<Backend>::sgd_step));                             \
  m.impl("adam_step", TORCH_BOX(&Operators<Backend>::adam_step))

}  // namespace partkernels::binding
