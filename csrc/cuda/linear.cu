// linear: chooses the kernel.
#include <algorithm>
#include <initializer_list>

#include "matmul_kernels.h"

namespace partkernels::cuda {

namespace {

// A single row may have any stride; the stride of an aligned copy suits all kernels.
template <class T>
Operand<T> operand(const T* data, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride) {
  const int64_t stride = rows > 1 ? row_stride : (cols + 7) / 8 * 8;
  return {data, stride, cols > 1 ? col_stride : 1, static_cast<int>(rows), static_cast<int>(cols)};
}

template <class T>
Product<T> product(const Matrix<const T>& x, const Subnetwork<T>& w, const Matrix<T>& out, const Workspace& workspace) {
  const auto of = [&](const Weight<const T>& each) {
    return operand(each.data, w.weight.rows, w.weight.in, each.row_stride, each.in_stride);
  };
  const int64_t bytes = out.rows * out.cols * static_cast<int64_t>(sizeof(float));
  return {.left = operand(x.data, x.rows, x.cols, x.row_stride, x.col_stride),
          .weight = {of(w.weight), of(w.stored), w.owners.map, w.owners.row_bytes, w.owners.bits,
                     threshold(w.owners.bits, w.active), w.defaults},
          .out = out.data,
          .row_stride = out.row_stride,
          .col_stride = out.col_stride,
          .down = static_cast<int>(out.rows),
          .across = static_cast<int>(out.cols),
          .terms = static_cast<int>(x.cols),
          .shares = static_cast<int>(std::min<int64_t>(workspace.bytes / std::max<int64_t>(bytes, 1), 1 << 16)),
          .partial = static_cast<float*>(workspace.data)};
}

template <class T>
bool reads_stored(const Subnetwork<T>& w) {
  return w.defaults.kind == DefaultKind::stored && w.active < w.count;
}

// Whether all operands suit copies of 16 bytes.
template <class T>
bool fits_copies(const Product<T>& p, const Subnetwork<T>& w) {
  return rows_fit_copies(p.left) && rows_fit_copies(p.weight.weight) &&
         (!reads_stored(w) || rows_fit_copies(p.weight.stored));
}

// Whether the copy engine also takes them: rows that do not overlap, and a result in whole parts of 16 bytes.
template <class T>
bool fits_copy_engine(const Device& device, const Product<T>& p, const Subnetwork<T>& w) {
  const auto has_rows = [](const Operand<T>& of) { return of.row_stride >= of.cols; };
  return device.is_hopper() && p.terms > 0 && fits_copies(p, w) && has_rows(p.left) && has_rows(p.weight.weight) &&
         (!reads_stored(w) || has_rows(p.weight.stored)) && p.across % 8 == 0 &&
         rows_fit_copies(p.out, p.row_stride, p.col_stride);
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

template <SixteenBits T>
Status linear(Matrix<const T> x, const Subnetwork<T>& w, const T* bias, Matrix<T> y, Stream stream,
              Workspace workspace) {
  Device device;
  if (const Status status = served_device(&device, {y.rows, y.cols, x.cols}); !status) return status;
  if (y.rows == 0 || y.cols == 0) return {};
  Product<T> p = product(x, w, y, workspace);
  p.bias = bias;
  if (x.rows <= kFewRows && fits_copies(p, w)) return run_few_rows(device, w, p, stream);
  if constexpr (kHasHopper) {
    if (fits_copy_engine(device, p, w)) return run_hopper_linear(device, w, p, stream);
  }
  return {Code::no_kernel,
          "linear takes contiguous rows that begin at multiples of 16 bytes, and more than 16 rows of x only on "
          "compute capability 9.0 and with a multiple of 8 outputs; multiply by the result of subnetwork_weight "
          "instead"};
}

Status linear_workspace(int64_t rows, int64_t cols, int64_t terms, size_t* bytes) {
  // The largest tiles give the fewest tiles and the most shares.
  constexpr int kDown = 128, kAcross = 256;
  *bytes = 0;
  Device device;
  if (const Status status = served_device(&device, {rows, cols, terms}); !status) return status;
  const int64_t tiles = (rows * cols + kDown * kAcross - 1) / (kDown * kAcross);
  if (tiles > device.multiprocessors) return {};
  const int shares = shares_of(device, static_cast<int>(tiles), static_cast<int>(terms), device.multiprocessors);
  if (shares > 1) *bytes = sizeof(float) * static_cast<size_t>(rows * cols) * static_cast<size_t>(shares);
  return {};
}

template Status linear(Matrix<const bfloat16>, const Subnetwork<bfloat16>&, const bfloat16*, Matrix<bfloat16>, Stream,
                       Workspace);
template Status linear(Matrix<const float16>, const Subnetwork<float16>&, const float16*, Matrix<float16>, Stream,
                       Workspace);

}  // namespace partkernels::cuda
