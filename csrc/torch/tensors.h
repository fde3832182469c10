// PyTorch tensors as operands of the kernels: pointers, sizes and strides.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/shim_utils.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "partkernels/operands.h"
#include "partkernels/packed_map.h"

// Defined since PyTorch 2.13; null before.
extern "C" const char* torch_exception_get_what_without_backtrace();
#pragma weak torch_exception_get_what_without_backtrace

namespace partkernels::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Sizes = std::vector<int64_t>;
// The partition for which autograd needs the weight's gradient: an argument of the products, which do not depend on it.
using Update = std::optional<int64_t>;

// Throws PyTorch's error message if one of its functions failed.
inline void check(AOTITorchError code) {
  if (code == AOTI_TORCH_SUCCESS) return;
  const bool is_told = torch_exception_get_what_without_backtrace != nullptr;
  throw std::runtime_error(is_told ? torch_exception_get_what_without_backtrace()
                                   : "PyTorch refused these tensors, or ran out of memory; it wrote why to stderr");
}

// A schema's `str` argument, which can be read once. As a std::string, PyTorch (up to 2.13) leaks it in each call, and
// the leaked pieces prevent the memory around them from being reused: megabytes after thousands of calls.
class Word {
 public:
  operator std::string() const {
    size_t length;
    const char* letters;
    check(torch_string_length(handle_, &length));
    check(torch_string_c_str(handle_, &letters));
    std::string text(letters, length);
    check(torch_delete_string(handle_));
    return text;
  }

 private:
  StringHandle handle_;
};

// Calls use(T{}) with the C++ type of a dtype.
template <class Use>
void with_type(ScalarType dtype, const Use& use) {
  switch (dtype) {
    case ScalarType::Float:
      return use(float{});
    case ScalarType::Double:
      return use(double{});
    case ScalarType::BFloat16:
      return use(bfloat16{});
    default:
      STD_TORCH_CHECK(false, "dtype ", static_cast<int>(dtype), "; expected float32, float64 or bfloat16");
  }
}

inline Sizes sizes_of(const Tensor& tensor) { return {tensor.sizes().begin(), tensor.sizes().end()}; }

inline int32_t dtype_of(const Tensor& tensor) {
  int32_t dtype;
  check(aoti_torch_get_dtype(tensor.get(), &dtype));
  return dtype;
}

inline int32_t device_type_of(const Tensor& tensor) {
  int32_t type;
  check(aoti_torch_get_device_type(tensor.get(), &type));
  return type;
}

// Checks the storage's size: programs that shard or offload may have freed a tensor's storage.
template <class T>
T* data(const Tensor& tensor) {
  int64_t end = tensor.storage_offset() + 1, bytes;
  for (int64_t d = 0; d < tensor.dim(); ++d) end += (tensor.size(d) - 1) * tensor.stride(d);
  check(aoti_torch_get_storage_size(tensor.get(), &bytes));
  STD_TORCH_CHECK(tensor.numel() == 0 || end * static_cast<int64_t>(sizeof(T)) <= bytes, "a tensor of ", end,
                  " entries has a storage of ", bytes, " bytes, less than it needs; restore its storage.");
  return static_cast<T*>(tensor.data_ptr());
}

// The strides of a contiguous tensor, or of one of 4 dimensions in channels_last.
inline Sizes dense_strides(const Sizes& sizes, bool channels_last = false) {
  if (channels_last) return {sizes[1] * sizes[2] * sizes[3], 1, sizes[1] * sizes[3], sizes[1]};
  Sizes strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0; stride *= std::max<int64_t>(sizes[d], 1)) strides[d] = stride;
  return strides;
}

// An uninitialised tensor with another tensor's dtype and device.
inline Tensor empty(const Sizes& sizes, const Tensor& like, bool channels_last = false) {
  const Sizes strides = dense_strides(sizes, channels_last);
  AtenTensorHandle handle;
  check(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype_of(like),
                                 device_type_of(like), like.get_device_index(), &handle));
  return Tensor(handle);
}

// A tensor over memory that it does not own, with another tensor's dtype and device.
inline Tensor borrowed(void* data, const Sizes& sizes, const Sizes& strides, const Tensor& like) {
  AtenTensorHandle handle;
  check(aoti_torch_create_tensor_from_blob(data, static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), 0,
                                           dtype_of(like), device_type_of(like), like.get_device_index(), &handle));
  return Tensor(handle);
}

// The tensor itself if it is contiguous, otherwise a contiguous copy.
inline Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

inline OptionalTensor dense(const OptionalTensor& tensor) { return tensor ? dense(*tensor) : tensor; }

// Whether images are contiguous in the order batch, height, width, channels. They may be contiguous in the default
// order too.
inline bool is_channels_last(const Tensor& images) {
  int64_t stride = 1;
  for (const int d : {1, 3, 2, 0}) {
    if (images.size(d) == 1) continue;
    if (images.stride(d) != stride) return false;
    stride *= images.size(d);
  }
  return true;
}

// Whether the output of a convolution should be channels_last, by the same rule as in torch's convolution.
inline bool prefers_channels_last(const Tensor& images) { return !images.is_contiguous() && is_channels_last(images); }

inline Tensor in_format(const Tensor& images, bool channels_last) {
  if (!channels_last) return dense(images);
  return is_channels_last(images) ? images
                                  : torch::stable::contiguous(images, torch::headeronly::MemoryFormat::ChannelsLast);
}

