// Tests optimiser steps on weights of any strides, entry by entry against the formulas, and gathering and scattering of
// a partition's entries.
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>

#include "check.h"
#include "partkernels/cpu.h"
#include "partkernels/packed_map.h"

using namespace partkernels;

namespace {

// The memory layout of a weight.
struct Layout {
  int64_t rows, in, height, width;
  int64_t row_stride, in_stride, y_stride, x_stride;

  int64_t cols() const { return in * height * width; }
  int64_t size() const { return rows * row_stride + cols() * 2; }
  int64_t at(int64_t row, int64_t col) const {
    const int64_t pixel = col / in;
    return row * row_stride + col % in * in_stride + pixel / width * y_stride + pixel % width * x_stride;
  }
  template <class T>
  Weight<T> of(T* data) const {
    return {data, rows, in, height, width, row_stride, in_stride, y_stride, x_stride};
  }
};

constexpr Layout kLayouts[] = {
    {130, 530, 1, 1, 530, 1, 0, 0},    // a linear weight
    {9, 20, 3, 2, 120, 6, 2, 1},       // a convolution: contiguous,
    {9, 300, 3, 2, 1800, 6, 2, 1},     // with many channels,
    {9, 70, 2, 4, 560, 8, 4, 1},       // with 8 channels moved at once,
    {9, 70, 3, 3, 630, 9, 3, 1},       // 7,
    {9, 70, 5, 5, 1750, 25, 5, 1},     // 2,
    {5, 70, 7, 8, 3920, 56, 8, 1},     // one,
    {3, 5, 9, 10, 450, 90, 10, 1},     // more taps than fit into a word,
    {9, 20, 3, 2, 130, 1, 40, 20},     // channels_last with gaps between the rows,
    {9, 20, 3, 2, 240, 12, 4, 2},      // and with gaps everywhere
    {1, 40000, 1, 1, 40000, 1, 0, 0},  // one row
    {200, 1, 1, 1, 1, 1, 0, 0},        // one column
};

// A random map with about the same number of entries in each partition.
std::vector<uint8_t> random_map(const Layout& layout, int count, const cpu::ParallelFor& parallel_for) {
  const int64_t cols = layout.cols();
  std::vector<uint8_t> map(layout.rows * row_bytes(cols, bits_for(count)));
  std::vector<int64_t> sizes(count, layout.rows * cols / count);
  sizes[0] += layout.rows * cols % count;
  cpu::random_map(layout.rows, cols, sizes, 3, map.data(), parallel_for);
  return map;
}

void steps_follow_their_formulas(const Layout& layout, int count, bool has_map, const cpu::ParallelFor& parallel_for) {
  const int64_t cols = layout.cols();
  const std::vector<uint8_t> map = random_map(layout, count, parallel_for);
  const int bits = bits_for(count);
  const Owners owners{map.data(), row_bytes(cols, bits), bits};

  std::vector<double> p(layout.size()), g(p.size()), m(p.size()), v(p.size());
  for (size_t i = 0; i < p.size(); ++i) {
    p[i] = std::sin(static_cast<double>(i));
    g[i] = std::cos(static_cast<double>(2 * i));
    m[i] = std::sin(static_cast<double>(3 * i));
    v[i] = 1 + std::cos(static_cast<double>(5 * i));
  }
  const Adam adam{0.1, 0.9, 0.99, 1e-8, 0.1, true, 2};
  const Sgd sgd{0.1, 0.9, 0.2, true};
  std::vector<double> adam_p = p, adam_m = m, adam_v = v, sgd_p = p, sgd_buffer = m;
  const Weight<const double> grad = layout.of(static_cast<const double*>(g.data()));
  const Owners given = has_map ? owners : Owners{};
  cpu::adam_step<double>(layout.of(adam_p.data()), grad, layout.of(adam_m.data()), layout.of(adam_v.data()), given,
                         count, adam, parallel_for);
  cpu::sgd_step<double>(layout.of(sgd_p.data()), grad, layout.of(sgd_buffer.data()), given, count, sgd, parallel_for);

  for (int64_t row = 0; row < layout.rows; ++row) {
    for (int64_t col = 0; col < cols; ++col) {
      if (has_map && id_at(owners.row(row), col, bits) != count - 1) continue;
      const int64_t i = layout.at(row, col);
      const double decayed = g[i] + 0.2 * p[i], buffer = 0.9 * m[i] + decayed;
      CHECK(std::abs(sgd_buffer[i] - buffer) < 1e-14);
      CHECK(std::abs(sgd_p[i] - (p[i] - 0.1 * (decayed + 0.9 * buffer))) < 1e-14);
      const double mean = 0.9 * m[i] + 0.1 * g[i], square = 0.99 * v[i] + 0.01 * g[i] * g[i];
      const double direction = mean / (1 - 0.9 * 0.9) / (std::sqrt(square / (1 - 0.99 * 0.99)) + 1e-8);
      CHECK(std::abs(adam_m[i] - mean) < 1e-14);
      CHECK(std::abs(adam_v[i] - square) < 1e-14);
      CHECK(std::abs(adam_p[i] - (0.99 * p[i] - 0.1 * direction)) < 1e-11);
      // All other memory is compared below, and must be unchanged.
      adam_p[i] = sgd_p[i] = p[i];
      adam_m[i] = sgd_buffer[i] = m[i];
      adam_v[i] = v[i];
    }
  }
  CHECK(adam_p == p && adam_m == m && adam_v == v && sgd_p == p && sgd_buffer == m);
}

void entries_go_and_come_back(const Layout& layout, int count, const cpu::ParallelFor& parallel_for) {
  const int64_t cols = layout.cols(), taps = layout.height * layout.width;
  const std::vector<uint8_t> map = random_map(layout, count, parallel_for);
  const int bits = bits_for(count);
  const Owners owners{map.data(), row_bytes(cols, bits), bits};
  std::vector<float> w(layout.size());
  for (size_t i = 0; i < w.size(); ++i) w[i] = static_cast<float>(i);

  std::vector<float> expected;
  std::vector<size_t> places;
  for (int64_t row = 0; row < layout.rows; ++row) {
    for (int64_t j = 0; j < cols; ++j) {
      const int64_t col = j % taps * layout.in + j / taps;  // the taps of a channel together
      if (id_at(owners.row(row), col, bits) != count - 1) continue;
      places.push_back(layout.at(row, col));
      expected.push_back(w[places.back()]);
    }
  }
  std::vector<int64_t> starts(layout.rows + 1);
  cpu::count_entries(layout.rows, cols, owners, count, starts.data(), parallel_for);
  CHECK(starts.back() == static_cast<int64_t>(expected.size()));
  std::vector<float> found(expected.size());
  cpu::gather_entries<float>(layout.of(static_cast<const float*>(w.data())), owners, count, starts.data(), found.data(),
                             parallel_for);
  CHECK(found == expected);

  for (float& value : found) value = -value;
  std::vector<float> changed = w;
  cpu::scatter_entries<float>(found.data(), starts.data(), owners, count, layout.of(changed.data()), parallel_for);
  for (const size_t place : places) {
    CHECK(changed[place] == -w[place]);
    changed[place] = w[place];
  }
  CHECK(changed == w);
}

}  // namespace

int main() {
  unless_another_processor_is_needed();
  for (const cpu::ParallelFor& parallel_for : {cpu::ParallelFor(in_turn), cpu::ParallelFor(on_three_threads)}) {
    for (const Layout& layout : kLayouts) {
      for (const int count : {1, 2, 3, 5, 40}) {
        steps_follow_their_formulas(layout, count, true, parallel_for);
        entries_go_and_come_back(layout, count, parallel_for);
      }
      steps_follow_their_formulas(layout, 1, false, parallel_for);
    }
  }
}
