// linear and its gradients: which kernel computes what.
#include <algorithm>
#include <initializer_list>

#include "products.h"

namespace partkernels::cuda {

namespace {

template <class T>
Operand<T> operand(const Matrix<const T>& m) {
  return {m.data, m.row_stride, m.col_stride, static_cast<int>(m.rows), static_cast<int>(m.cols)};
}

template <class T>
Operand<T> operand(const Weight<const T>& w, const Weight<const T>& shape) {
  return {w.data, w.row_stride, w.in_stride, static_cast<int>(shape.rows), static_cast<int>(shape.in)};
}

template <class T>
Product<T> product(const Operand<T>& left, const Rebuilt<T>& weight, const Matrix<T>& out) {
  return {.left = left,
          .weight = weight,
          .out = out.data,
          .row_stride = out.row_stride,
          .col_stride = out.col_stride,
          .down = static_cast<int>(out.rows),
          .across = static_cast<int>(out.cols),
          .terms = left.cols};
}

template <class T>
Rebuilt<T> rebuilt(const Subnetwork<T>& w) {
  return {operand(w.weight, w.weight),
          operand(w.stored, w.weight),
          w.owners.map,
          w.owners.row_bytes,
          w.owners.bits,
          w.active,
          threshold(w.owners.bits, w.active),
          w.defaults};
}

// Tensor cores multiply numbers of 16 bits.
template <Work kWork, class T>
Status run(const Device& device, const Subnetwork<T>& w, const Product<T>& p, Stream stream) {
  if constexpr (sizeof(T) == 2) {
    return run_mma<T, kWork>(device, w, p, stream);
  } else {
    return run_simt<T, kWork>(w, p, stream);
  }
}

template <class T>
bool fits_copies(const Operand<T>& operand) {
  return rows_fit_copies(operand.data, operand.row_stride, operand.col_stride);
}

// Whether both operands fit copies of 16 bytes; of grad_weight w is empty.
template <class T>
bool fits_copies(const Product<T>& p, const Subnetwork<T>& w) {
  const bool reads_stored = w.defaults.kind == DefaultKind::stored && w.active < w.count;
  return fits_copies(p.left) && fits_copies(p.right.data == nullptr ? p.weight.weight : p.right) &&
         (!reads_stored || fits_copies(p.weight.stored));
}

// And whether the copy engine takes them, which knows no stride of 0, and the result in whole parts of 16 bytes.
template <class T>
bool fits_copy_engine(const Device& device, const Product<T>& p, const Subnetwork<T>& w) {
  const auto has_rows = [](const Operand<T>& of) { return of.row_stride > 0; };
  return device.is_hopper() && p.terms > 0 && fits_copies(p, w) && has_rows(p.left) &&
         has_rows(p.right.data == nullptr ? p.weight.weight : p.right) && p.across % 8 == 0 &&
         rows_fit_copies(p.out, p.row_stride, p.col_stride) && p.row_stride > 0;
}

// The current device, if there are kernels for it and for these sizes.
Status served_device(Device* device, std::initializer_list<int64_t> sizes) {
  if (std::max(sizes) >= int64_t{1} << 31) {
    return {Code::no_kernel, "the CUDA kernels multiply matrices of fewer than 2^31 rows and columns; split the batch"};
  }
  if (const Status status = current_device(device); !status) return status;
  if (device->major >= 8) return {};
  return {
      Code::no_kernel,
      "this GPU is older than compute capability 8.0, which the CUDA kernels need; the backend reference runs on it"};
}

}  // namespace

template <class T>
Status linear(Matrix<const T> x, const Subnetwork<T>& w, const T* bias, Matrix<T> y, Stream stream) {
  Device device;
  if (const Status status = served_device(&device, {y.rows, y.cols, x.cols}); !status) return status;
  if (y.rows == 0 || y.cols == 0) return {};
  Product<T> p = product(operand(x), rebuilt(w), y);
  p.bias = bias;
  if constexpr (sizeof(T) == 2) {
    if (x.rows <= kFewRows && fits_copies(p, w)) return run_few_rows(device, w, p, stream);
  }
  if constexpr (kHasHopper && sizeof(T) == 2) {
    if (fits_copy_engine(device, p, w)) return run_hopper_linear(device, w, p, stream);
  }
  return run<Work::forward>(device, w, p, stream);
}

template <class T>
Status linear_grad_input(Matrix<const T> grad_y, const Subnetwork<T>& w, Matrix<T> grad_x, Stream stream) {
  Device device;
  if (const Status status = served_device(&device, {grad_x.rows, grad_x.cols, grad_y.cols}); !status) return status;
  if (grad_x.rows == 0 || grad_x.cols == 0) return {};
  const Product<T> p = product(operand(grad_y), rebuilt(w), grad_x);
  if constexpr (kHasHopper && sizeof(T) == 2) {
    if (fits_copy_engine(device, p, w)) return run_hopper_grad_input(device, w, p, stream);
  }
  return run<Work::grad_input>(device, w, p, stream);
}

template <class T>
Status linear_grad_weight(Matrix<const T> grad_y, Matrix<const T> x, Owners owners, int update, Weight<T> grad_w,
                          Stream stream) {
  Device device;
  if (const Status status = served_device(&device, {x.rows, grad_w.rows, grad_w.in}); !status) return status;
  if (grad_w.rows == 0 || grad_w.in == 0) return {};
  const Rebuilt<T> map{.map = owners.map, .row_bytes = owners.row_bytes, .bits = owners.bits};
  Product<T> p =
      product(operand(grad_y), map, {grad_w.data, grad_w.rows, grad_w.in, grad_w.row_stride, grad_w.in_stride});
  p.right = operand(x);
  p.terms = p.right.rows;
  p.update = update;
  const Subnetwork<T> none = {};
  if constexpr (kHasHopper && sizeof(T) == 2) {
    if (fits_copy_engine(device, p, none)) return run_hopper_grad_weight(device, p, stream);
  }
  return run<Work::grad_weight>(device, none, p, stream);
}

#define PARTKERNELS_INSTANTIATE(T)                                                             \
  template Status linear(Matrix<const T>, const Subnetwork<T>&, const T*, Matrix<T>, Stream);  \
  template Status linear_grad_input(Matrix<const T>, const Subnetwork<T>&, Matrix<T>, Stream); \
  template Status linear_grad_weight(Matrix<const T>, Matrix<const T>, Owners, int, Weight<T>, Stream);
PARTKERNELS_INSTANTIATE(float)
PARTKERNELS_INSTANTIATE(double)
PARTKERNELS_INSTANTIATE(bfloat16)
PARTKERNELS_INSTANTIATE(float16)

}  // namespace partkernels::cuda
