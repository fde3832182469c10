// partkernels_numpy._library: the C++ library's functions on numpy arrays. The GIL is released while they run.
#include "arrays.h"

namespace partkernels::numpy {
namespace {

// Calls a kernel without the GIL. All of its arguments are views, so it touches no Python object.
//
// The GIL is acquired by a statement, not by a destructor: if the interpreter has exited meanwhile, acquiring it ends
// the thread, which in a destructor would abort the process.
template <class Kernel, class... Arguments>
void run(Kernel kernel, const Arguments&... arguments) {
  PyThreadState* const state = PyEval_SaveThread();
  std::exception_ptr error;
  try {
    kernel(arguments...);
  } catch (...) {
    error = std::current_exception();
  }
  PyEval_RestoreThread(state);
  if (error) std::rethrow_exception(error);
}

void linear(const Array& x, const Array& weight, const OptionalArray& bias, const Partition& partition, int active,
            const Array& y) {
  with_type(weight, [&]<class T>(T) {
    run(cpu::linear<T>, matrix<const T>(x), partition.subnetwork<T>(weight, active), bias_data<T>(bias), matrix<T>(y),
        threads_for_products(y.size() * weight.shape(1)));
  });
}

void linear_grad_input(const Array& grad_y, const Array& weight, const Partition& partition, int active,
                       const Array& grad_x) {
  with_type(weight, [&]<class T>(T) {
    run(cpu::linear_grad_input<T>, matrix<const T>(grad_y), partition.subnetwork<T>(weight, active), matrix<T>(grad_x),
        threads_for_products(grad_x.size() * weight.shape(0)));
  });
}

void linear_grad_weight(const Array& grad_y, const Array& x, const Partition& partition, int update,
                        const Array& grad_w) {
  with_type(x, [&]<class T>(T) {
    run(cpu::linear_grad_weight<T>, matrix<const T>(grad_y), matrix<const T>(x), partition.owners(), update,
        weight_of<T>(grad_w), threads_for_products(grad_y.size() * x.shape(1)));
  });
}

// Stride, padding and dilation of both dimensions.
using Geometry = std::array<std::array<int64_t, 2>, 3>;

cpu::Convolution convolution(const Geometry& geometry, int64_t groups) {
  const auto& [stride, padding, dilation] = geometry;
  return {{stride[0], stride[1]}, {padding[0], padding[1]}, {dilation[0], dilation[1]}, groups};
}

// Each entry of the output is multiplied with a row of the weight.
cpu::ParallelFor threads_for_convolution(const Array& output, const Array& weight) {
  return threads_for_products(output.size() * (weight.size() / std::max<int64_t>(weight.shape(0), 1)));
}

void conv2d(const Array& x, const Array& weight, const OptionalArray& bias, const Geometry& geometry, int64_t groups,
            const Partition& partition, int active, const Array& y) {
  with_type(weight, [&]<class T>(T) {
    run(cpu::conv2d<T>, images<const T>(x), partition.subnetwork<T>(weight, active), bias_data<T>(bias),
        convolution(geometry, groups), images<T>(y), threads_for_convolution(y, weight));
  });
}

void conv2d_grad_input(const Array& grad_y, const Array& weight, const Geometry& geometry, int64_t groups,
                       const Partition& partition, int active, const Array& grad_x) {
  with_type(weight, [&]<class T>(T) {
    run(cpu::conv2d_grad_input<T>, images<const T>(grad_y), partition.subnetwork<T>(weight, active),
        convolution(geometry, groups), images<T>(grad_x), threads_for_convolution(grad_y, weight));
  });
}

void conv2d_grad_weight(const Array& grad_y, const Array& x, const Geometry& geometry, int64_t groups,
                        const Partition& partition, int update, const Array& grad_w) {
  with_type(x, [&]<class T>(T) {
    run(cpu::conv2d_grad_weight<T>, images<const T>(grad_y), images<const T>(x), convolution(geometry, groups),
        partition.owners(), update, weight_of<T>(grad_w), threads_for_convolution(grad_y, grad_w));
  });
}

void subnetwork_weight(const Array& weight, const Partition& partition, int active, const Array& out) {
  with_type(weight, [&]<class T>(T) {
    run(cpu::subnetwork_weight<T>, partition.subnetwork<T>(weight, active), int64_t{0}, int64_t{0}, weight_of<T>(out),
        threads_for_entries(out.size()));
  });
}

void subnetwork_weight_grad(const Array& grad, const Partition& partition, int update, const Array& out) {
  with_type(grad, [&]<class T>(T) {
    run(cpu::subnetwork_weight_grad<T>, weight_of<const T>(grad), partition.owners(), update, update, weight_of<T>(out),
        threads_for_entries(out.size()));
  });
}

// The owners for a step; without a partition, every entry is stepped.
Owners owners_of(const Partition* partition) { return partition == nullptr ? Owners{} : partition->owners(); }

void sgd_step(const Array& parameter, const Array& grad, const OptionalArray& momentum_buffer,
              const Partition* partition, int update, double lr, double momentum, double weight_decay, bool nesterov) {
  with_type(parameter, [&]<class T>(T) {
    run(cpu::sgd_step<T>, weight_of<T>(parameter), weight_of<const T>(grad),
        momentum_buffer ? weight_of<T>(*momentum_buffer) : Weight<T>{}, owners_of(partition), update,
        Sgd{lr, momentum, weight_decay, nesterov}, threads_for_entries(parameter.size()));
  });
}

void adam_step(const Array& parameter, const Array& grad, const Array& exp_avg, const Array& exp_avg_sq,
               const Partition* partition, int update, int64_t step, double lr, double beta1, double beta2, double eps,
               double weight_decay, bool decoupled) {
  with_type(parameter, [&]<class T>(T) {
    run(cpu::adam_step<T>, weight_of<T>(parameter), weight_of<const T>(grad), weight_of<T>(exp_avg),
        weight_of<T>(exp_avg_sq), owners_of(partition), update,
        Adam{lr, beta1, beta2, eps, weight_decay, decoupled, step}, threads_for_entries(parameter.size()));
  });
}

void random_map(const Array& map, int64_t cols, const std::vector<int64_t>& sizes, uint64_t seed) {
  run(cpu::random_map, map.shape(0), cols, sizes, seed, data<uint8_t>(map), threads_for_entries(map.shape(0) * cols));
}

Partition partition(const Array& map, int count, const std::string& kind, float step, uint64_t seed, uint64_t stream,
                    const OptionalArray& stored) {
  const DefaultKind kind_of = kind == "uniform"  ? DefaultKind::uniform
                              : kind == "normal" ? DefaultKind::normal
                              : kind == "stored" ? DefaultKind::stored
                                                 : DefaultKind::zeros;
  return {map, map.shape(1), count, {kind_of, step, seed, stream}, stored};
}

PYBIND11_MODULE(_library, m) {
  py::class_<Partition>(m, "Partition").def(py::init(&partition));
  m.def("linear", &linear);
  m.def("linear_grad_input", &linear_grad_input);
  m.def("linear_grad_weight", &linear_grad_weight);
  m.def("conv2d", &conv2d);
  m.def("conv2d_grad_input", &conv2d_grad_input);
  m.def("conv2d_grad_weight", &conv2d_grad_weight);
  m.def("subnetwork_weight", &subnetwork_weight);
  m.def("subnetwork_weight_grad", &subnetwork_weight_grad);
  m.def("sgd_step", &sgd_step);
  m.def("adam_step", &adam_step);
  m.def("random_map", &random_map);
  m.def("round_to_bfloat16", &round_to_bfloat16);
  m.def("instruction_set", &cpu::instruction_set);
  m.def("instruction_sets", [] {
    std::vector<std::pair<std::string, std::string>> sets;
    for (const auto& [name, lacking] : cpu::instruction_sets()) sets.emplace_back(name, lacking);
    return sets;
  });
  m.def("threads", [] { return ThreadPool::here().threads(); });
  m.def("set_threads", [](int threads) { ThreadPool::here().set_threads(threads); });
}

}  // namespace
}  // namespace partkernels::numpy
