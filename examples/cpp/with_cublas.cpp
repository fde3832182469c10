// Products that partkernels::cuda does not have, computed with its passes and cuBLAS: a float32 layer of subnetwork 2
// of 3, and the gradient of its weight for one partition.
//
// The forward rebuilds rows of w_2 in a workspace that stays in the second-level cache, and multiplies with them. The
// gradient is computed by cuBLAS; its entries in other partitions are then set to 0.
#include <cublas_v2.h>
#include <partkernels/cpu.h>
#include <partkernels/packed_map.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "device.h"

namespace pk = partkernels;

namespace {

void check(cublasStatus_t status) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  std::fprintf(stderr, "cuBLAS: %s\n", cublasGetStatusString(status));
  std::exit(1);
}

void expect(float found, double expected) {
  if (std::abs(found - expected) <= 1e-4 * (1 + std::abs(expected))) return;
  std::fprintf(stderr, "%g, not %g\n", found, expected);
  std::exit(1);
}

}  // namespace

int main() {
  if (!has_gpu()) return 77;

  constexpr int kBatch = 32, kIn = 512, kOut = 256, kCount = 3, kActive = 2, kSlice = 100;
  std::vector<float> x(kBatch * kIn), weight(kOut * kIn), grad_y(kBatch * kOut);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = 0.05f * std::cos(static_cast<float>(i));
  for (size_t i = 0; i < grad_y.size(); ++i) grad_y[i] = std::cos(static_cast<float>(3 * i));
  const int bits = pk::bits_for(kCount);
  const int64_t row_bytes = pk::row_bytes(kIn, bits), tenth = kOut * kIn / 10;
  std::vector<uint8_t> map(kOut * row_bytes);
  const pk::cpu::ParallelFor parallel_for = [](int64_t count, const pk::cpu::Body& body) { body(0, count); };
  pk::cpu::random_map(kOut, kIn, {kOut * kIn - 2 * tenth, tenth, tenth}, /*seed=*/1, map.data(), parallel_for);
  const pk::Defaults defaults = {
      .kind = pk::DefaultKind::uniform, .step = pk::round_to_bfloat16(static_cast<float>(0.05 / 127.5)), .seed = 2};

  float *const gpu_x = to_gpu(x), *const gpu_weight = to_gpu(weight), *const gpu_grad_y = to_gpu(grad_y);
  float* const gpu_y = to_gpu(grad_y);
  float* const gpu_grad_w = to_gpu(weight);
  float* const slice = to_gpu(std::vector<float>(kSlice * kIn));
  uint8_t* const gpu_map = to_gpu(map);
  const pk::Owners owners = {gpu_map, row_bytes, bits};
  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream));
  cublasHandle_t cublas = nullptr;
  check(cublasCreate(&cublas));
  check(cublasSetStream(cublas, stream));
  const float one = 1, zero = 0;

  // y = x w_2^T. cuBLAS's matrices are column-major, the transposes of the row-major ones here.
  const pk::Subnetwork<float> subnetwork = {
      {gpu_weight, kOut, kIn, 1, 1, kIn, 1, 0, 0}, owners, kCount, kActive, defaults, /*stored=*/{}};
  for (int first = 0; first < kOut; first += kSlice) {
    const int rows = std::min(kSlice, kOut - first);
    check(pk::cuda::subnetwork_weight<float>(subnetwork, first, 0, {slice, rows, kIn, 1, 1, kIn, 1, 0, 0}, stream));
    check(cublasSgemm(cublas, CUBLAS_OP_T, CUBLAS_OP_N, rows, kBatch, kIn, &one, slice, kIn, gpu_x, kIn, &zero,
                      gpu_y + first, kOut));
  }

  // grad_w = grad_y^T x at the entries of partition 2, in place.
  check(cublasSgemm(cublas, CUBLAS_OP_N, CUBLAS_OP_T, kIn, kOut, kBatch, &one, gpu_x, kIn, gpu_grad_y, kOut, &zero,
                    gpu_grad_w, kIn));
  const pk::Weight<float> grad = {gpu_grad_w, kOut, kIn, 1, 1, kIn, 1, 0, 0};
  check(pk::cuda::subnetwork_weight_grad<float>({gpu_grad_w, kOut, kIn, 1, 1, kIn, 1, 0, 0}, owners, kActive, kActive,
                                                grad, stream));
  check(cudaStreamSynchronize(stream));

  // Compares with the definition.
  const std::vector<float> y = to_host(gpu_y, kBatch * kOut), grad_w = to_host(gpu_grad_w, kOut * kIn);
  for (int out = 0; out < kOut; ++out) {
    const auto partition = [&](int in) { return 1 + pk::id_at(map.data() + out * row_bytes, in, bits); };
    for (int b = 0; b < kBatch; ++b) {
      double sum = 0;
      for (int in = 0; in < kIn; ++in) {
        const bool live = partition(in) <= kActive;
        sum += x[b * kIn + in] * (live ? weight[out * kIn + in] : pk::default_value(defaults, out, in));
      }
      expect(y[b * kOut + out], sum);
    }
    for (int in = 0; in < kIn; ++in) {
      double sum = 0;
      for (int b = 0; b < kBatch; ++b) sum += grad_y[b * kOut + out] * x[b * kIn + in];
      expect(grad_w[out * kIn + in], partition(in) == kActive ? sum : 0);
    }
  }
  check(cublasDestroy(cublas));
  check(cudaStreamDestroy(stream));
  for (void* memory : {(void*)gpu_x, (void*)gpu_weight, (void*)gpu_grad_y, (void*)gpu_y, (void*)gpu_grad_w,
                       (void*)slice, (void*)gpu_map}) {
    check(cudaFree(memory));
  }
  std::printf("y = x w_2^T and the gradient of w's second partition, with cuBLAS: as defined\n");
}
