#include <algorithm>
#include <vector>

#include "gemm.h"
#include "partkernels/cpu.h"
#include "partkernels/packed_map.h"
#include "rebuild.h"

namespace partkernels::cpu {
namespace {

// The pixels of an image batch, numbered over (image, row, column), are one dimension of every product here.
template <class T>
int64_t pixels(const Images<T>& images) {
  return images.batch * images.height * images.width;
}

// A stretch of pixels of one image row.
struct Run {
  int64_t image, row, col, count;
};

// Calls use(first, run) for the runs that make up pixels [begin, begin + count); first counts from begin.
template <class T, class Use>
void for_each_run(const Images<T>& images, int64_t begin, int64_t count, const Use& use) {
  for (int64_t done = 0; done < count;) {
    const int64_t pixel = begin + done;
    const int64_t col = pixel % images.width;
    const int64_t row = pixel / images.width % images.height;
    const int64_t run = std::min(count - done, images.width - col);
    use(done, Run{pixel / images.width / images.height, row, col, run});
    done += run;
  }
}

// The taps of a kernel, numbered as the columns of a weight: (y, x, i).
struct Tap {
  int64_t y, x, in;
};

template <class T>
Tap tap_of(const Weight<T>& weight, int64_t col) {
  const int64_t pixel = col / weight.in;
  return {pixel / weight.width, pixel % weight.width, col % weight.in};
}

// The range of t in [0, count) with 0 <= from + t * step < limit.
struct Range {
  int64_t begin, end;
};

Range inside(int64_t from, int64_t step, int64_t limit, int64_t count) {
  const int64_t begin = from >= 0 ? 0 : (-from + step - 1) / step;
  const int64_t end = from >= limit ? 0 : (limit - 1 - from) / step + 1;
  return {std::min(begin, count), std::clamp<int64_t>(end, std::min(begin, count), count)};
}

// out[t] = from[t * stride] for t in the range, 0 elsewhere in [0, count).
template <class T>
void copy_padded(const T* from, int64_t stride, Range range, int64_t count, Accumulator<T>* out) {
  std::fill(out, out + range.begin, Accumulator<T>{0});
  if (stride == 1) {
    for (int64_t t = range.begin; t < range.end; ++t) out[t] = widen(from[t]);
  } else {
    for (int64_t t = range.begin; t < range.end; ++t) out[t] = widen(from[t * stride]);
  }
  std::fill(out + range.end, out + count, Accumulator<T>{0});
}

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

// block[r * stride + p] = what tap col + r multiplies to make output pixel begin + p: rows of the unfolded input.
template <class T, class W, class Y>
void unfold(const Images<const T>& x, const Weight<W>& weight, const Group& group, const Convolution& conv,
            const Images<Y>& y, int64_t col, int64_t rows, int64_t begin, int64_t count, int64_t stride,
            Accumulator<T>* block) {
  for (int64_t r = 0; r < rows; ++r) {
    const Tap tap = tap_of(weight, col + r);
    const T* channel = x.data + (group.first_in + tap.in) * x.channel_stride;
    Accumulator<T>* out = block + r * stride;
    for_each_run(y, begin, count, [&](int64_t first, const Run& run) {
      const int64_t row = run.row * conv.stride[0] - conv.padding[0] + tap.y * conv.dilation[0];
      const int64_t from = run.col * conv.stride[1] - conv.padding[1] + tap.x * conv.dilation[1];
      const Range valid = row < 0 || row >= x.height ? Range{0, 0} : inside(from, conv.stride[1], x.width, run.count);
      copy_padded(channel + run.image * x.batch_stride + row * x.row_stride + from * x.col_stride,
                  conv.stride[1] * x.col_stride, valid, run.count, out + first);
    });
  }
}

// With strides, an input pixel is read through some taps only: those of its phase, its position modulo the strides.
// The pixels of one phase are an image of their own, and a convolution of stride 1 leads to it.
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

// block[r * stride + p] = what entry number depth + r, counted over (output channel, reader), multiplies to make the
// phase's pixel begin + p: rows of the unfolded output gradient.
template <class T>
void unfold_transposed(const Images<const T>& grad_y, const Group& group, const Phase<T>& phase, int64_t depth,
                       int64_t rows, int64_t begin, int64_t count, int64_t stride, Accumulator<T>* block) {
  const auto readers = static_cast<int64_t>(phase.readers.size());
  for (int64_t r = 0; r < rows; ++r) {
    const auto& reader = phase.readers[(depth + r) % readers];
    const T* channel = grad_y.data + (group.first_out + (depth + r) / readers) * grad_y.channel_stride;
    Accumulator<T>* out = block + r * stride;
    for_each_run(phase.pixels, begin, count, [&](int64_t first, const Run& run) {
      const int64_t row = run.row + reader.row;
      const int64_t col = run.col + reader.col;
      const Range valid = row < 0 || row >= grad_y.height ? Range{0, 0} : inside(col, 1, grad_y.width, run.count);
      copy_padded(channel + run.image * grad_y.batch_stride + row * grad_y.row_stride + col * grad_y.col_stride,
                  grad_y.col_stride, valid, run.count, out + first);
    });
  }
}

// Stores a block of a product whose columns are pixels begin .. begin + count of one channel a row.
template <class T>
void store_channels(const Images<T>& images, int64_t channel, int64_t channels, int64_t begin, int64_t count,
                    const Accumulator<T>* product, const T* bias) {
  for (int64_t r = 0; r < channels; ++r) {
    T* const base = images.data + (channel + r) * images.channel_stride;
    const Accumulator<T> shift = bias ? widen(bias[channel + r]) : Accumulator<T>{0};
    for_each_run(images, begin, count, [&](int64_t first, const Run& run) {
      T* to = base + run.image * images.batch_stride + run.row * images.row_stride + run.col * images.col_stride;
      for (int64_t t = 0; t < run.count; ++t) {
        to[t * images.col_stride] = narrow<T>(product[r * kCols + first + t] + shift);
      }
    });
  }
}

}  // namespace

// Output channels by output pixels: w times the unfolded input, which is gathered block by block.
template <class T>
void conv2d(Images<const T> x, const Subnetwork<T>& w, const T* bias, Convolution conv, Images<T> y,
            const ParallelFor& parallel_for) {
  using Acc = Accumulator<T>;
  for (int64_t g = 0; g < conv.groups; ++g) {
    const Group group(w.weight, g, conv.groups);
    gemm<Acc, Layout::row_major>(
        group.outs, pixels(y), w.weight.cols(),
        [&](int64_t i, int64_t m, int64_t k, int64_t d, Acc* block) {
          for (int64_t r = 0; r < m; ++r) rebuild(w, group.first_out + i + r, k, d, block + r * kDepth);
        },
        [&](int64_t k, int64_t d, int64_t j, int64_t n, Acc* block) {
          unfold(x, w.weight, group, conv, y, k, d, j, n, kRightStride, block);
        },
        [&](int64_t i, int64_t m, int64_t j, int64_t n, const Acc* product) {
          store_channels(y, group.first_out + i, m, j, n, product, bias);
        },
        parallel_for);
  }
}

// For each phase, input channels by input pixels: w, with output channels and taps as depth, times the unfolded output
// gradient.
template <class T>
void conv2d_grad_input(Images<const T> grad_y, const Subnetwork<T>& w, Convolution conv, Images<T> grad_x,
                       const ParallelFor& parallel_for) {
  using Acc = Accumulator<T>;
  const int64_t phase_rows = std::min(conv.stride[0], grad_x.height);
  const int64_t phase_cols = std::min(conv.stride[1], grad_x.width);
  for (int64_t p = 0; p < phase_rows * phase_cols; ++p) {
    const Phase<T> phase(grad_x, w.weight, conv, p / phase_cols, p % phase_cols);
    const auto readers = static_cast<int64_t>(phase.readers.size());
    for (int64_t g = 0; g < conv.groups; ++g) {
      const Group group(w.weight, g, conv.groups);
      gemm<Acc, Layout::depth_major>(
          group.ins, pixels(phase.pixels), group.outs * readers,
          [&](int64_t i, int64_t m, int64_t k, int64_t d, Acc* block) {
            for (int64_t r = 0; r < d; ++r) {
              const auto& tap = phase.readers[(k + r) % readers];
              const int64_t col = (tap.y * w.weight.width + tap.x) * w.weight.in + i;
              rebuild(w, group.first_out + (k + r) / readers, col, m, block + r * kRows);
            }
          },
          [&](int64_t k, int64_t d, int64_t j, int64_t n, Acc* block) {
            unfold_transposed(grad_y, group, phase, k, d, j, n, kRightStride, block);
          },
          [&](int64_t i, int64_t m, int64_t j, int64_t n, const Acc* product) {
            store_channels<T>(phase.pixels, group.first_in + i, m, j, n, product, nullptr);
          },
          parallel_for);
    }
  }
}

// Columns of the weight by output channels: the unfolded input times the output gradient, with pixels as depth.
template <class T>
void conv2d_grad_weight(Images<const T> grad_y, Images<const T> x, Convolution conv, Owners owners, int update,
                        Weight<T> grad_w, const ParallelFor& parallel_for) {
  using Acc = Accumulator<T>;
  for (int64_t g = 0; g < conv.groups; ++g) {
    const Group group(grad_w, g, conv.groups);
    gemm<Acc, Layout::row_major>(
        grad_w.cols(), group.outs, pixels(grad_y),
        [&](int64_t i, int64_t m, int64_t k, int64_t d, Acc* block) {
          unfold(x, grad_w, group, conv, grad_y, i, m, k, d, kDepth, block);
        },
        [&](int64_t k, int64_t d, int64_t j, int64_t n, Acc* block) {
          for_each_run(grad_y, k, d, [&](int64_t first, const Run& run) {
            for (int64_t t = 0; t < run.count; ++t) {
              const T* from = grad_y.data + run.image * grad_y.batch_stride + run.row * grad_y.row_stride +
                              (run.col + t) * grad_y.col_stride + (group.first_out + j) * grad_y.channel_stride;
              Acc* to = block + (first + t) * kRightStride;
              for (int64_t c = 0; c < n; ++c) to[c] = widen(from[c * grad_y.channel_stride]);
            }
          });
        },
        [&](int64_t i, int64_t m, int64_t j, int64_t n, const Acc* product) {
          for (int64_t c = 0; c < n; ++c) {
            const int64_t row = group.first_out + j + c;
            for_each_entry(grad_w, row, i, m, [&](int64_t r, T* entry) {
              const bool keep = id_at(owners.row(row), i + r, owners.bits) == update - 1;
              *entry = narrow<T>(keep ? product[r * kCols + c] : Acc{0});
            });
          }
        },
        parallel_for);
  }
}

#define PARTKERNELS_INSTANTIATE(T)                                                                                    \
  template void conv2d(Images<const T>, const Subnetwork<T>&, const T*, Convolution, Images<T>, const ParallelFor&);  \
  template void conv2d_grad_input(Images<const T>, const Subnetwork<T>&, Convolution, Images<T>, const ParallelFor&); \
  template void conv2d_grad_weight(Images<const T>, Images<const T>, Convolution, Owners, int, Weight<T>,             \
                                   const ParallelFor&);

PARTKERNELS_INSTANTIATE(float)
PARTKERNELS_INSTANTIATE(double)
PARTKERNELS_INSTANTIATE(bfloat16)

}  // namespace partkernels::cpu
