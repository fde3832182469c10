// The input gradient of a convolution with stride 1 and few input channels: a network's first layer, through which
// every update of an input hyperparameter passes. Vectors run over pixels, so that no lane is idle.
#pragma once

#include "conv2d_indexing.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

// The size of one thread's part of the output gradient, with zeros around it.
constexpr int64_t kPaddedBytes = 256 << 10;

// The zero padding around a convolution's output gradient with which each tap is a constant offset.
struct Padded {
  int64_t width;                 // of a padded row
  int64_t top, left;             // where the image starts; negative if it is cropped
  std::vector<int64_t> offsets;  // of each tap, in the weight's order of memory (y, x)

  template <class T>
  Padded(const Images<T>& grad_x, const Weight<const T>& w, const Convolution& conv)
      : width(grad_x.width + (w.width - 1) * conv.dilation[1]),
        top((w.height - 1) * conv.dilation[0] - conv.padding[0]),
        left((w.width - 1) * conv.dilation[1] - conv.padding[1]) {
    for (int64_t y = w.height - 1; y >= 0; --y) {
      for (int64_t x = w.width - 1; x >= 0; --x) offsets.push_back(y * conv.dilation[0] * width + x * conv.dilation[1]);
    }
  }
};

// sums[i * stride + p] += the sum over channels o in [0, some) and taps t of weights[(i * outs + o) * taps + t] times
// planes[o * plane + p + offsets[t]], for Ins channels i and the Vectors vectors of pixels p.
template <class Acc, int Ins, int Vectors>
void sum_over_taps(const Acc* planes, int64_t plane, int64_t some, const std::vector<int64_t>& offsets,
                   const Acc* weights, int64_t outs, Acc* sums, int64_t stride) {
  using V = Vector<Acc>;
  constexpr int64_t kWidth = kVectorBytes / sizeof(Acc);
  const auto taps = static_cast<int64_t>(offsets.size());
  V total[Ins][Vectors] = {}, chain[Ins][Vectors] = {};
  const int64_t most = chain_of(outs * taps);
  int64_t terms = 0;
  for (int64_t o = 0; o < some; ++o) {
    for (int64_t t = 0; t < taps; ++t) {
      const Acc* const from = planes + o * plane + offsets[t];
      for (int v = 0; v < Vectors; ++v) {
        const V pixels = *reinterpret_cast<const V*>(from + v * kWidth);
        for (int i = 0; i < Ins; ++i) chain[i][v] += weights[(i * outs + o) * taps + t] * pixels;
      }
    }
    terms += taps;
    if (terms + taps > most || o + 1 == some) {
      for (int i = 0; i < Ins; ++i) {
        for (int v = 0; v < Vectors; ++v) {
          total[i][v] += chain[i][v];
          chain[i][v] = V{};
        }
      }
      terms = 0;
    }
  }
  for (int i = 0; i < Ins; ++i) {
    for (int v = 0; v < Vectors; ++v) *reinterpret_cast<V*>(sums + i * stride + v * kWidth) += total[i][v];
  }
}

// w is a dense (rebuilt) weight of at most 4 input channels; one group, stride 1.
template <class T>
void few_channels_grad_input(Images<const T> grad_y, Weight<const T> w, Convolution conv, Images<T> grad_x,
                             const ParallelFor& parallel_for) {
  using Acc = Accumulator<T>;
  const Padded padded(grad_x, w, conv);
  const int64_t outs = w.rows, ins = w.in, taps = w.height * w.width;
  std::vector<Acc> weights(ins * outs * taps);
  for (int64_t o = 0; o < outs; ++o) {
    for_each_entry(w, o, 0, w.cols(), [&](int64_t col, const T* entry) {
      weights[(col % ins * outs + o) * taps + col / ins] = widen(*entry);
    });
  }

  // A tile has the largest number of pixel vectors for which two sums per vector fit in registers.
  constexpr int64_t kWidth = kVectorBytes / sizeof(Acc);
  constexpr int kMost = 3 * kVectorRegisters / 8;
  const int64_t tile = kMost / ins * kWidth;
  const auto sum = ins == 1   ? sum_over_taps<Acc, 1, kMost>
                   : ins == 2 ? sum_over_taps<Acc, 2, kMost / 2>
                   : ins == 3 ? sum_over_taps<Acc, 3, kMost / 3>
                              : sum_over_taps<Acc, 4, kMost / 4>;

  // Each task is a strip of rows of an image. Its planes fit the second-level cache: the planes of all output channels,
  // or of some at a time if even one row of all would be too large.
  const int64_t reach = (w.height - 1) * conv.dilation[0];
  const int64_t fit = kPaddedBytes / static_cast<int64_t>(sizeof(Acc)) / padded.width;  // padded rows
  const int64_t strip = std::clamp<int64_t>(fit / outs - reach, 1, std::max<int64_t>(1, grad_x.height));
  const int64_t some = std::clamp<int64_t>(fit / (strip + reach), 1, outs);
  const int64_t strips = blocks_of(grad_x.height, strip);
  parallel_for(grad_x.batch * strips, [&](int64_t begin, int64_t end) {
    const int64_t plane = (strip + reach) * padded.width + tile + padded.width;
    const int64_t length = blocks_of(strip * padded.width, tile) * tile;
    thread_local std::vector<Acc> planes, sums;  // kept between calls
    planes.resize(some * plane);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t image = task / strips, first = task % strips * strip;
      const int64_t rows = std::min(strip, grad_x.height - first);
      sums.assign(ins * length, Acc{0});
      for (int64_t out = 0; out < outs; out += some) {
        const int64_t channels = std::min(some, outs - out);
        for (int64_t o = 0; o < channels; ++o) {
          const T* const channel = grad_y.data + image * grad_y.batch_stride + (out + o) * grad_y.channel_stride;
          for (int64_t r = 0; r < rows + reach; ++r) {
            const int64_t row = first + r - padded.top;
            const bool exists = 0 <= row && row < grad_y.height;
            copy_padded(channel + row * grad_y.row_stride - padded.left * grad_y.col_stride, grad_y.col_stride,
                        exists ? inside(-padded.left, 1, grad_y.width, padded.width) : Range{0, 0}, padded.width,
                        planes.data() + o * plane + r * padded.width);
          }
        }
        for (int64_t p = 0; p < rows * padded.width; p += tile) {
          sum(planes.data() + p, plane, channels, padded.offsets, weights.data() + out * taps, outs, sums.data() + p,
              length);
        }
      }
      for (int64_t i = 0; i < ins; ++i) {
        for (int64_t r = 0; r < rows; ++r) {
          const Acc* const from = sums.data() + i * length + r * padded.width;
          T* const to =
              grad_x.data + image * grad_x.batch_stride + i * grad_x.channel_stride + (first + r) * grad_x.row_stride;
          for (int64_t c = 0; c < grad_x.width; ++c) to[c * grad_x.col_stride] = narrow<T>(from[c]);
        }
      }
    }
  });
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
