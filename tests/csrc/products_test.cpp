// Uses the C++ library like a C++ project: without Python and torch, and with its own threads.
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <thread>
#include <type_traits>
#include <vector>

#include "check.h"
#include "partkernels/cpu.h"
#include "partkernels/packed_map.h"

using namespace partkernels;

namespace {

void linear_multiplies_by_the_subnetworks_weight(const cpu::ParallelFor& parallel_for) {
  constexpr int64_t kBatch = 201, kIn = 530, kOut = 197;
  std::vector<double> x(kBatch * kIn), w(kOut * kIn), bias(kOut), y(kBatch * kOut);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<double>(i));
  for (size_t i = 0; i < w.size(); ++i) w[i] = std::cos(static_cast<double>(i));
  for (size_t i = 0; i < bias.size(); ++i) bias[i] = static_cast<double>(i);

  constexpr int64_t kTotal = kOut * kIn;
  const std::vector<int64_t> sizes = {kTotal * 8 / 10, kTotal / 10, kTotal - kTotal * 8 / 10 - kTotal / 10};
  const int bits = bits_for(3);
  std::vector<uint8_t> map(kOut * row_bytes(kIn, bits));
  cpu::random_map(kOut, kIn, sizes, 42, map.data(), parallel_for);
  const Owners owners{map.data(), row_bytes(kIn, bits), bits};

  const Defaults defaults{DefaultKind::uniform, 0.001f, 1, 0};
  const Subnetwork<double> subnetwork{{w.data(), kOut, kIn, 1, 1, kIn, 1, 0, 0}, owners, 3, 2, defaults, {}};
  cpu::linear<double>({x.data(), kBatch, kIn, kIn, 1}, subnetwork, bias.data(), {y.data(), kBatch, kOut, kOut, 1},
                      parallel_for);

  std::vector<int64_t> counted(3);
  for (int64_t row = 0; row < kOut; ++row) {
    for (int64_t col = 0; col < kIn; ++col) ++counted[id_at(owners.row(row), col, bits)];
  }
  CHECK(counted == sizes);
  for (int64_t b = 0; b < kBatch; b += 10) {
    for (int64_t o = 0; o < kOut; o += 7) {
      double sum = bias[o];
      for (int64_t i = 0; i < kIn; ++i) {
        const bool live = id_at(owners.row(o), i, bits) < 2;
        sum += x[b * kIn + i] * (live ? w[o * kIn + i] : default_value(defaults, o, i));
      }
      CHECK(std::abs(sum - y[b * kOut + o]) < 1e-12 * kIn);
    }
  }
}

// Rows more than 2^31 entries apart, in address space that is almost entirely unallocated.
void offsets_need_more_than_32_bits() {
  constexpr int64_t kFar = (int64_t{1} << 31) + 64, kIn = 70, kOut = 3, kBatch = 3;
  constexpr size_t kBytes = 3 * kFar * sizeof(float);
  float* far[3];  // x, w and y
  for (float*& data : far) {
    void* const pages =
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(pages != MAP_FAILED);
    data = static_cast<float*>(pages);
  }
  float *const x = far[0], *const w = far[1], *const y = far[2];
  for (int64_t row = 0; row < 3; ++row) {
    for (int64_t i = 0; i < kIn; ++i) {
      x[row * kFar + i] = static_cast<float>(row + i % 5);
      w[row * kFar + i] = static_cast<float>(2 * row + i % 3);
    }
  }
  const std::vector<uint8_t> map(kOut * row_bytes(kIn, 2), 0x40);  // the last entry of each byte is in partition 2
  const Owners owners{map.data(), row_bytes(kIn, 2), 2};
  const Subnetwork<float> subnetwork{{w, kOut, kIn, 1, 1, kFar, 1, 0, 0}, owners, 3, 1, Defaults{}, {}};
  cpu::linear<float>({x, kBatch, kIn, kFar, 1}, subnetwork, nullptr, {y, kBatch, kOut, kFar, 1}, in_turn);
  for (int64_t b = 0; b < kBatch; ++b) {
    for (int64_t o = 0; o < kOut; ++o) {
      float sum = 0;
      for (int64_t i = 0; i < kIn; ++i) sum += i % 4 == 3 ? 0 : x[b * kFar + i] * w[o * kFar + i];
      CHECK(y[b * kFar + o] == sum);
    }
  }
  for (float* const data : far) munmap(data, kBytes);
}

