#include <cstring>

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
template <class T>
struct Group {
  int64_t first_in, first_out, ins, outs;

  Group(const Weight<T>& weight, int64_t group, int64_t groups)
      : first_in(group * weight.in),
        first_out(group * (weight.rows / groups)),
        ins(weight.in),
        outs(weight.rows / groups) {}
};

// block[r * stride + p] = what tap col + r multiplies to make output pixel begin + p: rows of the unfolded input.
template <class T, class W, class Y>
void unfold(const Images<const T>& x, const Weight<W>& weight, const Group<W>& group, const Convolution& conv,
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

// block[r * stride + p] = what entry (out, y, x) number depth + r of the kernel multiplies to make input pixel
// begin + p: rows of the unfolded output gradient. Depth runs over (output channel, y, x).
template <class T, class X>
void unfold_transposed(const Images<const T>& grad_y, const Weight<const T>& weight, const Group<const T>& group,
                       const Convolution& conv, const Images<X>& x, int64_t depth, int64_t rows, int64_t begin,
                       int64_t count, int64_t stride, Accumulator<T>* block) {
  const int64_t kernel = weight.height * weight.width;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t tap_y = (depth + r) % kernel / weight.width;
    const int64_t tap_x = (depth + r) % weight.width;
    const T* channel = grad_y.data + (group.first_out + (depth + r) / kernel) * grad_y.channel_stride;
    Accumulator<T>* out = block + r * stride;
    for_each_run(x, begin, count, [&](int64_t first, const Run& run) {
      // The output pixel whose tap (y, x) reads this input pixel, where there is one: position / stride.
      const int64_t row = run.row + conv.padding[0] - tap_y * conv.dilation[0];
      const int64_t col = run.col + conv.padding[1] - tap_x * conv.dilation[1];
      const bool row_read = row >= 0 && row % conv.stride[0] == 0 && row / conv.stride[0] < grad_y.height;
      const T* image_row = channel + run.image * grad_y.batch_stride + row / conv.stride[0] * grad_y.row_stride;
      if (!row_read) {
        std::fill(out + first, out + first + run.count, Accumulator<T>{0});
      } else if (conv.stride[1] == 1) {
        copy_padded(image_row + col * grad_y.col_stride, grad_y.col_stride, inside(col, 1, grad_y.width, run.count),
                    run.count, out + first);
      } else {
        for (int64_t t = 0; t < run.count; ++t) {
          const int64_t position = col + t;
          const bool read = position >= 0 && position % conv.stride[1] == 0 && position / conv.stride[1] < grad_y.width;
          out[first + t] = read ? widen(image_row[position / conv.stride[1] * grad_y.col_stride]) : Accumulator<T>{0};
        }
      }
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
    const Group<const T> group(w.weight, g, conv.groups);
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

// Input channels by input pixels: w, with taps and output channels as depth, times the unfolded output gradient.
template <class T>
void conv2d_grad_input(Images<const T> grad_y, const Subnetwork<T>& w, Convolution conv, Images<T> grad_x,
                       const ParallelFor& parallel_for) {
  using Acc = Accumulator<T>;
  const int64_t kernel = w.weight.height * w.weight.width;
  for (int64_t g = 0; g < conv.groups; ++g) {
    const Group<const T> group(w.weight, g, conv.groups);
    gemm<Acc, Layout::depth_major>(
        group.ins, pixels(grad_x), group.outs * kernel,
        [&](int64_t i, int64_t m, int64_t k, int64_t d, Acc* block) {
          for (int64_t r = 0; r < d; ++r) {
            const int64_t row = group.first_out + (k + r) / kernel;
            rebuild(w, row, (k + r) % kernel * w.weight.in + i, m, block + r * kRows);
          }
        },
        [&](int64_t k, int64_t d, int64_t j, int64_t n, Acc* block) {
          unfold_transposed(grad_y, w.weight, group, conv, grad_x, k, d, j, n, kRightStride, block);
        },
        [&](int64_t i, int64_t m, int64_t j, int64_t n, const Acc* product) {
          store_channels<T>(grad_x, group.first_in + i, m, j, n, product, nullptr);
        },
        parallel_for);
  }
}

// Columns of the weight by output channels: the unfolded input times the output gradient, with pixels as depth.
template <class T>
void conv2d_grad_weight(Images<const T> grad_y, Images<const T> x, Convolution conv, Owners owners, int update,
                        Weight<T> grad_w, const ParallelFor& parallel_for) {
  using Acc = Accumulator<T>;
  for (int64_t g = 0; g < conv.groups; ++g) {
    const Group<T> group(grad_w, g, conv.groups);
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
