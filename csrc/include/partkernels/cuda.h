// The operators on a GPU, without torch: functions of pointers, sizes, strides and a stream, which return a status.
//
// Pointers refer to memory of the current device, and a call returns as soon as its work is in the stream. Strides
// count entries and may be 0 or negative. Arguments are not checked, except that linear checks whether there is a
// kernel for its operands. All functions take float, double, float16 and bfloat16, except linear, which takes float16
// and bfloat16 and accumulates in float. There are no gradients of linear: for these and for other products, combine
// subnetwork_weight and subnetwork_weight_grad with a library of dense products (docs/cpp.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "partkernels/bfloat16.h"
#include "partkernels/float16.h"
#include "partkernels/operands.h"

struct CUstream_st;

namespace partkernels::cuda {

using Stream = CUstream_st*;

// The outcome of a call; its work is in the stream only if the code is ok.
enum class Code {
  ok,
  no_kernel,  // no kernel for this GPU or these operands
  failed,     // the CUDA runtime or driver reported an error
};

struct [[nodiscard]] Status {
  Code code = Code::ok;
  // The error and how to fix it, or the runtime's message; a string with static storage.
  const char* message = "";

  explicit operator bool() const { return code == Code::ok; }
};

template <class T>
concept SixteenBits = std::is_same_v<T, bfloat16> || std::is_same_v<T, float16>;

// Device memory, aligned to 4 bytes, for the call's own work in the stream. Without it, or with less than
// linear_workspace asks for, products with few rows use fewer multiprocessors.
struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
};

// y = x w^T + bias; bias is contiguous or null. Rows of x, w and stored defaults must be contiguous and begin at
// multiples of 16 bytes. More than 16 rows of x need compute capability 9.0, rows that do not overlap, and a multiple
// of 8 outputs with rows of y that begin at multiples of 16 bytes. Other operands return Code::no_kernel.
template <SixteenBits T>
Status linear(Matrix<const T> x, const Subnetwork<T>& w, const T* bias, Matrix<T> y, Stream stream,
              Workspace workspace = {});

// Sets *bytes to the workspace size with which a product of rows x cols sums, each of `terms` terms, is fastest on the
// current device: 0 if it needs none, and never more than about 20 MB.
Status linear_workspace(int64_t rows, int64_t cols, int64_t terms, size_t* bytes);

// out = the subnetwork's weight, or the part of it that has out's shape: out.rows rows from first_row on and out.in
// input channels from first_in on.
template <class T>
Status subnetwork_weight(const Subnetwork<T>& w, int64_t first_row, int64_t first_in, Weight<T> out, Stream stream);

// out = grad at the entries of partitions first..last, 0 elsewhere; out and grad may be the same.
template <class T>
Status subnetwork_weight_grad(Weight<const T> grad, Owners owners, int first, int last, Weight<T> out, Stream stream);

// out [count, cols], contiguous: the rows ids[0] .. ids[count - 1] of a linear weight's subnetwork. ids are on the
// device and are not checked.
template <class T>
Status embedding(const int64_t* ids, int64_t count, const Subnetwork<T>& w, T* out, Stream stream);

}  // namespace partkernels::cuda
