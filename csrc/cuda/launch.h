// The host's interface to the CUDA runtime and driver: the device, tensor maps and launches. Errors become a Status.
#pragma once

#include "intrinsics.h"

namespace partkernels::cuda {

#if defined(PARTKERNELS_WITHOUT_HOPPER)
constexpr bool kHasHopper = false;
#else
constexpr bool kHasHopper = true;
#endif

struct Device {
  int major, minor, multiprocessors;
  int shared_memory;  // per block, in bytes

  bool is_hopper() const { return kHasHopper && major == 9 && minor == 0; }
};

struct Launch {
  int blocks, threads;
  int shared_bytes = 0;
};

// A box of a row-major matrix for the copy engine.
struct Box {
  const void* data;
  int64_t rows, cols, row_bytes;
  int entry_bytes;  // 1 or 2
  int box_rows, box_cols;
  bool is_swizzled;
};

}  // namespace partkernels::cuda

#if defined(__CUDACC__)

namespace partkernels::cuda {

inline Status status_of(cudaError_t error) {
  return error == cudaSuccess ? Status{} : Status{Code::failed, cudaGetErrorString(error)};
}

Status current_device(Device* device);
Status make_map(const Box& box, TensorMap* map);

template <class... Parameters>
Status launch(void (*kernel)(Parameters...), const Launch& how, Stream stream, const Parameters&... arguments) {
  if (how.shared_bytes > 48 << 10) {
    const Status raised =
        status_of(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, how.shared_bytes));
    if (!raised) return raised;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(how.blocks));
  config.blockDim = dim3(static_cast<unsigned>(how.threads));
  config.dynamicSmemBytes = static_cast<size_t>(how.shared_bytes);
  config.stream = stream;
  return status_of(cudaLaunchKernelEx(&config, kernel, arguments...));
}

}  // namespace partkernels::cuda

#else

namespace partkernels::cuda {

inline Status current_device(Device* device) {
  const emulated::Options& chosen = emulated::options;
  *device = {chosen.major, chosen.minor, chosen.multiprocessors, chosen.shared_memory};
  return {};
}

inline Status make_map(const Box& box, TensorMap* map) {
  *map = {static_cast<const char*>(box.data),
          box.rows,
          box.cols,
          box.row_bytes,
          box.entry_bytes,
          box.box_rows,
          box.box_cols,
          box.is_swizzled};
  if (!emulated::takes_map(*map)) return {Code::failed, "the driver could not make a tensor map of an operand"};
  return {};
}

template <class... Parameters>
Status launch(void (*kernel)(Parameters...), const Launch& how, Stream, const Parameters&... arguments) {
  emulated::run(how.blocks, how.threads, how.shared_bytes, [&] { kernel(arguments...); });
  return {};
}

}  // namespace partkernels::cuda

#endif
