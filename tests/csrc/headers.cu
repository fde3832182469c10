// The shared headers as a CUDA kernel uses them: one entry of a subnetwork's weight a thread.
#include "partkernels/bfloat16.h"
#include "partkernels/defaults.h"
#include "partkernels/packed_map.h"
#include "partkernels/philox.h"

__global__ void subnetwork_weight(const float* weight, const uint8_t* map, int64_t cols, int count, int active,
                                  partkernels::Defaults defaults, float* out) {
  const int64_t row = blockIdx.x;
  const int bits = partkernels::bits_for(count);
  const uint8_t* const owners = map + row * partkernels::row_bytes(cols, bits);
  for (int64_t col = threadIdx.x; col < cols; col += blockDim.x) {
    const bool live = partkernels::id_at(owners, col, bits) < active;
    out[row * cols + col] = live ? weight[row * cols + col] : partkernels::default_value(defaults, row, col);
  }
}
