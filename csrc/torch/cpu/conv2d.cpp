// Convolutions computed by PyTorch: oneDNN's run at the processor's peak, and a weight is small beside its images. A
// subnetwork's weight is rebuilt for them in a workspace of the thread, at most 16 MiB at a time. For the last
// subnetwork, in which all entries are active, the weight itself is used.
//
// All of it is C++ because a convolution leaves nothing in the caches: Python code between its parts took 100 us and
// more.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>

#include "backend.h"
#include "checks.h"

namespace partkernels::binding {

namespace {

struct Geometry {
  Sizes stride, padding, dilation;
  int64_t groups;
};

// Bytes: enough for nearly every layer's whole weight. For each slice of a weight, the images and a part of the output
// are copied into oneDNN's format: on an Intel Xeon, two slices took 1.2 to 1.5 times as long as one.
constexpr int64_t kWorkspace = 16 << 20;
std::atomic<int64_t> most_bytes = kWorkspace;
// oneDNN's convolutions are fastest if numbers of channels are multiples of this; it is also the width of the
// rebuilding kernel's tile.
constexpr int64_t kChannels = 64;
// Up to this number of input channels, and with stride 1, this library's input gradient is two to four times as fast as
// oneDNN's, except for bfloat16 with AMX, where oneDNN takes a third to nine tenths of its time. This is the input
// gradient of a network's first layer: training does not compute it, but every hyperparameter update does.
constexpr int64_t kFewChannels = 4;

// oneDNN is slowest for contiguous images if the number of channels is not a multiple of 8. Converted to channels_last
// first, these numbers of input channels took 0.4 to 0.9 of the time, including the copies. The error is up to 1.4
// times as large in the output, and two thirds as large in the weight's gradient.
bool forward_is_faster_channels_last(int64_t channels, int64_t groups) {
  return groups == 1 && 17 <= channels && channels <= 23;
}

bool grad_weight_is_faster_channels_last(int64_t channels, int64_t groups) {
  return groups == 1 && 9 <= channels && channels <= 23 && channels != 16;
}

// Whether the processor multiplies tiles of bfloat16 numbers (AMX).
bool has_tiles() {
#if defined(__x86_64__)
  static const bool has = [] {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx >> 22 & 1) != 0;
  }();
  return has;
#else
  return false;
#endif
}

// For one dimension of a convolution: whether each output reads a pixel, not only padding, and whether each row (or
// column) of the kernel is multiplied with a pixel for some output.
struct Meeting {
  bool of_outputs = true, of_kernel = true;

