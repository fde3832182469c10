// The stream that PyTorch uses on a GPU, found at run time.
//
// The same library works with PyTorch built with and without CUDA, so it links to libtorch_cpu only. Python loads
// libtorch_cuda in a scope that the linker does not search for other libraries' symbols, so a weak symbol would stay
// null.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

namespace partkernels::binding {

using CurrentStream = decltype(&aoti_torch_get_current_cuda_stream);

inline CurrentStream find_current_stream() {
  constexpr const char* kName = "aoti_torch_get_current_cuda_stream";
  void* found = dlsym(RTLD_DEFAULT, kName);
  if (found == nullptr) {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    if (library != nullptr) found = dlsym(library, kName);
  }
  STD_TORCH_CHECK(found != nullptr, "partkernels found no CUDA in this PyTorch: ", kName,
                  " is not in any of the loaded libraries.");
  return reinterpret_cast<CurrentStream>(found);
}

inline void* current_stream(int32_t device) {
  static const CurrentStream get = find_current_stream();
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(get(device, &stream));
  return stream;
}

}  // namespace partkernels::binding
