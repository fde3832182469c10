// conv2d and its gradients as implicit matrix products: images are unfolded block by block.
#pragma once

#include "conv2d_indexing.h"
#include "masked_store.h"
#include "pack.h"
#include "rebuild.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

// One group of a convolution: its channels of x and y, and its rows of the weight.
struct Group {
  int64_t first_in, first_out, ins, outs;

  template <class T>
  Group(const Weight<T>& weight, int64_t group, int64_t groups)
      : first_in(group * weight.in),
        first_out(group * (weight.rows / groups)),
        ins(weight.in),
        outs(weight.rows / groups) {}
};

// Rows of unfolded images that are gathered at once, before they are packed.
constexpr int64_t kUnfolded = 16;

// Calls use(first, rows, matrix) with depth rows first .. first + rows of an unfolded image, `count` pixels wide;
// unfold(r, out) writes row r.
template <class T, class Unfold, class Use>
void for_unfolded_rows(int64_t depth, int64_t count, const Unfold& unfold, const Use& use) {
  static_assert(kRows <= kCols);
  for (int64_t first = 0; first < depth; first += kUnfolded) {
    const int64_t rows = std::min(kUnfolded, depth - first);
    alignas(64) T scratch[kUnfolded][kCols];
    for (int64_t r = 0; r < rows; ++r) unfold(first + r, scratch[r]);
    use(first, rows, Matrix<const T>{scratch[0], rows, count, kCols, 1});
  }
}

// out[p] = the input pixel that column `col` of the weight is multiplied with for output pixel begin + p.
template <class T, class W, class Y>
void unfold(const Images<const T>& x, const Weight<W>& weight, const Group& group, const Convolution& conv,
            const Images<Y>& y, int64_t col, int64_t begin, int64_t count, T* out) {
  const Tap tap = tap_of(weight, col);
  const T* channel = x.data + (group.first_in + tap.in) * x.channel_stride;
  for_each_run(y, begin, count, [&](int64_t first, const Run& run) {
    const int64_t row = run.row * conv.stride[0] - conv.padding[0] + tap.y * conv.dilation[0];
    const int64_t from = run.col * conv.stride[1] - conv.padding[1] + tap.x * conv.dilation[1];
    const Range valid = row < 0 || row >= x.height ? Range{0, 0} : inside(from, conv.stride[1], x.width, run.count);
    copy_padded(channel + run.image * x.batch_stride + row * x.row_stride + from * x.col_stride,
                conv.stride[1] * x.col_stride, valid, run.count, out + first);
  });
}

// With strides, an input pixel is read through only those taps that match its phase, its position modulo the strides.
// The pixels of one phase form an image, and its gradient is a convolution with stride 1.
template <class T>
struct Phase {
  // A tap, and the output pixel that reads the phase's pixel (0, 0) through it.
  struct Reader {
    int64_t y, x, row, col;
  };
  Images<T> pixels;
  std::vector<Reader> readers;

  template <class W>
  Phase(const Images<T>& x, const Weight<W>& weight, const Convolution& conv, int64_t row, int64_t col) : pixels(x) {
    pixels.data += row * x.row_stride + col * x.col_stride;
    pixels.height = (x.height - row + conv.stride[0] - 1) / conv.stride[0];
    pixels.width = (x.width - col + conv.stride[1] - 1) / conv.stride[1];
    pixels.row_stride *= conv.stride[0];
    pixels.col_stride *= conv.stride[1];
    for (int64_t tap_y = 0; tap_y < weight.height; ++tap_y) {
      for (int64_t tap_x = 0; tap_x < weight.width; ++tap_x) {
        const int64_t from_row = row + conv.padding[0] - tap_y * conv.dilation[0];
        const int64_t from_col = col + conv.padding[1] - tap_x * conv.dilation[1];
        if (from_row % conv.stride[0] == 0 && from_col % conv.stride[1] == 0) {
          readers.push_back({tap_y, tap_x, from_row / conv.stride[0], from_col / conv.stride[1]});
        }
      }
    }
  }
};