  Meeting(int64_t in, int64_t out, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
    // Whether one of the positions first, first + step, ... (`count` positions) is a pixel.
    const auto meets = [in](int64_t first, int64_t step, int64_t count) {
      const int64_t before = first < 0 ? (-first + step - 1) / step : 0;
      return before < count && first + before * step < in;
    };
    for (int64_t i = 0; of_outputs && i < out && i * stride < padding; ++i) {
      of_outputs = meets(i * stride - padding, dilation, kernel);
    }
    if (out > 0) of_outputs = of_outputs && meets((out - 1) * stride - padding, dilation, kernel);
    for (int64_t k = 0; k < kernel; ++k) of_kernel = of_kernel && meets(k * dilation - padding, stride, out);
  }
};

// Whether PyTorch's convolution of images [batch, channels, height, width] might crash or be wrong, so that this
// library's kernel replaces it: docs/torch-faults.md lists the observed faults. Networks rarely use these shapes.
bool torch_may_fail(ScalarType dtype, const Sizes& in, const Sizes& out, const Sizes& kernel,
                    const Geometry& geometry) {
  const auto& [stride, padding, dilation, groups] = geometry;
  if (dtype == ScalarType::Double) return false;
  for (const int d : {0, 1}) {
    const Meeting meeting(in[2 + d], out[2 + d], kernel[d], stride[d], padding[d], dilation[d]);
    if (!meeting.of_outputs || (dtype == ScalarType::BFloat16 && !meeting.of_kernel)) return true;
  }
  if (dtype != ScalarType::BFloat16) return false;
  const auto is_square = [](const Sizes& sizes) { return sizes[0] == sizes[1]; };
  const Sizes ones{1, 1};
  bool is_usual = is_square(kernel) && is_square(stride) && is_square(padding);
  is_usual = is_usual || (!has_tiles() && stride == ones);  // such as 1x7 and 7x1
  for (const int d : {0, 1}) {
    is_usual = is_usual && dilation[d] == 1 && in[2 + d] > 1 && out[2 + d] > 1 &&
               (stride[d] < kernel[d] || padding[d] == 0) &&
               (is_square(kernel) || 2 * padding[d] == kernel[d] - 1 || padding[d] == 0);
  }
  return !is_usual;
}

struct Range {
  int64_t begin, size;
};

// Sets dilation to 1 where the kernel has one row or column: it has no effect there, but PyTorch's gradient would
// depend on it.
Geometry geometry_of(const Sizes& stride, const Sizes& padding, Sizes dilation, int64_t groups, const Sizes& kernel) {
  const bool fits = stride.size() == 2 && padding.size() == 2 && dilation.size() == 2 && kernel.size() == 2 &&
                    std::min({stride[0], stride[1], dilation[0], dilation[1], groups, kernel[0], kernel[1]}) >= 1 &&
                    std::min(padding[0], padding[1]) >= 0;
  STD_TORCH_CHECK(fits,
                  "invalid geometry of a convolution; expected pairs of numbers of at least 1, or 0 for paddings");
  for (const int d : {0, 1}) {
    if (kernel[d] == 1) dilation[d] = 1;
  }
  return {stride, padding, dilation, groups};
}

Sizes kernel_of(const Tensor& weight) {
  STD_TORCH_CHECK(weight.dim() == 4, "the weight has ", weight.dim(), " dimensions; expected 4");
  return {weight.size(2), weight.size(3)};
}

// Whether a subnetwork's weight need not be rebuilt: all entries are active, and PyTorch's convolution takes its memory
// format.
bool is_whole(const Tensor& weight, int64_t active, const Partition& partition) {
  return active == partition.count && (weight.is_contiguous() || is_channels_last(weight)) && most_bytes > 0;
}

// The slices of a weight along a dimension that are rebuilt and convolved one after another; empty if it cannot be
// sliced.
std::vector<Range> slices_of(const Tensor& weight, int64_t dim, int64_t groups, int64_t active,
                             const Partition& partition) {
  const int64_t size = weight.size(dim), bytes = weight.numel() * static_cast<int64_t>(weight.element_size());
  if (bytes <= most_bytes || is_whole(weight, active, partition)) return {{0, size}};
  const int64_t fit = most_bytes * size / bytes;
  if (groups > 1 || fit == 0) return {};
  const int64_t step = fit < kChannels ? fit : fit / kChannels * kChannels;
  std::vector<Range> slices;
  for (int64_t begin = 0; begin < size; begin += step) slices.push_back({begin, std::min(step, size - begin)});
  return slices;
}

Range all(const Tensor& weight, int64_t dim) { return {0, weight.size(dim)}; }

// A buffer that is kept between calls: the first access to new memory costs more than rebuilding a weight in it. It is
// as large as the largest weight, or slice, that the thread has used.
void* workspace(int64_t bytes) {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  thread_local std::unique_ptr<void, Free> memory;
  thread_local int64_t size = 0;
  if (size < bytes) {
    constexpr int64_t kPage = 4096;
    memory.reset();
    size = 0;
    memory.reset(std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage));
    STD_TORCH_CHECK(memory != nullptr, "no memory for a workspace of ", bytes, " bytes");
    size = bytes;
  }
  return memory.get();
}

// w_k[rows, ins], dense: the weight itself, or a copy in this thread's workspace, which the next call overwrites.
Tensor rebuild(const Tensor& weight, Range rows, Range ins, bool channels_last, int64_t active,
               const Partition& partition) {
  if (is_whole(weight, active, partition)) return in_format(weight, channels_last);
  const Sizes sizes{rows.size, ins.size, weight.size(2), weight.size(3)};
  const int64_t bytes = rows.size * ins.size * sizes[2] * sizes[3] * static_cast<int64_t>(weight.element_size());
  Tensor out = borrowed(workspace(bytes), sizes, dense_strides(sizes, channels_last), weight);
  with_type(weight.scalar_type(), [&]<class T>(T) {
    cpu::subnetwork_weight(partition.subnetwork<T>(weight, active), rows.begin, ins.begin, weight_of<T>(out),
                           threads_for_entries(out.numel()));
  });
  return out;
}

