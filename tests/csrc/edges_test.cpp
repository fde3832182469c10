// Exact results of products with sizes around those of blocks. Entries are small integers, so that sums are exact in
// float in any order.
//
// All memory that an operator allocates, and all results, are filled with NaN first: unwritten memory must not be read,
// and only results may be written.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

#include "check.h"
#include "partkernels/cpu.h"
#include "partkernels/packed_map.h"

using namespace partkernels;

// Both kinds of allocation, since a thread's blocks are aligned.
void* operator new(std::size_t size, std::align_val_t alignment) {
  const std::size_t unit = std::max(static_cast<std::size_t>(alignment), sizeof(void*));
  void* const memory = std::aligned_alloc(unit, (size + unit - 1) / unit * unit);
  if (memory == nullptr) throw std::bad_alloc();
  return std::memset(memory, 0xFF, size);  // NaN in every dtype
}
void* operator new(std::size_t size) { return operator new(size, std::align_val_t(16)); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace {

constexpr int kPartitions = 3;

template <class T>
T in_type(int value) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    return to_bfloat16(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

// Whether a result is the rounded integer.
template <class T>
bool is(T value, int expected) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    return to_float(value) == to_float(in_type<T>(expected));
  } else {
    return value == in_type<T>(expected);
  }
}

// Unordered integers from -3 to 3, and owners.
int mixed(int64_t i, int64_t salt, int count) {
  return static_cast<int>((static_cast<uint64_t>(i) * 0x9E3779B97F4A7C15 + salt * 0xD1B54A32D192ED03) >> 40) % count;
}
int integer(int64_t i, int64_t salt) { return mixed(i, salt, 7) - 3; }
int owner(int64_t i) { return mixed(i, 0, kPartitions); }

// A strided tensor of these integers, initially NaN, with NaN between the entries.
template <class T>
class Numbers {
 public:
  // apart: the minimum distance of two entries.
  Numbers(int64_t count, int64_t apart) : count_(count), apart_(apart), memory_(count * apart + 1) {
    std::memset(memory_.data(), 0xFF, memory_.size() * sizeof(T));
  }
  Numbers& fill(int64_t salt) {
    for (int64_t i = 0; i < count(); ++i) (*this)[i] = in_type<T>(integer(i, salt));
    return *this;
  }
  T* data() { return memory_.data() + 1; }  // at an odd offset
  T& operator[](int64_t i) { return data()[i * apart_]; }
  int64_t count() const { return count_; }

  template <class U = T>
  Matrix<U> matrix(int64_t rows, int64_t cols) {
    return {data(), rows, cols, cols * apart_, apart_};
  }
  // A contiguous weight, or one with gaps.
  template <class U = T>
  Weight<U> weight(int64_t rows, int64_t in, int64_t height, int64_t width) {
    const int64_t pixels = height * width;
    return {data(), rows, in, height, width, in * pixels * apart_, pixels * apart_, width * apart_, apart_};
  }
  template <class U = T>
  cpu::Images<U> images(int64_t batch, int64_t channels, int64_t height, int64_t width) {
    const int64_t pixels = height * width;
    return {data(),          batch,          channels, height, width, channels * pixels * apart_,
            pixels * apart_, width * apart_, apart_};
  }

  bool gaps_are_untouched() const {
    for (size_t i = 0; i < memory_.size(); ++i) {
      const bool is_entry = i >= 1 && (i - 1) % apart_ == 0;
      const T& value = memory_[i];
      T poison;
      std::memset(&poison, 0xFF, sizeof(T));
      if (!is_entry && std::memcmp(&value, &poison, sizeof(T)) != 0) return false;
    }
    return true;
  }

 private:
  int64_t count_, apart_;
  std::vector<T> memory_;
};

// A packed map of owner(row * cols + col).
struct Map {
  std::vector<uint8_t> bytes;
  Owners owners;

  Map(int64_t rows, int64_t cols) : bytes(rows * row_bytes(cols, 2) + 1), owners{bytes.data(), row_bytes(cols, 2), 2} {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        bytes[r * row_bytes(cols, 2) + c / 4] |= static_cast<uint8_t>(owner(r * cols + c) << (c % 4 * 2));
      }
    }
  }
};