// out[p] = the entry of grad_y, in output channel `channel`, that a reader's tap is multiplied with for the phase's
// pixel begin + p.
template <class T>
void unfold_transposed(const Images<const T>& grad_y, const Phase<T>& phase, const typename Phase<T>::Reader& reader,
                       int64_t channel, int64_t begin, int64_t count, T* out) {
  const T* const from = grad_y.data + channel * grad_y.channel_stride;
  for_each_run(phase.pixels, begin, count, [&](int64_t first, const Run& run) {
    const int64_t row = run.row + reader.row;
    const int64_t col = run.col + reader.col;
    const Range valid = row < 0 || row >= grad_y.height ? Range{0, 0} : inside(col, 1, grad_y.width, run.count);
    copy_padded(from + run.image * grad_y.batch_stride + row * grad_y.row_stride + col * grad_y.col_stride,
                grad_y.col_stride, valid, run.count, out + first);
  });
}

// Stores a block of a product with the pixels begin .. begin + count as rows and channels as columns.
template <class T>
void store_pixels(const Images<T>& images, int64_t begin, int64_t count, int64_t channel, int64_t channels,
                  const Accumulator<T>* product, const T* bias) {
  // A few channels at a time: their part of a row of the product is one cache line.
  constexpr int64_t kChannels = 16;
  for (int64_t c = 0; c < channels; c += kChannels) {
    const int64_t some = std::min(kChannels, channels - c);
    for_each_run(images, begin, count, [&](int64_t first, const Run& run) {
      T* const base = images.data + (channel + c) * images.channel_stride + run.image * images.batch_stride +
                      run.row * images.row_stride + run.col * images.col_stride;
      for (int64_t q = 0; q < some; ++q) {
        const Accumulator<T> shift = bias ? widen(bias[channel + c + q]) : Accumulator<T>{0};
        const Accumulator<T>* const from = product + first * kCols + c + q;
        T* const to = base + q * images.channel_stride;
        for (int64_t t = 0; t < run.count; ++t) to[t * images.col_stride] = narrow<T>(from[t * kCols] + shift);
      }
    });
  }
}

// y: output pixels by output channels, the unfolded input times w^T.
template <class T>
void conv2d(Images<const T> x, const Subnetwork<T>& w, const T* bias, Convolution conv, Images<T> y,
            const ParallelFor& parallel_for) {
  using Unit = typename UnitOf<T>::type;
  const Rebuilder<T> rebuild(w);
  for (int64_t g = 0; g < conv.groups; ++g) {
    const Group group(w.weight, g, conv.groups);
    gemm<Unit, Layout::depth_major>(
        pixels(y), group.outs, w.weight.cols(), kBatch<Unit>,
        [&](int64_t i, int64_t m, int64_t k, int64_t d, Unit* block) {
          for_unfolded_rows<T>(
              d, m, [&](int64_t r, T* out) { unfold(x, w.weight, group, conv, y, k + r, i, m, out); },
              [&](int64_t first, int64_t rows, const Matrix<const T>& unfolded) {
                pack_left_depth(unfolded, 0, rows, 0, m, block + first / kUnitDepth<Unit> * kRows);
              });
        },
        [&](int64_t k, int64_t d, int64_t j, int64_t n, Unit* block) {
          pack_right_transposed<T>(
              n, d,
              [&](int64_t c, int64_t rows, T* out, int64_t stride) {
                rebuild(group.first_out + j + c, rows, k, d, out, stride);
                return Rows<T>{out, stride};
              },
              block);
        },
        [&](int64_t i, int64_t m, int64_t j, int64_t n, const Sum<Unit>* product) {
          store_pixels(y, i, m, group.first_out + j, n, product, bias);
        },
        parallel_for);
  }
}

