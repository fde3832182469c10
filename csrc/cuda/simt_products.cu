// Products of float32 and float64 matrices of any strides, without tensor cores: each thread adds its own 4x4 sums.
#include "product.h"
#include "products.h"

namespace partkernels::cuda {

namespace {

constexpr int kSide = kGroup, kPitch = kSide + 1, kThreads = 256, kShare = 4;

template <class T>
constexpr int kSharedBytes = 2 * kSide * kPitch * static_cast<int>(sizeof(T));

// A tile of 64x64 entries of a matrix; put(row, col, entry) stores it.
template <class T, class Put>
PARTKERNELS_DEVICE void load_tile(const Operand<T>& from, int row, int col, const Put& put) {
  for (int i = thread_index(); i < kSide * kSide; i += kThreads) {
    const int r = i / kSide, c = i % kSide;
    const bool is_there = row + r < from.rows && col + c < from.cols;
    put(r, c, is_there ? from.data[(row + r) * from.row_stride + (col + c) * from.col_stride] : T{});
  }
}

// The same of a subnetwork's weight; col is a multiple of 64.
template <class T, DefaultKind kKind, class Put>
PARTKERNELS_DEVICE void rebuild_tile(const Rebuilt<T>& w, int row, int col, const Put& put) {
  for (int i = thread_index(); i < kSide * kQuad; i += kThreads) {
    const int q = i % kQuad, r = i / kQuad;
    uint32_t dead[kPairs];
    if constexpr (kKind != DefaultKind::stored) {
      default_pairs<bfloat16, kKind>(w.defaults, row + r, col / kGroup, q, dead);
    }
    PARTKERNELS_UNROLL
    for (int e = 0; e < 2 * kPairs; ++e) {
      const int c = 8 * (e / 2) + 2 * q + e % 2;
      T entry = 0;
      if (row + r < w.weight.rows && col + c < w.weight.cols) {
        const auto of = [&](const Operand<T>& from) {
          return from.data[(row + r) * from.row_stride + (col + c) * from.col_stride];
        };
        if (id_at(w.map + (row + r) * w.row_bytes, col + c, w.bits) < w.active) {
          entry = of(w.weight);
        } else if constexpr (kKind == DefaultKind::stored) {
          entry = of(w.stored);
        } else {
          entry = float_from_bits(e % 2 == 0 ? dead[e / 2] << 16 : dead[e / 2] & 0xFFFF0000);
        }
      }
      put(r, c, entry);
    }
  }
}

template <class T, Work kWork, DefaultKind kKind>
PARTKERNELS_KERNEL PARTKERNELS_BOUNDS(kThreads, 1) void simt_product(PARTKERNELS_ARGUMENT Product<T> p) {
  auto* const left = reinterpret_cast<T*>(shared_memory());  // both [term][entry]
  T* const right = left + kSide * kPitch;
  int tile_row, tile_col;
  tile_of(block_index(), divide_up(p.down, kSide), divide_up(p.across, kSide), &tile_row, &tile_col);
  const int i0 = tile_row * kSide, j0 = tile_col * kSide;
  // Entries that are 16 apart: neighbouring threads read neighbouring words.
  const int down = thread_index() / 16, across = thread_index() % 16;
  T sums[kShare][kShare] = {};
  const auto by_terms = [](T* tile) { return [tile](int entry, int term, T v) { tile[term * kPitch + entry] = v; }; };
  const auto by_entries = [](T* tile) { return [tile](int term, int entry, T v) { tile[term * kPitch + entry] = v; }; };

  for (int t0 = 0; t0 < p.terms; t0 += kSide) {
    if constexpr (kWork == Work::grad_weight) {
      load_tile(p.left, t0, i0, by_entries(left));
      load_tile(p.right, t0, j0, by_entries(right));
    } else {
      load_tile(p.left, i0, t0, by_terms(left));
      if constexpr (kWork == Work::forward) {
        rebuild_tile<T, kKind>(p.weight, j0, t0, by_terms(right));
      } else {
        rebuild_tile<T, kKind>(p.weight, t0, j0, by_entries(right));
      }
    }
    synchronize_block();
    for (int t = 0; t < kSide; ++t) {
      PARTKERNELS_UNROLL
      for (int i = 0; i < kShare; ++i) {
        PARTKERNELS_UNROLL
        for (int j = 0; j < kShare; ++j) {
          sums[i][j] += left[t * kPitch + down + 16 * i] * right[t * kPitch + across + 16 * j];
        }
      }
    }
    synchronize_block();
  }
  PARTKERNELS_UNROLL
  for (int i = 0; i < kShare; ++i) {
    PARTKERNELS_UNROLL
    for (int j = 0; j < kShare; ++j) {
      store_result<T, kWork>(p, i0 + down + 16 * i, j0 + across + 16 * j, sums[i][j]);
    }
  }
}

}  // namespace

template <class T, Work kWork>
Status run_simt(const Subnetwork<T>& w, const Product<T>& p, Stream stream) {
  const Launch how{divide_up(p.down, kSide) * divide_up(p.across, kSide), kThreads, kSharedBytes<T>};
  if constexpr (kWork == Work::grad_weight) {
    return launch(simt_product<T, kWork, DefaultKind::zeros>, how, stream, p);
  } else {
    return with_kind(w,
                     [&](auto kind) { return launch(simt_product<T, kWork, decltype(kind)::value>, how, stream, p); });
  }
}

#define PARTKERNELS_INSTANTIATE(T)                                                                \
  template Status run_simt<T, Work::forward>(const Subnetwork<T>&, const Product<T>&, Stream);    \
  template Status run_simt<T, Work::grad_input>(const Subnetwork<T>&, const Product<T>&, Stream); \
  template Status run_simt<T, Work::grad_weight>(const Subnetwork<T>&, const Product<T>&, Stream);
PARTKERNELS_INSTANTIATE(float)
PARTKERNELS_INSTANTIATE(double)

}  // namespace partkernels::cuda
