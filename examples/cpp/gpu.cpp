// The layer of main.cpp on a GPU, in bfloat16, compared with the CPU. The same seeds give the same subnetwork on both.
#include <cuda_runtime.h>
#include <partkernels/cpu.h>
#include <partkernels/cuda.h>
#include <partkernels/packed_map.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "device.h"

namespace pk = partkernels;

int main() {
  if (!has_gpu()) return 77;

  constexpr int64_t kBatch = 16, kIn = 512, kOut = 256, kTenth = kOut * kIn / 10;
  std::vector<pk::bfloat16> x(kBatch * kIn), weight(kOut * kIn), expected(kBatch * kOut), y(kBatch * kOut);
  for (size_t i = 0; i < x.size(); ++i) x[i] = pk::to_bfloat16(std::sin(static_cast<float>(i)));
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = pk::to_bfloat16(0.05f * std::cos(static_cast<float>(i)));
  const int bits = pk::bits_for(3);
  std::vector<uint8_t> map(kOut * pk::row_bytes(kIn, bits));
  const pk::cpu::ParallelFor parallel_for = [](int64_t count, const pk::cpu::Body& body) { body(0, count); };
  pk::cpu::random_map(kOut, kIn, {kOut * kIn - 2 * kTenth, kTenth, kTenth}, /*seed=*/1, map.data(), parallel_for);

  const pk::Defaults defaults = {
      .kind = pk::DefaultKind::uniform, .step = pk::round_to_bfloat16(static_cast<float>(0.05 / 127.5)), .seed = 2};

  // The same description for the host and the GPU, with pointers to the memory of either.
  const auto subnetwork = [&](const pk::bfloat16* weight, const uint8_t* map) {
    const pk::Weight<const pk::bfloat16> entries = {weight, kOut, kIn, 1, 1, kIn, 1, 0, 0};
    return pk::Subnetwork<pk::bfloat16>{entries, {map, pk::row_bytes(kIn, bits), bits}, 3, 2, defaults, {}};
  };
  pk::cpu::linear<pk::bfloat16>({x.data(), kBatch, kIn, kIn, 1}, subnetwork(weight.data(), map.data()),
                                /*bias=*/nullptr, {expected.data(), kBatch, kOut, kOut, 1}, parallel_for);

  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream));
  pk::bfloat16 *const gpu_x = to_gpu(x), *const gpu_weight = to_gpu(weight), *const gpu_y = to_gpu(y);
  uint8_t* const gpu_map = to_gpu(map);
  const pk::cuda::Status status =
      pk::cuda::linear<pk::bfloat16>({gpu_x, kBatch, kIn, kIn, 1}, subnetwork(gpu_weight, gpu_map),
                                     /*bias=*/nullptr, {gpu_y, kBatch, kOut, kOut, 1}, stream);
  check(status);
  check(cudaMemcpyAsync(y.data(), gpu_y, y.size() * sizeof(pk::bfloat16), cudaMemcpyDeviceToHost, stream));
  check(cudaStreamSynchronize(stream));
  check(cudaFree(gpu_x));
  check(cudaFree(gpu_weight));
  check(cudaFree(gpu_y));
  check(cudaFree(gpu_map));
  check(cudaStreamDestroy(stream));

  // Both accumulate in float32, in different orders, and round once: they differ by at most a unit in the last place.
  for (size_t i = 0; i < y.size(); ++i) {
    const float here = pk::to_float(y[i]), there = pk::to_float(expected[i]);
    if (!(std::abs(here - there) <= std::abs(there) / 128 + 1e-4f)) {
      std::fprintf(stderr, "y[%zu] is %g on the GPU and %g on the CPU\n", i, here, there);
      return 1;
    }
  }
  std::printf("y = x w_2^T on the GPU: as on the CPU\n");
}