// grad_x, for each phase: its pixels by input channels, the unfolded output gradient times w, with (reader, output
// channel) as depth.
template <class T>
void conv2d_grad_input(Images<const T> grad_y, const Subnetwork<T>& w, Convolution conv, Images<T> grad_x,
                       const ParallelFor& parallel_for) {
  using Unit = typename UnitOf<T>::type;
  const Rebuilder<T> rebuild(w);
  const int64_t phase_rows = std::min(conv.stride[0], grad_x.height);
  const int64_t phase_cols = std::min(conv.stride[1], grad_x.width);
  for (int64_t p = 0; p < phase_rows * phase_cols; ++p) {
    const Phase<T> phase(grad_x, w.weight, conv, p / phase_cols, p % phase_cols);
    const auto readers = static_cast<int64_t>(phase.readers.size());
    for (int64_t g = 0; g < conv.groups; ++g) {
      const Group group(w.weight, g, conv.groups);
      gemm<Unit, Layout::depth_major>(
          pixels(phase.pixels), group.ins, group.outs * readers, kBatch<Unit>,
          [&](int64_t i, int64_t m, int64_t k, int64_t d, Unit* block) {
            for_unfolded_rows<T>(
                d, m,
                [&](int64_t r, T* out) {
                  const auto& reader = phase.readers[(k + r) / group.outs];
                  unfold_transposed(grad_y, phase, reader, group.first_out + (k + r) % group.outs, i, m, out);
                },
                [&](int64_t first, int64_t rows, const Matrix<const T>& unfolded) {
                  pack_left_depth(unfolded, 0, rows, 0, m, block + first / kUnitDepth<Unit> * kRows);
                });
          },
          [&](int64_t k, int64_t d, int64_t j, int64_t n, Unit* block) {
            alignas(64) T scratch[kUnfolded][kCols];
            for (int64_t first = 0; first < d; first += kUnfolded) {
              const int64_t rows = std::min(kUnfolded, d - first);
              for (int64_t r = 0; r < rows;) {  // the rows that share a tap
                const auto& tap = phase.readers[(k + first + r) / group.outs];
                const int64_t out = (k + first + r) % group.outs;
                const int64_t same = std::min(rows - r, group.outs - out);
                rebuild.anywhere(group.first_out + out, same, (tap.y * w.weight.width + tap.x) * w.weight.in + j, n,
                                 scratch[r], kCols);
                r += same;
              }
              pack_right_depth(Matrix<const T>{scratch[0], rows, n, kCols, 1}, 0, rows, 0, n,
                               block + first / kUnitDepth<Unit> * kPanel<Unit>);
            }
          },
          [&](int64_t i, int64_t m, int64_t j, int64_t n, const Sum<Unit>* product) {
            store_pixels<T>(phase.pixels, i, m, group.first_in + j, n, product, nullptr);
          },
          parallel_for);
    }
  }
}

// grad_w: output channels by columns of the weight, the output gradient times the unfolded input, with pixels as depth.
template <class T>
void conv2d_grad_weight(Images<const T> grad_y, Images<const T> x, Convolution conv, Owners owners, int update,
                        Weight<T> grad_w, const ParallelFor& parallel_for) {
  using Unit = typename UnitOf<T>::type;
  const MaskedStore<T> store(owners, update, grad_w);
  for (int64_t g = 0; g < conv.groups; ++g) {
    const Group group(grad_w, g, conv.groups);
    gemm<Unit, Layout::row_major>(
        group.outs, grad_w.cols(), pixels(grad_y), kRows,
        [&](int64_t i, int64_t m, int64_t k, int64_t d, Unit* block) {
          for (int64_t r = 0; r < m; ++r) {
            const T* const channel = grad_y.data + (group.first_out + i + r) * grad_y.channel_stride;
            T row[kDepth<Unit> * kUnitDepth<Unit>];
            for_each_run(grad_y, k, d, [&](int64_t first, const Run& run) {
              copy_padded(
                  channel + run.image * grad_y.batch_stride + run.row * grad_y.row_stride + run.col * grad_y.col_stride,
                  grad_y.col_stride, Range{0, run.count}, run.count, row + first);
            });
            pack_rows(Matrix<const T>{row, 1, d, 0, 1}, 0, 1, 0, d, block + r * kDepth<Unit>);
          }
        },
        [&](int64_t k, int64_t d, int64_t j, int64_t n, Unit* block) {
          pack_right_transposed<T>(
              n, d,
              [&](int64_t c, int64_t rows, T* out, int64_t stride) {
                for (int64_t r = 0; r < rows; ++r) {
                  unfold(x, grad_w, group, conv, grad_y, j + c + r, k, d, out + r * stride);
                }
                return Rows<T>{out, stride};
              },
              block);
        },
        [&](int64_t i, int64_t m, int64_t j, int64_t n, const Sum<Unit>* product) {
          store(group.first_out + i, m, j, n, product, kCols);
        },
        parallel_for);
  }
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