template <class T>
void linear_is_exact(int64_t batch, int64_t in, int64_t out, int64_t apart, int active = 2) {
  Numbers<T> x(batch * in, apart), w(out * in, apart), stored(out * in, 1), bias(out, 1), grad_y(batch * out, apart);
  x.fill(1), w.fill(2), stored.fill(3), bias.fill(4), grad_y.fill(5);
  Numbers<T> y(batch * out, apart), grad_x(batch * in, apart), grad_w(out * in, apart);
  const Map map(out, in);
  const Subnetwork<T> subnetwork{w.template weight<const T>(out, in, 1, 1),
                                 map.owners,
                                 kPartitions,
                                 active,
                                 Defaults{DefaultKind::stored, 0, 0, 0},
                                 stored.template weight<const T>(out, in, 1, 1)};
  const auto x_matrix = x.template matrix<const T>(batch, in);
  const auto grad_matrix = grad_y.template matrix<const T>(batch, out);
  cpu::linear<T>(x_matrix, subnetwork, bias.data(), y.matrix(batch, out), on_three_threads);
  cpu::linear_grad_input<T>(grad_matrix, subnetwork, grad_x.matrix(batch, in), on_three_threads);
  cpu::linear_grad_weight<T>(grad_matrix, x_matrix, map.owners, 2, grad_w.weight(out, in, 1, 1), on_three_threads);

  std::vector<int> y_sum(batch * out), grad_x_sum(batch * in), grad_w_sum(out * in);
  std::vector<int> x_integer(batch * in), grad_integer(batch * out);
  for (int64_t i = 0; i < batch * in; ++i) x_integer[i] = integer(i, 1);
  for (int64_t i = 0; i < batch * out; ++i) {
    y_sum[i] = integer(i % out, 4);
    grad_integer[i] = integer(i, 5);
  }
  for (int64_t o = 0; o < out; ++o) {
    for (int64_t i = 0; i < in; ++i) {
      const int64_t entry = o * in + i;
      const int value = integer(entry, owner(entry) < active ? 2 : 3);
      int sum = 0;
      for (int64_t b = 0; b < batch; ++b) {
        y_sum[b * out + o] += value * x_integer[b * in + i];
        grad_x_sum[b * in + i] += value * grad_integer[b * out + o];
        sum += x_integer[b * in + i] * grad_integer[b * out + o];
      }
      grad_w_sum[entry] = owner(entry) == 1 ? sum : 0;
    }
  }
  for (int64_t i = 0; i < batch * out; ++i) CHECK(is(y[i], y_sum[i]));
  for (int64_t i = 0; i < batch * in; ++i) CHECK(is(grad_x[i], grad_x_sum[i]));
  for (int64_t i = 0; i < out * in; ++i) CHECK(is(grad_w[i], grad_w_sum[i]));
  CHECK(y.gaps_are_untouched() && grad_x.gaps_are_untouched() && grad_w.gaps_are_untouched());
}

struct Convolved {
  int64_t batch, height, width, in, out, kernel, stride, padding, dilation, groups;
};

