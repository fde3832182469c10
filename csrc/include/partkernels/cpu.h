// The operators on a CPU, without torch: functions of pointers, sizes, strides and a function that runs loops in
// parallel.
//
// Strides count entries and may be 0 or negative. Arguments are not checked; this is the caller's task. Every function
// is defined for float, double and bfloat16, and accumulates in float, double and float, respectively.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "partkernels/operands.h"
#include "partkernels/optimizers.h"

namespace partkernels::cpu {

// Calls body(begin, end) for disjoint ranges that cover [0, count), possibly concurrently. Results do not depend on how
// the range is split. One range per thread is fastest, since operands are packed once per range.
using Body = std::function<void(int64_t begin, int64_t end)>;
using ParallelFor = std::function<void(int64_t count, const Body& body)>;

// Below these numbers of entries or multiplications, waking another thread costs more than it saves. After a fork, the
// threads of a ParallelFor may be missing, and a call would wait forever. Calls below the limits still work then, like
// PyTorch's small operators, which have the same limit.
constexpr int64_t kFewEntries = 1 << 15;
constexpr int64_t kFewProducts = 1 << 17;

template <class T>
struct Images {
  T* data;
  int64_t batch, channels, height, width;
  int64_t batch_stride, channel_stride, row_stride, col_stride;
};

struct Convolution {
  int64_t stride[2], padding[2], dilation[2];
  int64_t groups;
};

// Returns the instruction set in use: avx512_amx, avx512_bf16, avx512, avx2 or portable; on ARM neon_bf16 or portable.
// It is the best one that the processor supports, unless the environment variable PARTKERNELS_CPU_ISA names another.
const char* instruction_set();

// An instruction set that this library is compiled for, and the features that the processor lacks for it: empty, or
// names separated by commas.
struct Candidate {
  std::string name, lacking;
};

// All instruction sets, the best one first.
std::vector<Candidate> instruction_sets();

// y = x w^T + bias; bias is contiguous or null.
template <class T>
void linear(Matrix<const T> x, const Subnetwork<T>& w, const T* bias, Matrix<T> y, const ParallelFor& parallel_for);

// grad_x = grad_y w.
template <class T>
void linear_grad_input(Matrix<const T> grad_y, const Subnetwork<T>& w, Matrix<T> grad_x,
                       const ParallelFor& parallel_for);

// grad_w = grad_y^T x at the entries of partition update, 0 elsewhere.
template <class T>
void linear_grad_weight(Matrix<const T> grad_y, Matrix<const T> x, Owners owners, int update, Weight<T> grad_w,
                        const ParallelFor& parallel_for);

template <class T>
void conv2d(Images<const T> x, const Subnetwork<T>& w, const T* bias, Convolution conv, Images<T> y,
            const ParallelFor& parallel_for);

template <class T>
void conv2d_grad_input(Images<const T> grad_y, const Subnetwork<T>& w, Convolution conv, Images<T> grad_x,
                       const ParallelFor& parallel_for);

// The same for a dense weight with at most 4 input channels, one group and stride 1, such as the rebuilt weight of a
// first layer.
template <class T>
void few_channels_grad_input(Images<const T> grad_y, Weight<const T> w, Convolution conv, Images<T> grad_x,
                             const ParallelFor& parallel_for);

template <class T>
void conv2d_grad_weight(Images<const T> grad_y, Images<const T> x, Convolution conv, Owners owners, int update,
                        Weight<T> grad_w, const ParallelFor& parallel_for);

// out = the subnetwork's weight, or the part of it that has out's shape: out.rows rows from first_row on and out.in
// input channels from first_in on.
template <class T>
void subnetwork_weight(const Subnetwork<T>& w, int64_t first_row, int64_t first_in, Weight<T> out,
                       const ParallelFor& parallel_for);

// out = grad at the entries of partitions first..last, 0 elsewhere; out and grad may be the same.
template <class T>
void subnetwork_weight_grad(Weight<const T> grad, Owners owners, int first, int last, Weight<T> out,
                            const ParallelFor& parallel_for);

// out [count, cols], contiguous: the rows ids[0] .. ids[count - 1] of a linear weight's subnetwork.
template <class T>
void embedding(const int64_t* ids, int64_t count, const Subnetwork<T>& w, T* out, const ParallelFor& parallel_for);

// starts [rows + 1]: the number of entries of a partition in the rows before each row, followed by the total.
void count_entries(int64_t rows, int64_t cols, const Owners& owners, int partition, int64_t* starts,
                   const ParallelFor& parallel_for);

// out: the entries of a partition in the order of a contiguous weight, one after another. starts is the result of
// count_entries.
template <class T>
void gather_entries(Weight<const T> w, const Owners& owners, int partition, const int64_t* starts, T* out,
                    const ParallelFor& parallel_for);

// The inverse of gather_entries. The other entries of w keep their bits.
template <class T>
void scatter_entries(const T* values, const int64_t* starts, const Owners& owners, int partition, Weight<T> w,
                     const ParallelFor& parallel_for);

// Steps the entries of partition update, or all entries if owners.map is null; the others keep their bits.
// momentum_buffer is not used if momentum is 0.
template <class T>
void sgd_step(Weight<T> parameter, Weight<const T> grad, Weight<T> momentum_buffer, const Owners& owners, int update,
              const Sgd& sgd, const ParallelFor& parallel_for);

// The same for Adam.
template <class T>
void adam_step(Weight<T> parameter, Weight<const T> grad, Weight<T> exp_avg, Weight<T> exp_avg_sq, const Owners& owners,
               int update, const Adam& adam, const ParallelFor& parallel_for);

// The map of Partition.random: entries are ranked by (first Philox word of their index, index), the first sizes[0]
// ranks are partition 1, and so on. map is [rows, row_bytes(cols, bits)], filled with zeros by the caller.
void random_map(int64_t rows, int64_t cols, const std::vector<int64_t>& sizes, uint64_t seed, uint8_t* map,
                const ParallelFor& parallel_for);

}  // namespace partkernels::cpu
