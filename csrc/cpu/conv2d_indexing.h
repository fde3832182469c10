// The positions of pixels in images, and of the weight's entries that are multiplied with them.
#pragma once

#include "pack.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

// The number of pixels of an image batch. Pixels, numbered over (image, row, column), are one dimension of every
// product here.
template <class T>
int64_t pixels(const Images<T>& images) {
  return images.batch * images.height * images.width;
}

// A run of pixels in one image row.
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

// The taps of a kernel, numbered like the columns of a weight: (y, x, i).
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

inline Range inside(int64_t from, int64_t step, int64_t limit, int64_t count) {
  const int64_t begin = from >= 0 ? 0 : (-from + step - 1) / step;
  const int64_t end = from >= limit ? 0 : (limit - 1 - from) / step + 1;
  return {std::min(begin, count), std::clamp<int64_t>(end, std::min(begin, count), count)};
}

// out[t] = from[t * stride], in T or its accumulator, for t in the range, 0 elsewhere in [0, count).
template <class T, class Out>
void copy_padded(const T* from, int64_t stride, Range range, int64_t count, Out* out) {
  std::fill(out, out + range.begin, Out{});
  copy(from + range.begin * stride, stride, range.end - range.begin, out + range.begin);
  std::fill(out + range.end, out + count, Out{});
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