// The same, in the weight's own memory format.
Tensor rebuild(const Tensor& weight, Range rows, Range ins, int64_t active, const Partition& partition) {
  return rebuild(weight, rows, ins, prefers_channels_last(weight), active, partition);
}

// A tensor that only provides a size.
Tensor placeholder(const Sizes& sizes, const Tensor& like) {
  static double entry = 0;
  return borrowed(&entry, sizes, Sizes(sizes.size(), 0), like);
}

// Disables autograd: results must not become part of a graph, which would keep the workspace.
class NoGrad {
 public:
  NoGrad() : enabled_(aoti_torch_grad_mode_is_enabled()) { aoti_torch_grad_mode_set_enabled(false); }
  ~NoGrad() { aoti_torch_grad_mode_set_enabled(enabled_); }
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;

 private:
  bool enabled_;
};

constexpr std::array<int64_t, 2> kNoOutputPadding = {0, 0};

Tensor torch_convolution(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Geometry& geometry) {
  const NoGrad no_grad;
  AtenTensorHandle y, bias_handle = bias ? bias->get() : nullptr;
  check(aoti_torch_cpu_convolution(x.get(), weight.get(), bias ? &bias_handle : nullptr, geometry.stride.data(), 2,
                                   geometry.padding.data(), 2, geometry.dilation.data(), 2, false,
                                   kNoOutputPadding.data(), 2, geometry.groups, &y));
  return Tensor(y);
}

enum class Gradient { input, weight };

Tensor torch_convolution_backward(const Tensor& grad_y, const Tensor& x, const Tensor& weight, const Geometry& geometry,
                                  Gradient which) {
  const NoGrad no_grad;
  const std::array<int32_t, 3> mask = {which == Gradient::input, which == Gradient::weight, false};
  AtenTensorHandle handles[3];
  check(aoti_torch_cpu_convolution_backward(grad_y.get(), x.get(), weight.get(), nullptr, 0, geometry.stride.data(), 2,
                                            geometry.padding.data(), 2, geometry.dilation.data(), 2, false,
                                            kNoOutputPadding.data(), 2, geometry.groups, mask.data(), 3, &handles[0],
                                            &handles[1], &handles[2]));
  const Tensor gradients[] = {Tensor(handles[0]), Tensor(handles[1]), Tensor(handles[2])};
  return gradients[which == Gradient::input ? 0 : 1];
}

cpu::Convolution kernels_geometry(const Geometry& geometry) {
  const auto& [stride, padding, dilation, groups] = geometry;
  return {{stride[0], stride[1]}, {padding[0], padding[1]}, {dilation[0], dilation[1]}, groups};
}

// Each entry of the output is multiplied with a row of the weight.
const cpu::ParallelFor& threads_for_convolution(const Tensor& output, const Tensor& weight) {
  return threads_for_products(output.numel() * (weight.numel() / std::max<int64_t>(weight.size(0), 1)));
}

// The output's size for images [batch, in, height, width] and a weight of these sizes.
Sizes output_size(const Sizes& x, const Sizes& weight, const Geometry& geometry) {
  STD_TORCH_CHECK(
      x.size() == 4 && x[1] == weight[1] * geometry.groups && weight[0] % geometry.groups == 0,
      "images and weight differ in their channels; expected [batch, channels, height, width] and [out, channels"
      " / groups, height, width]");
  Sizes sizes{x[0], weight[0]};
  for (const int d : {0, 1}) {
    const int64_t left = x[2 + d] + 2 * geometry.padding[d] - geometry.dilation[d] * (weight[2 + d] - 1) - 1;
    STD_TORCH_CHECK(left >= 0, "the kernel is larger than the padded images");
    sizes.push_back(left / geometry.stride[d] + 1);
  }
  return sizes;
}

void check_output(const Tensor& grad_y, const Tensor& like, const Sizes& sizes) {
  STD_TORCH_CHECK(sizes_of(grad_y) == sizes && alike(grad_y, like),
                  "grad_output differs from the output in shape or dtype");
}

Tensor narrow(const Tensor& tensor, int64_t dim, Range range) {
  Tensor whole = tensor;
  return torch::stable::narrow(whole, dim, range.begin, range.size);
}

void copy(const Tensor& to, const Tensor& from) {
  Tensor destination = to;
  torch::stable::copy_(destination, from);
}

