// The CUDA backend for the files in csrc/torch, which are compiled once for each backend and include the backend.h in
// its folder.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "partkernels/cuda.h"
#include "stream.h"
#include "tensors.h"

// Begins the block in which a file registers its kernels: see csrc/torch/cpu/backend.h.
#define PARTKERNELS_KERNELS(m) STABLE_TORCH_LIBRARY_IMPL(partkernels_cuda, CUDA, m)

namespace partkernels::binding {

namespace kernels = partkernels::cuda;

// The tensors' device, and the stream that PyTorch uses on it.
class Device {
 public:
  explicit Device(const Tensor& tensor)
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

  template <class Kernel, class T, class... Arguments>
  void product(Kernel kernel, const Matrix<T>& out, int64_t terms, const Arguments&... arguments) const {
    size_t bytes = 0;
    check(cuda::linear_workspace(out.rows, out.cols, terms, &bytes));
    // Allocated by PyTorch, ordered by the stream.
    OptionalTensor memory;
    if (bytes > 0) memory = empty({static_cast<int64_t>(bytes / sizeof(uint16_t))}, like_);
    check(kernel(arguments..., out, stream_, cuda::Workspace{memory ? memory->data_ptr() : nullptr, bytes}));
  }

  template <class Kernel, class... Arguments>
  void pass(Kernel kernel, int64_t, const Arguments&... arguments) const {
    check(kernel(arguments..., stream_));
  }

 private:
  static void check(const cuda::Status& status) { STD_TORCH_CHECK(static_cast<bool>(status), status.message); }

  torch::stable::accelerator::DeviceGuard guard_;
  Tensor like_;
  cuda::Stream stream_;
};

}  // namespace partkernels::binding