template <class T>
void convolutions_are_exact(const Convolved& size, int64_t apart) {
  const auto& [batch, height, width, in, out, kernel, stride, padding, dilation, groups] = size;
  const int64_t y_height = (height + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1;
  const int64_t y_width = (width + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1;
  const int64_t group_in = in / groups, group_out = out / groups, taps = kernel * kernel, cols = group_in * taps;
  Numbers<T> x(batch * in * height * width, apart), w(out * cols, apart), bias(out, 1);
  Numbers<T> grad_y(batch * out * y_height * y_width, apart);
  x.fill(1), w.fill(2), bias.fill(4), grad_y.fill(5);
  Numbers<T> y(grad_y.count(), apart), grad_x(x.count(), apart), grad_w(w.count(), apart);
  const Map map(out, cols);
  const Subnetwork<T> subnetwork{
      w.template weight<const T>(out, group_in, kernel, kernel), map.owners, kPartitions, 2, Defaults{}, {}};
  const cpu::Convolution conv{{stride, stride}, {padding, padding}, {dilation, dilation}, groups};
  const auto x_images = x.template images<const T>(batch, in, height, width);
  const auto grad_images = grad_y.template images<const T>(batch, out, y_height, y_width);
  cpu::conv2d<T>(x_images, subnetwork, bias.data(), conv, y.images(batch, out, y_height, y_width), on_three_threads);
  cpu::conv2d_grad_input<T>(grad_images, subnetwork, conv, grad_x.images(batch, in, height, width), on_three_threads);
  cpu::conv2d_grad_weight<T>(grad_images, x_images, conv, map.owners, 2, grad_w.weight(out, group_in, kernel, kernel),
                             on_three_threads);

  std::vector<int> y_sum(y.count()), grad_x_sum(x.count()), grad_w_sum(w.count());
  for (int64_t to = 0; to < y.count(); ++to) {
    const int64_t col = to % y_width, row = to / y_width % y_height, o = to / (y_width * y_height) % out;
    const int64_t image = to / (y_width * y_height * out);
    y_sum[to] = integer(o, 4);
    for (int64_t c = 0; c < cols; ++c) {
      const int64_t i = c % group_in, tap_x = c / group_in % kernel, tap_y = c / group_in / kernel;
      const int64_t x_row = row * stride - padding + tap_y * dilation,
                    x_col = col * stride - padding + tap_x * dilation;
      if (x_row < 0 || x_row >= height || x_col < 0 || x_col >= width) continue;
      const int64_t from = ((image * in + o / group_out * group_in + i) * height + x_row) * width + x_col;
      const int64_t entry = o * cols + (i * kernel + tap_y) * kernel + tap_x;
      const int id = owner(o * cols + c), value = id < 2 ? integer(entry, 2) : 0;
      y_sum[to] += value * integer(from, 1);
      grad_x_sum[from] += value * integer(to, 5);
      if (id == 1) grad_w_sum[entry] += integer(from, 1) * integer(to, 5);
    }
  }
  for (int64_t i = 0; i < y.count(); ++i) CHECK(is(y[i], y_sum[i]));
  for (int64_t i = 0; i < x.count(); ++i) CHECK(is(grad_x[i], grad_x_sum[i]));
  for (int64_t i = 0; i < w.count(); ++i) CHECK(is(grad_w[i], grad_w_sum[i]));
  CHECK(y.gaps_are_untouched() && grad_x.gaps_are_untouched() && grad_w.gaps_are_untouched());
}

template <class T>
void all_are_exact() {
  // Sizes around tiles, panels, blocks and batches of every instruction set.
  constexpr int64_t kEdges[] = {0,   1,   2,   8,   9,   15,  16,  17,  31,  32,  33,  63,  64,
                                65,  95,  96,  97,  127, 128, 129, 191, 192, 193, 255, 256, 257,
                                359, 360, 361, 511, 512, 513, 575, 576, 577, 703, 704, 705};
  int64_t apart = 1;
  for (const int64_t edge : kEdges) {
    linear_is_exact<T>(edge, 35, 21, apart);
    linear_is_exact<T>(19, edge, 34, apart);
    linear_is_exact<T>(33, 18, edge, apart);
    apart = 3 - apart;
  }
  linear_is_exact<T>(9, 1030, 70, 1);
  linear_is_exact<T>(32, 1025, 129, 1);
  linear_is_exact<T>(97, 513, 257, 1);
  linear_is_exact<T>(737, 258, 33, 1);
  linear_is_exact<T>(737, 33, 258, 2);
  // Depths for which x is packed several times, and weights that are read in place.
  linear_is_exact<T>(3, 22600, 18, 1);
  linear_is_exact<T>(18, 11300, 17, 2);
  linear_is_exact<T>(35, 2081, 67, 1);
  linear_is_exact<T>(259, 2080, 36, 1, kPartitions);
  for (const int64_t batch : {1, 17, 33, 65}) linear_is_exact<T>(batch, 1056, 50, 1, kPartitions);

  constexpr Convolved kConvolutions[] = {
      {1, 1, 1, 1, 1, 1, 1, 0, 1, 1},      // one product
      {2, 4, 4, 16, 17, 1, 1, 0, 1, 1},    // 32 pixels
      {3, 5, 11, 33, 15, 1, 1, 0, 1, 1},   // 165
      {1, 7, 9, 57, 33, 3, 1, 1, 1, 1},    // a depth of 513
      {2, 9, 13, 6, 10, 3, 2, 2, 2, 2},    // all options at once
      {1, 27, 27, 3, 5, 5, 3, 1, 1, 1},    // nine phases
      {1, 8, 8, 4, 258, 2, 1, 0, 1, 1},    // more channels than columns of a block,
      {1, 4, 4, 258, 4, 2, 1, 1, 1, 1},    // in both directions
      {2, 20, 19, 2, 2, 3, 1, 1, 1, 2},    // 760 pixels, more than a batch, of single channels
      {1, 16, 12, 34, 194, 1, 1, 0, 1, 1}  // more of them than a block's rows
  };
  for (const Convolved& size : kConvolutions) {
    convolutions_are_exact<T>(size, apart);
    apart = 3 - apart;
  }
}

}  // namespace

int main() {
  unless_another_processor_is_needed();
  all_are_exact<bfloat16>();
  all_are_exact<float>();
  if (is_full()) all_are_exact<double>();
}
