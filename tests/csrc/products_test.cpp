// The C++ library used as a C++ project would use it: no Python, no torch, its own threads.
#include <cmath>
#include <thread>
#include <vector>

#include "check.h"
#include "partkernels/cpu.h"
#include "partkernels/packed_map.h"

using namespace partkernels;

namespace {

void in_turn(int64_t count, const cpu::Body& body) {
  for (int64_t i = 0; i < count; ++i) body(i, i + 1);
}

void on_three_threads(int64_t count, const cpu::Body& body) {
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < 3; ++t) threads.emplace_back([&, t] { body(count * t / 3, count * (t + 1) / 3); });
  for (std::thread& thread : threads) thread.join();
}

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
  const cpu::Owners owners{map.data(), row_bytes(kIn, bits), bits};

  const Defaults defaults{DefaultKind::uniform, 0.001f, 1, 0};
  const cpu::Subnetwork<double> subnetwork{{w.data(), kOut, kIn, 1, 1, kIn, 1, 0, 0}, owners, 3, 2, defaults, {}};
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

}  // namespace

int main() {
  linear_multiplies_by_the_subnetworks_weight(in_turn);
  linear_multiplies_by_the_subnetworks_weight(on_three_threads);
}
