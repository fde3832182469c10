// The operators on a GPU, without torch: pointers, sizes and strides, a stream; each returns a status.
//
// Pointers are to the memory of the current device, and a call returns as soon as its work is in the stream. Strides
// count entries and may be 0 or negative. The passes over a weight are defined for float, double, float16 and bfloat16;
// linear and its gradient for float16 and bfloat16, whose sums are in float. For other products, subnetwork_weight and
// a library of dense ones go together: docs/cpp.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "partkernels/bfloat16.h"
#include "partkernels/float16.h"
#include "partkernels/operands.h"
#include "partkernels/optimizers.h"

struct CUstream_st;

namespace partkernels::cuda {

using Stream = CUstream_st*;

// What became of a call: whether its work is in the stream.
enum class Code {
  ok,
  no_kernel,  // none for this GPU
  failed,     // the CUDA runtime or driver said so
};

struct [[nodiscard]] Status {
  Code code = Code::ok;
  // What was wrong and the cure, or the runtime's words: a string that stays.
  const char* message = "";

  explicit operator bool() const { return code == Code::ok; }
};

template <class T>
concept SixteenBits = std::is_same_v<T, bfloat16> || std::is_same_v<T, float16>;

// Memory on the device, at a multiple of 4 bytes, for the call's own work in the stream. Without it, and with less than
// linear_workspace asks for, products with few rows keep fewer multiprocessors at work.
struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
};

// y = x w^T + bias; bias is contiguous, or null. Rows of x, w and stored defaults are neighbouring entries and begin at
// multiples of 16 bytes. More than 16 rows of x need compute capability 9.0, rows that do not overlap and a multiple of
// 8 outputs, whose rows begin at multiples of 16 bytes. For anything else there is no kernel.
template <SixteenBits T>
Status linear(Matrix<const T> x, const Subnetwork<T>& w, const T* bias, Matrix<T> y, Stream stream,
              Workspace workspace = {});

// The bytes of the workspace with which a product of rows x cols sums, each of so many terms, is fastest on the current
// device: 0 if it needs none, and never more than some 20 MB.
Status linear_workspace(int64_t rows, int64_t cols, int64_t terms, size_t* bytes);

// out = the subnetwork's weight, or as much of it as out has room for: out.rows rows from first_row on and out.in
// input channels from first_in on.
template <class T>
Status subnetwork_weight(const Subnetwork<T>& w, int64_t first_row, int64_t first_in, Weight<T> out, Stream stream);

// out = grad at the entries of partitions first..last, 0 elsewhere; they may be the same.
template <class T>
Status subnetwork_weight_grad(Weight<const T> grad, Owners owners, int first, int last, Weight<T> out, Stream stream);

// out [count, cols], contiguous: the rows ids[0] .. ids[count - 1] of a linear weight's subnetwork. ids are on the
// device, and are not checked.
template <class T>
Status embedding(const int64_t* ids, int64_t count, const Subnetwork<T>& w, T* out, Stream stream);

// What torch.optim.SGD does in a step. Steps the entries of partition update, and all if owners.map is null; the others
// keep their bits. momentum_buffer is not used if momentum is 0.
template <class T>
Status sgd_step(Weight<T> parameter, Weight<const T> grad, Weight<T> momentum_buffer, const Owners& owners, int update,
                const Sgd& sgd, Stream stream);

// As sgd_step, for torch.optim.Adam.
template <class T>
Status adam_step(Weight<T> parameter, Weight<const T> grad, Weight<T> exp_avg, Weight<T> exp_avg_sq,
                 const Owners& owners, int update, const Adam& adam, Stream stream);

// The same of several parameters, in fewer launches. Each has a step of its own, for adam.step.
template <class T>
Status sgd_steps(std::span<const SgdTensors<T>> each, int update, const Sgd& sgd, Stream stream);
template <class T>
Status adam_steps(std::span<const AdamTensors<T>> each, int update, const Adam& adam, Stream stream);

}  // namespace partkernels::cuda