// Sets the maximum number of bytes of a rebuilt weight and returns the previous one, to test larger weights. At 0, all
// convolutions use this library's kernels.
int64_t limit_workspace(int64_t bytes) {
  STD_TORCH_CHECK(0 <= bytes && bytes <= kWorkspace, "limit ", bytes, "; expected 0 to ", kWorkspace, " bytes");
  return most_bytes.exchange(bytes);
}

// x [batch, in, height, width], weight [out, in / groups, height, width]; the bias is dense or absent.
Tensor convolve(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Geometry& geometry,
                int64_t active, const Partition& partition) {
  const std::vector<Range> slices = slices_of(weight, 0, geometry.groups, active, partition);
  const bool channels_last = prefers_channels_last(x);
  const Sizes size = output_size(sizes_of(x), sizes_of(weight), geometry);
  if (slices.empty() || torch_may_fail(x.scalar_type(), sizes_of(x), size, kernel_of(weight), geometry)) {
    const Tensor y = empty(size, x, channels_last);
    with_type(weight.scalar_type(), [&]<class T>(T) {
      cpu::conv2d(images<const T>(x), partition.subnetwork<T>(weight, active), bias_data<T>(bias),
                  kernels_geometry(geometry), images<T>(y), threads_for_convolution(y, weight));
    });
    return y;
  }
  // oneDNN follows the weight's format.
  const bool weight_channels_last =
      prefers_channels_last(weight) || forward_is_faster_channels_last(weight.size(1), geometry.groups);
  const auto convolve_to = [&](Range rows) {
    const Tensor part = rebuild(weight, rows, all(weight, 1), weight_channels_last, active, partition);
    const bool whole = rows.size == weight.size(0);
    return torch_convolution(x, part, bias && !whole ? narrow(*bias, 0, rows) : bias, geometry);
  };
  if (slices.size() == 1) return in_format(convolve_to(slices[0]), channels_last);
  const Tensor y = empty(size, x, channels_last);
  for (const Range rows : slices) copy(narrow(y, 1, rows), convolve_to(rows));
  return y;
}

// input_size is the size of x.
Tensor convolve_grad_input(const Tensor& grad_y, const Tensor& weight, const Sizes& input_size,
                           const Geometry& geometry, int64_t active, const Partition& partition) {
  const std::vector<Range> slices = slices_of(weight, 1, geometry.groups, active, partition);
  const bool channels_last = prefers_channels_last(grad_y);
  const ScalarType dtype = grad_y.scalar_type();
  if (slices.empty() || torch_may_fail(dtype, input_size, sizes_of(grad_y), kernel_of(weight), geometry)) {
    const Tensor grad_x = empty(input_size, grad_y, channels_last);
    with_type(weight.scalar_type(), [&]<class T>(T) {
      cpu::conv2d_grad_input(images<const T>(grad_y), partition.subnetwork<T>(weight, active),
                             kernels_geometry(geometry), images<T>(grad_x), threads_for_convolution(grad_y, weight));
    });
    return grad_x;
  }
  const bool is_few = weight.size(1) <= kFewChannels && geometry.groups == 1 && slices.size() == 1;
  if (is_few && geometry.stride == Sizes{1, 1} && !(dtype == ScalarType::BFloat16 && has_tiles())) {
    const Tensor grad_x = empty(input_size, grad_y, channels_last);
    const Tensor whole = rebuild(weight, all(weight, 0), all(weight, 1), active, partition);
    with_type(weight.scalar_type(), [&]<class T>(T) {
      cpu::few_channels_grad_input(images<const T>(grad_y), weight_of<const T>(whole), kernels_geometry(geometry),
                                   images<T>(grad_x), threads_for_convolution(grad_y, weight));
    });
    return grad_x;
  }
  const auto convolve_to = [&](Range ins) {
    Sizes sizes = input_size;
    sizes[1] = ins.size * geometry.groups;
    const Tensor part = rebuild(weight, all(weight, 0), ins, active, partition);
    return torch_convolution_backward(grad_y, placeholder(sizes, grad_y), part, geometry, Gradient::input);
  };
  if (slices.size() == 1) return in_format(convolve_to(slices[0]), channels_last);
  const Tensor grad_x = empty(input_size, grad_y, channels_last);
  for (const Range ins : slices) copy(narrow(grad_x, 1, ins), convolve_to(ins));
  return grad_x;
}

