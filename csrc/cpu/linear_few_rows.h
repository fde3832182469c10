// linear for a small batch (GEMV): each row of the weight is rebuilt and multiplied with the rows of x in place, so
// that the weight is read once, in its own order, and never packed.
#pragma once

#include "pack.h"
#include "rebuild.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

// The maximum number of rows of x: with more, adding up the lanes of this many sums costs as much as packing.
constexpr int64_t kFewRows = 8;
// Rows of the weight that are rebuilt together, and rows that share a load of x.
constexpr int64_t kRebuiltRows = 8;
constexpr int64_t kSharing = 4;
static_assert(kRebuiltRows % kSharing == 0 && kSharing == kTileRows);

// sums[r * kFewRows + i] += the products of w's row r and x's row i, lane by lane, for kSharing rows r and Few rows i,
// over the whole vectors in [0, n).
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

// The same for any number of rows up to 6, the most for which there are enough registers.
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

// The same for `rows` rows of w, all `few` rows of x, and all of [0, n). Rows of w up to a multiple of kSharing are
// read; the sums of the extra rows are undefined.
template <class Unit, class T>
void add_products(const Rows<T>& w, int64_t rows, const Rows<T>& x, int64_t few, int64_t n, Vector<Sum<Unit>>* sums) {
  constexpr int64_t kEntries = kVectorBytes / sizeof(T);
  const int64_t whole = n / kEntries * kEntries, some = blocks_of(few, blocks_of(few, 6));
  for (int64_t r = 0; r < rows; r += kSharing) {
    for (int64_t i = 0; i < few; i += some) {
      add_lanes_of<Unit>(std::min(some, few - i), w.data + r * w.stride, w.stride, x.data + i * x.stride, x.stride,
                         whole, sums + r * kFewRows + i);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < few; ++i) {
      for (int64_t c = whole; c < n; ++c) {
        sums[r * kFewRows + i][0] += widen(w.data[r * w.stride + c]) * widen(x.data[i * x.stride + c]);
      }
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
  constexpr int64_t kBlock = 64;  // outputs of a task
  // The depth for which x is packed at once, and for which the weight is rebuilt at once: chains of 32 entries of
  // float, or 16 pairs.
  constexpr int64_t kPacked = 16 * kDepth<Unit> * kUnitDepth<Unit>, kStrip = 32 * kVectorBytes / sizeof(Sum<Unit>);
  // Rows a power of two apart would share sets of the cache.
  constexpr int64_t kApart = kVectorBytes / sizeof(T), kPackedStride = kPacked + kApart, kStripStride = kStrip + kApart;
  static_assert(kFewRows * kPackedStride * sizeof(T) <= sizeof(Workspace<Unit>::right));
  static_assert(kBlock * kFewRows * sizeof(V) <= sizeof(Workspace<Unit>::product));
  const Rebuilder<T> rebuild(w);
  const int64_t few = x.rows, depth = x.cols;

  // Adds the products of the depth [start, stop), for which x is packed, to some outputs.
  const auto add_outputs = [&](int64_t out, int64_t rows, int64_t start, int64_t stop, const T* packed, V* sums) {
    for (int64_t k = start; k < stop; k += kStrip) {
      const int64_t d = std::min(kStrip, stop - k);
      alignas(64) T rebuilt[kRebuiltRows][kStripStride];  // with all rows that are read
      const Offset next = k + kStrip < stop ? Offset{0, kStrip} : Offset{kRebuiltRows, start - k};
      const Rows<T> made = rebuild.rows_of(out, rows, k, d, rebuilt[0], kStripStride, next);
      add_products<Unit>(made, rows, Rows<T>{packed + (k - start), kPackedStride}, few, d, sums);
    }
  };

  parallel_for(blocks_of(w.weight.rows, kBlock), [&](int64_t begin, int64_t end) {
    Workspace<Unit>& space = workspace<Unit>();
    T* const packed = reinterpret_cast<T*>(space.right);
    V* const sums = reinterpret_cast<V*>(space.product);
    int64_t packed_from = -1;
    for (int64_t first = begin * kBlock; first < std::min(w.weight.rows, end * kBlock); first += kBlock) {
      const int64_t last = std::min(w.weight.rows, first + kBlock);
      std::fill_n(sums, kBlock * kFewRows, V{});
      for (int64_t start = 0; start < depth; start += kPacked) {
        const int64_t stop = std::min(depth, start + kPacked);
        for (int64_t i = 0; i < few && packed_from != start; ++i) {
          copy(x.data + i * x.row_stride + start * x.col_stride, x.col_stride, stop - start,
               packed + i * kPackedStride);
        }
        packed_from = start;
        for (int64_t o = first; o < last; o += kRebuiltRows) {
          add_outputs(o, std::min(kRebuiltRows, last - o), start, stop, packed, sums + (o - first) * kFewRows);
        }
      }
      for (int64_t i = 0; i < few; ++i) {
        for (int64_t o = first; o < last; ++o) {
          const auto sum = sum_of_lanes(sums[(o - first) * kFewRows + i]) + (bias ? widen(bias[o]) : 0);
          y.data[i * y.row_stride + o * y.col_stride] = narrow<T>(sum);
        }
      }
    }
  });
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
