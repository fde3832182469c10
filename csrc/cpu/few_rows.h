// linear for a few rows of x: each row of the weight is rebuilt and multiplied by them as it lies, so that the weight
// is read once, in its own order, and never packed.
#pragma once

#include "gemm.h"
#include "rebuild.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

// Rows of x at most: with more, adding up the lanes of so many sums costs as much as packing.
constexpr int64_t kFewRows = 8;
// Rows of the weight that are rebuilt together, and that share a load of x.
constexpr int64_t kRebuiltRows = 8;
constexpr int64_t kSharing = 4;
static_assert(kRebuiltRows % kSharing == 0 && kSharing == kTileRows);

// sums[r * kFewRows + i] += the products of w's row r and x's row i, lane by lane, for kSharing rows r and Few rows i,
// and whole vectors of [0, n) entries.
template <class Unit, int Few, class T>
void add_lanes(const T* w, int64_t w_stride, const T* x, int64_t x_stride, int64_t n, Vector<Sum<Unit>>* sums) {
  constexpr int64_t kEntries = kVectorBytes / sizeof(T);
  const auto units = [](const T* from) { return reinterpret_cast<const Unit*>(from); };
  Vector<Sum<Unit>> sum[kSharing][Few] = {};
  for (int64_t c = 0; c + kEntries <= n; c += kEntries) {
    typename Operand<Unit>::type rows[kSharing];
    for (int r = 0; r < kSharing; ++r) rows[r] = Operand<Unit>::load(units(w + r * w_stride + c));
    for (int i = 0; i < Few; ++i) {
      const auto entries = Operand<Unit>::load(units(x + i * x_stride + c));
      for (int r = 0; r < kSharing; ++r) Operand<Unit>::add_product(rows[r], entries, sum[r][i]);
    }
  }
  for (int r = 0; r < kSharing; ++r) {
    for (int i = 0; i < Few; ++i) sums[r * kFewRows + i] += sum[r][i];
  }
}

// The same for any number of rows up to 6, which is as many as there are registers for.
template <class Unit, class T, int Few = 6>
void add_lanes_of(int64_t few, const T* w, int64_t w_stride, const T* x, int64_t x_stride, int64_t n,
                  Vector<Sum<Unit>>* sums) {
  if constexpr (Few > 0) {
    if (few == Few) {
      add_lanes<Unit, Few>(w, w_stride, x, x_stride, n, sums);
    } else {
      add_lanes_of<Unit, T, Few - 1>(few, w, w_stride, x, x_stride, n, sums);
    }
  }
}

#if defined(PARTKERNELS_AVX512)
inline float sum_of_lanes(const Vector<float>& lanes) { return _mm512_reduce_add_ps((__m512)lanes); }
inline double sum_of_lanes(const Vector<double>& lanes) { return _mm512_reduce_add_pd((__m512d)lanes); }
#else
template <class V>
auto sum_of_lanes(const V& vector) {
  std::remove_cvref_t<decltype(vector[0])> lanes[sizeof(V) / sizeof(vector[0])];
  std::memcpy(lanes, &vector, sizeof(V));
  for (size_t half = std::size(lanes) / 2; half > 0; half /= 2) {
    for (size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}
#endif

// y = x w^T + bias for at most kFewRows rows of x.
template <class T>
void linear_of_few_rows(const Matrix<const T>& x, const Subnetwork<T>& w, const T* bias, const Matrix<T>& y,
                        const ParallelFor& parallel_for) {
  using Unit = typename UnitOf<T>::type;
  using V = Vector<Sum<Unit>>;
  constexpr int64_t kEntries = kVectorBytes / sizeof(T);
  constexpr int64_t kStrip = 32 * kVectorBytes / sizeof(Sum<Unit>);  // chains of 32 float entries, or 16 pairs
  constexpr int64_t kBlock = 64;
  constexpr int64_t kDepthBlock = 16384 / sizeof(T), kStride = kDepthBlock + kEntries;
  static_assert(kFewRows * kStride * sizeof(T) <= sizeof(Workspace<Unit>::right));
  static_assert(kBlock * kFewRows * sizeof(V) <= sizeof(Workspace<Unit>::product));
  const Rebuilder<T> rebuild(w);
  const int64_t outs = w.weight.rows, depth = x.cols;
  const int64_t groups = blocks_of(x.rows, 6), some = groups == 0 ? 0 : blocks_of(x.rows, groups);

  parallel_for(blocks_of(outs, kBlock), [&](int64_t begin, int64_t end) {
    Workspace<Unit>& space = workspace<Unit>();
    T* const packed = reinterpret_cast<T*>(space.right);
    V* const sums = reinterpret_cast<V*>(space.product);
    int64_t packed_from = -1;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task * kBlock, last = std::min(outs, first + kBlock);
      std::fill_n(sums, kBlock * kFewRows, V{});
      for (int64_t start = 0; start < depth; start += kDepthBlock) {
        const int64_t stop = std::min(depth, start + kDepthBlock);
        if (packed_from != start) {
          for (int64_t i = 0; i < x.rows; ++i) {
            for (int64_t k = start; k < stop; ++k)
              packed[i * kStride + k - start] = x.data[i * x.row_stride + k * x.col_stride];
          }
          packed_from = start;
        }
        for (int64_t o = first; o < last; o += kRebuiltRows) {
          const int64_t rows = std::min(kRebuiltRows, last - o);
          V* const of_rows = sums + (o - first) * kFewRows;
          for (int64_t k = start; k < stop; k += kStrip) {
            const int64_t d = std::min(kStrip, stop - k), whole = d / kEntries * kEntries;
            alignas(64) T out[kRebuiltRows][kStrip + kEntries];
            const Rows<T> made =
                rebuild.rows_of(o, rows, k, d, out[0], kStrip + kEntries,
                                k + kStrip < stop ? Offset{0, kStrip} : Offset{kRebuiltRows, start - k});
            const T* const entries = packed + (k - start);
            for (int64_t r = 0; r < rows; r += kSharing) {
              for (int64_t i = 0; i < x.rows; i += some) {
                add_lanes_of<Unit>(std::min(some, x.rows - i), made.data + r * made.stride, made.stride,
                                   entries + i * kStride, kStride, whole, of_rows + r * kFewRows + i);
              }
            }
            for (int64_t r = 0; r < rows; ++r) {
              for (int64_t i = 0; i < x.rows; ++i) {
                for (int64_t c = whole; c < d; ++c) {
                  of_rows[r * kFewRows + i][0] +=
                      widen(made.data[r * made.stride + c]) * widen(entries[i * kStride + c]);
                }
              }
            }
          }
        }
      }
      for (int64_t i = 0; i < x.rows; ++i) {
        for (int64_t o = first; o < last; ++o) {
          const auto shift = bias ? widen(bias[o]) : 0;
          y.data[i * y.row_stride + o * y.col_stride] =
              narrow<T>(sum_of_lanes(sums[(o - first) * kFewRows + i]) + shift);
        }
      }
    }
  });
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