// The weight's gradient at the entries of partition update, 0 elsewhere; `sizes` is the weight's size.
Tensor convolve_grad_weight(const Tensor& grad_y, const Tensor& x, const Sizes& sizes, const Geometry& geometry,
                            int64_t update, const Tensor& map, int64_t count) {
  const Owners owners = owners_of(map, count, sizes, x);
  const int updated = static_cast<int>(update);
  if (torch_may_fail(x.scalar_type(), sizes_of(x), sizes_of(grad_y), {sizes[2], sizes[3]}, geometry)) {
    const Tensor grad_w = empty(sizes, x);
    with_type(x.scalar_type(), [&]<class T>(T) {
      cpu::conv2d_grad_weight(images<const T>(grad_y), images<const T>(x), kernels_geometry(geometry), owners, updated,
                              weight_of<T>(grad_w), threads_for_convolution(grad_y, grad_w));
    });
    return grad_w;
  }
  const bool faster = grad_weight_is_faster_channels_last(x.size(1), geometry.groups);
  const Tensor whole =
      torch_convolution_backward(faster ? in_format(grad_y, true) : grad_y, faster ? in_format(x, true) : x,
                                 placeholder(sizes, x), geometry, Gradient::weight);
  const Tensor grad_w = whole.is_contiguous() ? whole : empty(sizes, x);
  with_type(x.scalar_type(), [&]<class T>(T) {
    cpu::subnetwork_weight_grad(weight_of<const T>(whole), owners, updated, updated, weight_of<T>(grad_w),
                                threads_for_entries(whole.numel()));
  });
  return grad_w;
}

Tensor conv2d(Tensor x, Tensor weight, OptionalTensor bias, Sizes stride, Sizes padding, Sizes dilation, int64_t groups,
              int64_t active, Update, Tensor map, OptionalTensor stored, int64_t count, Word kind, double step,
              int64_t seed, int64_t stream, int64_t row, int64_t col) {
  const Geometry geometry = geometry_of(stride, padding, dilation, groups, kernel_of(weight));
  STD_TORCH_CHECK(alike(x, weight), "images and weight differ in their dtype or device");
  check_live(1, active, count);
  check_bias(bias, weight.size(0), active, weight);
  return convolve(x, weight, live_bias(bias, active), geometry, active,
                  {map, stored, count, kind, step, seed, stream, row, col});
}

Tensor conv2d_grad_input(Tensor grad_y, Tensor weight, Sizes input_size, Sizes stride, Sizes padding, Sizes dilation,
                         int64_t groups, int64_t active, Update, Tensor map, OptionalTensor stored, int64_t count,
                         Word kind, double step, int64_t seed, int64_t stream, int64_t row, int64_t col) {
  const Geometry geometry = geometry_of(stride, padding, dilation, groups, kernel_of(weight));
  check_live(1, active, count);
  check_output(grad_y, weight, output_size(input_size, sizes_of(weight), geometry));
  return convolve_grad_input(grad_y, weight, input_size, geometry, active,
                             {map, stored, count, kind, step, seed, stream, row, col});
}

Tensor conv2d_grad_weight(Tensor grad_y, Tensor x, Sizes kernel_size, Sizes stride, Sizes padding, Sizes dilation,
                          int64_t groups, int64_t update, Tensor map, int64_t count) {
  const Geometry geometry = geometry_of(stride, padding, dilation, groups, kernel_size);
  check_live(update, update, count);
  STD_TORCH_CHECK(grad_y.dim() == 4 && x.dim() == 4, "expected images [batch, channels, height, width]");
  const Sizes weight{grad_y.size(1), x.size(1) / groups, kernel_size[0], kernel_size[1]};
  check_output(grad_y, x, output_size(sizes_of(x), weight, geometry));
  return convolve_grad_weight(grad_y, x, weight, geometry, update, map, count);
}

STABLE_TORCH_LIBRARY_FRAGMENT(partkernels_cpu, m) { m.def("limit_workspace(int bytes) -> int"); }

STABLE_TORCH_LIBRARY_IMPL(partkernels_cpu, CompositeExplicitAutograd, m) {
  m.impl("limit_workspace", TORCH_BOX(&limit_workspace));
}

PARTKERNELS_KERNELS(m) {
  m.impl("conv2d", TORCH_BOX(&conv2d));
  m.impl("conv2d_grad_input", TORCH_BOX(&conv2d_grad_input));
  m.impl("conv2d_grad_weight", TORCH_BOX(&conv2d_grad_weight));
}

}  // namespace
}  // namespace partkernels::binding
