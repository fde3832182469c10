#include "launch.h"

namespace partkernels::cuda {

Status current_device(Device* device) {
  int index = 0;
  Status status = status_of(cudaGetDevice(&index));
  const auto read = [&](cudaDeviceAttr attribute, int* value) {
    if (status) status = status_of(cudaDeviceGetAttribute(value, attribute, index));
  };
  read(cudaDevAttrComputeCapabilityMajor, &device->major);
  read(cudaDevAttrComputeCapabilityMinor, &device->minor);
  read(cudaDevAttrMultiProcessorCount, &device->multiprocessors);
  read(cudaDevAttrMaxSharedMemoryPerBlockOptin, &device->shared_memory);
  return status;
}

Status make_map(const Box& box, TensorMap* map) {
  // The function comes from the driver, through the runtime: a program linked to the driver does not start on a machine
  // without one.
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static Encode encode = nullptr;
  if (encode == nullptr) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const Status status = status_of(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
    if (!status) return status;
    if (result != cudaDriverEntryPointSuccess)
      return {Code::failed, "the driver has no cuTensorMapEncodeTiled; update it"};
    encode = reinterpret_cast<Encode>(found);
  }
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(box.cols), static_cast<cuuint64_t>(box.rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(box.row_bytes)};
  const cuuint32_t sides[2] = {static_cast<cuuint32_t>(box.box_cols), static_cast<cuuint32_t>(box.box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result =
      encode(map, box.entry_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16, 2,
             const_cast<void*>(box.data), sizes, strides, sides, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             box.is_swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return {Code::failed, "the driver could not make a tensor map of an operand"};
  return {};
}

}  // namespace partkernels::cuda