inline Sizes with_last(const Tensor& x, int64_t size) {
  Sizes sizes = sizes_of(x);
  sizes.back() = size;
  return sizes;
}

struct Dimension {
  int64_t size, stride;
};

// Dimensions [begin, end) of a tensor as one dimension, if their strides allow it.
inline std::optional<Dimension> collapsed(const Tensor& x, int64_t begin, int64_t end) {
  const bool is_empty = x.numel() == 0;  // then strides are irrelevant
  Dimension all{1, 0};
  for (int64_t d = end; d-- > begin;) {
    if (x.size(d) == 1) continue;
    if (all.size == 1) {
      all.stride = x.stride(d);
    } else if (!is_empty && x.stride(d) != all.size * all.stride) {
      return std::nullopt;
    }
    all.size *= x.size(d);
  }
  return all;
}

// x [..., features] itself if its leading dimensions collapse into one, otherwise a copy.
inline Tensor collapsible(const Tensor& x) { return collapsed(x, 0, x.dim() - 1) ? x : torch::stable::contiguous(x); }

// A collapsible x [..., features] as a matrix.
template <class T>
Matrix<T> matrix(const Tensor& x) {
  const int64_t last = x.dim() - 1;
  const Dimension rows = *collapsed(x, 0, last);
  return {data<T>(x), rows.size, x.size(last), rows.stride, x.stride(last)};
}

// A weight of any number of dimensions, reshaped to at most 4 with its columns in the same order: a view if possible,
// otherwise a copy.
inline Tensor of_4_dimensions(const Tensor& w) {
  if (w.dim() <= 4) return w;
  int64_t height = 1;
  for (int64_t d = 2; d + 1 < w.dim(); ++d) height *= w.size(d);
  return torch::stable::reshape(w, Sizes{w.size(0), w.size(1), height, w.size(w.dim() - 1)});
}

// Copies the result of of_4_dimensions back into the tensor if it was a copy.
inline void write_back(Tensor tensor, const Tensor& view) {
  if (view.data_ptr() != tensor.data_ptr()) {
    torch::stable::copy_(tensor, torch::stable::reshape(view, tensor.sizes()));
  }
}

// A tensor of at most 4 dimensions as a weight; a vector is one column.
template <class T>
Weight<T> weight_of(const Tensor& w) {
  const auto size = [&](int64_t d) { return d < w.dim() ? w.size(d) : 1; };
  const auto stride = [&](int64_t d) { return d < w.dim() ? w.stride(d) : 0; };
  return {data<T>(w), size(0), size(1), size(2), size(3), stride(0), stride(1), stride(2), stride(3)};
}

// The map of a weight of these sizes, on the device of `on`. The Python operators have already checked their Partition.
// This check is for callers of the registered operators and for maps that were emptied since: without it, memory
// outside of the map could be read.
inline Owners owners_of(const Tensor& map, int64_t count, const Sizes& weight, const Tensor& on) {
  const int bits = bits_for(static_cast<int>(count));
  int64_t rows = weight.empty() ? 0 : weight[0], cols = 1;
  for (size_t d = 1; d < weight.size(); ++d) cols *= weight[d];
  const bool fits = map.dim() == 2 && map.scalar_type() == ScalarType::Byte && map.stride(1) == 1 &&
                    map.size(0) >= rows && map.size(1) * 8 >= cols * bits &&
                    (rows < 2 || map.stride(0) == 0 || map.stride(0) >= row_bytes(cols, bits)) &&
                    device_type_of(map) == device_type_of(on);
  STD_TORCH_CHECK(fits, "this map does not fit a weight of ", rows, " rows of ", cols, " entries for ", count,
                  " partitions; expected a contiguous uint8 tensor [", rows, ", ", row_bytes(cols, bits),
                  "] on the weight's device, such as Partition.map.");
  return {data<const uint8_t>(map), map.stride(0), bits};
}

template <class T>
const T* bias_data(const OptionalTensor& bias) {
  return bias ? data<const T>(*bias) : nullptr;
}

// A partition as arguments of an operator, in the order of PARTITION in partkernels/operators.
struct Partition {
  Tensor map;
  OptionalTensor stored;
  int64_t count;
  std::string kind;
  double step;
  int64_t seed, stream, row, col;

  template <class T>
  Subnetwork<T> subnetwork(const Tensor& weight, int64_t active) const {
    const DefaultKind kind_of = kind == "uniform"  ? DefaultKind::uniform
                                : kind == "normal" ? DefaultKind::normal
                                : kind == "stored" ? DefaultKind::stored
                                                   : DefaultKind::zeros;
    const Sizes sizes = sizes_of(weight);
    const bool fits = kind_of != DefaultKind::stored ||
                      (stored && sizes_of(*stored) == sizes && stored->scalar_type() == weight.scalar_type() &&
                       device_type_of(*stored) == device_type_of(weight));
    STD_TORCH_CHECK(fits, "stored defaults need a tensor of the weight's shape, dtype and device.");
    return {weight_of<const T>(weight),
            owners_of(map, count, sizes, weight),
            static_cast<int>(count),
            static_cast<int>(active),
            {kind_of, static_cast<float>(step), static_cast<uint64_t>(seed), static_cast<uint64_t>(stream), row, col},
            stored ? weight_of<const T>(*stored) : Weight<const T>{}};
  }
};

}  // namespace partkernels::binding
