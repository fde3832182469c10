// Helpers of the GPU examples: errors end the program, and memory is copied to and from the GPU.
#pragma once

#include <cuda_runtime.h>
#include <partkernels/cuda.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

inline void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

inline void check(const partkernels::cuda::Status& status) {
  if (status) return;
  std::fprintf(stderr, "partkernels: %s\n", status.message);
  std::exit(1);
}

inline bool has_gpu() {
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) == cudaSuccess && gpus > 0) return true;
  std::printf("skipped: this machine has no GPU that CUDA can use\n");
  return false;
}

template <class T>
T* to_gpu(const std::vector<T>& host) {
  T* device = nullptr;
  check(cudaMalloc(&device, host.size() * sizeof(T)));
  check(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return device;
}

template <class T>
std::vector<T> to_host(const T* device, size_t size) {
  std::vector<T> host(size);
  check(cudaMemcpy(host.data(), device, size * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}