template <class T>
T in_type(double value) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    return to_bfloat16(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

// With integers, so that results do not depend on the order of sums. Rows are finished in several pieces; the last
// register tile and panel are incomplete.
template <class T>
void weight_gradients_of_wide_layers_are_of_their_partition(int64_t batch, const cpu::ParallelFor& parallel_for) {
  constexpr int64_t kIn = 2118, kOut = 29;
  std::vector<T> x(batch * kIn), grad_y(batch * kOut), grad_w(kOut * kIn, std::numeric_limits<T>::quiet_NaN());
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<T>(i % 7) - 3;
  for (size_t i = 0; i < grad_y.size(); ++i) grad_y[i] = static_cast<T>(i % 5) - 2;
  std::vector<uint8_t> map(kOut * row_bytes(kIn, 2));
  cpu::random_map(kOut, kIn, {kOut * kIn / 2, kOut * kIn - kOut * kIn / 2 - 1, 1}, 3, map.data(), parallel_for);
  const Owners owners{map.data(), row_bytes(kIn, 2), 2};
  cpu::linear_grad_weight<T>({grad_y.data(), batch, kOut, kOut, 1}, {x.data(), batch, kIn, kIn, 1}, owners, 2,
                             {grad_w.data(), kOut, kIn, 1, 1, kIn, 1, 0, 0}, parallel_for);
  for (int64_t o = 0; o < kOut; ++o) {
    for (int64_t i = 0; i < kIn; ++i) {
      T sum = 0;
      for (int64_t b = 0; b < batch; ++b) sum += grad_y[b * kOut + o] * x[b * kIn + i];
      CHECK(grad_w[o * kIn + i] == (id_at(owners.row(o), i, 2) == 1 ? sum : 0));
    }
  }
}

// The results of a layer's three products.
template <class T>
std::vector<T> products(int64_t batch, int64_t in, int64_t out, int active, const cpu::ParallelFor& parallel_for) {
  std::vector<T> x(batch * in), w(out * in), grad_y(batch * out), results(batch * out + batch * in + out * in);
  for (size_t i = 0; i < x.size(); ++i) x[i] = in_type<T>(std::sin(static_cast<double>(i)));
  for (size_t i = 0; i < w.size(); ++i) w[i] = in_type<T>(std::cos(static_cast<double>(i)));
  for (size_t i = 0; i < grad_y.size(); ++i) grad_y[i] = in_type<T>(std::cos(static_cast<double>(3 * i)));
  std::vector<uint8_t> map(out * row_bytes(in, 2));
  cpu::random_map(out, in, {out * in - out * in / 3 - 1, out * in / 3, 1}, 3, map.data(), parallel_for);
  const Owners owners{map.data(), row_bytes(in, 2), 2};
  const Defaults defaults{DefaultKind::uniform, 0.001f, 1, 0};
  const Subnetwork<T> subnetwork{{w.data(), out, in, 1, 1, in, 1, 0, 0}, owners, 3, active, defaults, {}};
  T *const y = results.data(), *const grad_x = y + batch * out, *const grad_w = grad_x + batch * in;
  cpu::linear<T>({x.data(), batch, in, in, 1}, subnetwork, nullptr, {y, batch, out, out, 1}, parallel_for);
  cpu::linear_grad_input<T>({grad_y.data(), batch, out, out, 1}, subnetwork, {grad_x, batch, in, in, 1}, parallel_for);
  cpu::linear_grad_weight<T>({grad_y.data(), batch, out, out, 1}, {x.data(), batch, in, in, 1}, owners, 2,
                             {grad_w, out, in, 1, 1, in, 1, 0, 0}, parallel_for);
  return results;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <class T>
void results_depend_neither_on_threads_nor_on_others_who_call() {
  for (const int64_t batch : {5, 401}) {
    for (const int active : {1, 3}) {
      if (!is_full() && active != (batch == 5 ? 3 : 1)) continue;
      const std::vector<T> expected = products<T>(batch, 544, 197, active, in_turn);
      CHECK(same_bits(products<T>(batch, 544, 197, active, on_three_threads), expected));
      std::vector<T> together[2];
      std::thread other([&] { together[1] = products<T>(batch, 544, 197, active, in_turn); });
      together[0] = products<T>(batch, 544, 197, active, on_three_threads);
      other.join();
      CHECK(same_bits(together[0], expected) && same_bits(together[1], expected));
    }
  }
}

struct Size {
  int64_t batch, channels, height, width;
  int64_t count() const { return batch * channels * height * width; }
};

template <class T>
cpu::Images<T> images(T* data, const Size& size) {
  const int64_t pixels = size.height * size.width;
  return {data, size.batch, size.channels, size.height, size.width, size.channels * pixels, pixels, size.width, 1};
}

// Strides, padding, dilation and groups at once, compared with sums over every (output pixel, tap).
void convolutions_multiply_by_the_subnetworks_weight(const cpu::ParallelFor& parallel_for) {
  const cpu::Convolution conv{{2, 1}, {2, 1}, {1, 2}, 2};
  const Size x_size{3, 6, 9, 13}, y_size{3, 10, 6, 11};
  constexpr int64_t kIn = 3, kHeight = 3, kWidth = 3, kCols = kIn * kHeight * kWidth;
  std::vector<double> x(x_size.count()), grad_y(y_size.count()), w(y_size.channels * kCols);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<double>(i));
  for (size_t i = 0; i < grad_y.size(); ++i) grad_y[i] = std::cos(static_cast<double>(i));
  for (size_t i = 0; i < w.size(); ++i) w[i] = std::sin(static_cast<double>(2 * i + 1));
  const int bits = bits_for(3);
  std::vector<uint8_t> map(y_size.channels * row_bytes(kCols, bits));
  cpu::random_map(y_size.channels, kCols, {90, 90, 90}, 7, map.data(), parallel_for);
  const Owners owners{map.data(), row_bytes(kCols, bits), bits};
  const Defaults defaults{DefaultKind::normal, 0.01f, 5, 6};
  const auto weight = [](auto* data) {
    return Weight<std::remove_reference_t<decltype(*data)>>{data,   10, kIn, kHeight, kWidth, kCols, kHeight * kWidth,
                                                            kWidth, 1};
  };
  const Subnetwork<double> subnetwork{weight(static_cast<const double*>(w.data())), owners, 3, 2, defaults, {}};

  std::vector<double> y(y_size.count(), NAN), grad_x(x_size.count(), NAN), grad_w(w.size(), NAN);
  const auto x_images = images(static_cast<const double*>(x.data()), x_size);
  const auto grad_y_images = images(static_cast<const double*>(grad_y.data()), y_size);
  cpu::conv2d<double>(x_images, subnetwork, nullptr, conv, images(y.data(), y_size), parallel_for);
  cpu::conv2d_grad_input<double>(grad_y_images, subnetwork, conv, images(grad_x.data(), x_size), parallel_for);
  cpu::conv2d_grad_weight<double>(grad_y_images, x_images, conv, owners, 2, weight(grad_w.data()), parallel_for);

  std::vector<double> y_sum(y.size()), grad_x_sum(grad_x.size()), grad_w_sum(grad_w.size());
  for (int64_t out = 0; out < y_size.count(); ++out) {
    const int64_t col = out % y_size.width, row = out / y_size.width % y_size.height;
    const int64_t o = out / (y_size.width * y_size.height) % y_size.channels;
    const int64_t image = out / (y_size.width * y_size.height * y_size.channels);
    for (int64_t tap = 0; tap < kCols; ++tap) {
      const int64_t i = tap % kIn, tap_x = tap / kIn % kWidth, tap_y = tap / kIn / kWidth;
      const int64_t x_row = row * 2 - 2 + tap_y, x_col = col - 1 + 2 * tap_x;
      if (x_row < 0 || x_row >= x_size.height || x_col < 0 || x_col >= x_size.width) continue;
      const int64_t in = ((image * 6 + o / 5 * kIn + i) * x_size.height + x_row) * x_size.width + x_col;
      const int64_t entry = o * kCols + (i * kHeight + tap_y) * kWidth + tap_x;
      const int id = id_at(owners.row(o), tap, bits);
      const double value = id < 2 ? w[entry] : default_value(defaults, o, tap);
      y_sum[out] += value * x[in];
      grad_x_sum[in] += value * grad_y[out];
      if (id == 1) grad_w_sum[entry] += x[in] * grad_y[out];
    }
  }
  for (size_t i = 0; i < y.size(); ++i) CHECK(std::abs(y[i] - y_sum[i]) < 1e-12);
  for (size_t i = 0; i < grad_x.size(); ++i) CHECK(std::abs(grad_x[i] - grad_x_sum[i]) < 1e-12);
  for (size_t i = 0; i < grad_w.size(); ++i) CHECK(std::abs(grad_w[i] - grad_w_sum[i]) < 1e-12);
}

}  // namespace

int main() {
  unless_another_processor_is_needed();
  offsets_need_more_than_32_bits();
  results_depend_neither_on_threads_nor_on_others_who_call<float>();
  results_depend_neither_on_threads_nor_on_others_who_call<double>();
  results_depend_neither_on_threads_nor_on_others_who_call<bfloat16>();
  for (const cpu::ParallelFor& parallel_for : {cpu::ParallelFor(in_turn), cpu::ParallelFor(on_three_threads)}) {
    linear_multiplies_by_the_subnetworks_weight(parallel_for);
    for (const int64_t batch : {1, 37, 300}) {
      weight_gradients_of_wide_layers_are_of_their_partition<float>(batch, parallel_for);
      weight_gradients_of_wide_layers_are_of_their_partition<double>(batch, parallel_for);
    }
    convolutions_multiply_by_the_subnetworks_weight(parallel_for);
  }
}
