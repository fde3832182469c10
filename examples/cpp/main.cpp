// A linear layer of subnetwork 2 of 3 on a CPU: y = x w_2^T.
//
// w_2 has the weight's own entries in partitions 1 and 2, and entries drawn from a seed in partition 3. It is never
// materialised: the product rebuilds it piece by piece from the weight, a map with 2 bits per entry, and the seed.
#include <partkernels/cpu.h>
#include <partkernels/packed_map.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

namespace pk = partkernels;

int main() {
  constexpr int64_t kBatch = 32, kIn = 512, kOut = 256;
  constexpr int kCount = 3, kActive = 2;
  std::vector<float> x(kBatch * kIn), weight(kOut * kIn), y(kBatch * kOut);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = 0.05f * std::cos(static_cast<float>(i));

  // The library starts no threads: this function runs its loops, here in the caller's thread.
  const pk::cpu::ParallelFor parallel_for = [](int64_t count, const pk::cpu::Body& body) { body(0, count); };

  // The partition of each entry: at random, with 80 %, 10 % and 10 % of the entries.
  constexpr int64_t kTenth = kOut * kIn / 10;
  const std::vector<int64_t> sizes = {kOut * kIn - 2 * kTenth, kTenth, kTenth};
  const int bits = pk::bits_for(kCount);
  std::vector<uint8_t> map(kOut * pk::row_bytes(kIn, bits));
  pk::cpu::random_map(kOut, kIn, sizes, /*seed=*/1, map.data(), parallel_for);

  const pk::Owners owners = {map.data(), pk::row_bytes(kIn, bits), bits};

  // Uniform in [-scale, scale], with the same bits in each call and on each device.
  constexpr double kScale = 0.05;
  const float step = pk::round_to_bfloat16(static_cast<float>(kScale / 127.5));
  const pk::Defaults defaults = {.kind = pk::DefaultKind::uniform, .step = step, .seed = 2};

  // A matrix is a weight with kernel height and width 1; strides count entries.
  const pk::Weight<const float> entries = {weight.data(), kOut, kIn, 1, 1, /*row_stride=*/kIn, /*in_stride=*/1, 0, 0};
  const pk::Subnetwork<float> subnetwork = {entries, owners, kCount, kActive, defaults, /*stored=*/{}};
  pk::cpu::linear<float>({x.data(), kBatch, kIn, kIn, 1}, subnetwork, /*bias=*/nullptr,
                         {y.data(), kBatch, kOut, kOut, 1}, parallel_for);

  // Compares with the definition, entry by entry.
  for (int64_t out = 0; out < kOut; ++out) {
    std::vector<double> w_2(kIn);
    for (int64_t in = 0; in < kIn; ++in) {
      const int partition = 1 + pk::id_at(owners.row(out), in, bits);
      w_2[in] = partition <= kActive ? weight[out * kIn + in] : pk::default_value(defaults, out, in);
    }
    for (int64_t b = 0; b < kBatch; ++b) {
      double sum = 0;
      for (int64_t in = 0; in < kIn; ++in) sum += x[b * kIn + in] * w_2[in];
      if (!(std::abs(y[b * kOut + out] - sum) <= 1e-4)) {
        std::fprintf(stderr, "y[%d, %d] is %g, not %g\n", int(b), int(out), y[b * kOut + out], sum);
        return 1;
      }
    }
  }
  std::printf("y = x w_2^T on the CPU (%s): as defined\n", pk::cpu::instruction_set());
}
