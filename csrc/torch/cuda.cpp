// The CUDA operators for PyTorch.
#include "partkernels/cuda.h"

#include <torch/csrc/stable/accelerator.h>

#include "cuda_stream.h"
#include "operators.h"

namespace {

using namespace partkernels;
using namespace partkernels::binding;

// The tensors' own device, and the stream that PyTorch uses there.
class Cuda {
 public:
  explicit Cuda(const Tensor& tensor)
      : guard_(tensor.get_device_index()),
        like_(tensor),
        stream_(static_cast<cuda::Stream>(current_stream(tensor.get_device_index()))) {}

  template <class Use>
  static void with_type(ScalarType dtype, const Use& use) {
    if (dtype == ScalarType::Half) {
      use(float16{});
    } else {
      binding::with_type(dtype, use);
    }
  }

  template <class Use>
  static void with_product_type(ScalarType dtype, const Use& use) {
    if (dtype == ScalarType::Half) return use(float16{});
    STD_TORCH_CHECK(dtype == ScalarType::BFloat16, "dtype ", static_cast<int>(dtype),
                    "; the CUDA products serve float16 and bfloat16");
    use(bfloat16{});
  }

  template <class T>
  struct LiveBias {
    OptionalTensor sum;
    const T* data() const { return bias_data<T>(sum); }
  };
  template <class T>
  static LiveBias<T> live_bias(const OptionalTensor& bias, int64_t active) {
    if (!bias || bias->dim() == 1) return {dense(bias)};
    constexpr int64_t kRows = 0;
    Tensor rows = *bias;
    const int64_t dimensions[] = {kRows};
    return {torch::stable::sum(torch::stable::narrow(rows, kRows, 0, active), dimensions)};
  }

  template <class T>
  void linear(Matrix<const T> x, const Subnetwork<T>& w, const T* bias, Matrix<T> y) const {
    const Room room(y.rows, y.cols, x.cols, like_);
    check(cuda::linear(x, w, bias, y, stream_, room.workspace()));
  }
  template <class T>
  void linear_grad_input(Matrix<const T> grad_y, const Subnetwork<T>& w, Matrix<T> grad_x) const {
    const Room room(grad_x.rows, grad_x.cols, grad_y.cols, like_);
    check(cuda::linear_grad_input(grad_y, w, grad_x, stream_, room.workspace()));
  }
  template <class T>
  void subnetwork_weight(const Subnetwork<T>& w, int64_t first_row, int64_t first_in, Weight<T> out) const {
    check(cuda::subnetwork_weight(w, first_row, first_in, out, stream_));
  }
  template <class T>
  void subnetwork_weight_grad(Weight<const T> grad, Owners owners, int first, int last, Weight<T> out) const {
    check(cuda::subnetwork_weight_grad(grad, owners, first, last, out, stream_));
  }
  template <class T>
  void embedding(const int64_t* ids, int64_t count, const Subnetwork<T>& w, T* out) const {
    check(cuda::embedding(ids, count, w, out, stream_));
  }
  template <class T>
  void sgd_step(Weight<T> parameter, Weight<const T> grad, Weight<T> momentum_buffer, const Owners& owners, int update,
                const Sgd& sgd) const {
    check(cuda::sgd_step(parameter, grad, momentum_buffer, owners, update, sgd, stream_));
  }
  template <class T>
  void adam_step(Weight<T> parameter, Weight<const T> grad, Weight<T> exp_avg, Weight<T> exp_avg_sq,
                 const Owners& owners, int update, const Adam& adam) const {
    check(cuda::adam_step(parameter, grad, exp_avg, exp_avg_sq, owners, update, adam, stream_));
  }

 private:
  static void check(const cuda::Status& status) { STD_TORCH_CHECK(static_cast<bool>(status), status.message); }

  // A product's workspace: PyTorch's memory, in the order of the stream.
  class Room {
   public:
    Room(int64_t rows, int64_t cols, int64_t terms, const Tensor& like) {
      check(cuda::linear_workspace(rows, cols, terms, &bytes_));
      if (bytes_ > 0) memory_ = empty({static_cast<int64_t>(bytes_ / sizeof(uint16_t))}, like);
    }
    cuda::Workspace workspace() const { return {memory_ ? memory_->data_ptr() : nullptr, bytes_}; }

   private:
    size_t bytes_ = 0;
    OptionalTensor memory_;
  };

  torch::stable::accelerator::DeviceGuard guard_;
  Tensor like_;
  cuda::Stream stream_;
};

STABLE_TORCH_LIBRARY(partkernels_cuda, m) {
  PARTKERNELS_SCHEMAS(m);
  m.def(
      "subnetwork_weight_out(Tensor(a!) out, Tensor weight, int active, Tensor map, Tensor? stored, int count, str "
      "kind, "
      "float step, int seed, int stream, int row, int col) -> ()");
  m.def("subnetwork_weight_grad_out(Tensor(a!) out, Tensor grad, int first, int last, Tensor map, int count) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(partkernels_cuda, CUDA, m) {
  PARTKERNELS_OPERATORS(m, Cuda);
  m.impl("subnetwork_weight_out", TORCH_BOX(&Operators<Cuda>::subnetwork_weight_out));
  m.impl("subnetwork_weight_grad_out", TORCH_BOX(&Operators<Cuda>::subnetwork_weight_grad_out));
}

}  // namespace
