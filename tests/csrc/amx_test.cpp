// Compares the AMX emulator with known answers, and checks that AMX is not used on processors with faulty tiles.
#include "amx.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "emulated_amx.h"
#include "partkernels/cpu.h"

using namespace partkernels;
namespace amx = cpu::amx;

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kTiny = 0x1p-130f;  // not a normal number

uint32_t pair(float even, float odd) { return to_bfloat16(even).bits | uint32_t{to_bfloat16(odd).bits} << 16; }

// A sum of 2 rows by 3 columns, with 2 pairs each.
void small_tiles_multiply_as_the_manual_says() {
  amx::Configuration tiles;
  tiles.palette = 1;
  tiles.rows[0] = 2;
  tiles.row_bytes[0] = 3 * 4;
  tiles.rows[1] = 2;
  tiles.row_bytes[1] = 2 * 4;
  tiles.rows[2] = 2;
  tiles.row_bytes[2] = 3 * 4;
  tiles.rows[3] = 16;
  tiles.row_bytes[3] = 64;
  amx::configure(tiles);

  float sum[2][5] = {{100, 200, 300, kNan, kNan}, {400, 500, 600, kNan, kNan}};
  const uint32_t left[2][4] = {{pair(1, 2), pair(3, 4)}, {pair(5, 6), pair(7, 8)}};
  const uint32_t right[2][3] = {{pair(1, 10), pair(2, 20), pair(3, 30)}, {pair(4, 40), pair(5, 50), pair(6, 60)}};
  amx::load<0>(sum, sizeof(sum[0]));
  amx::load<1>(left, sizeof(left[0]));
  amx::load<2>(right, sizeof(right[0]));
  amx::add_product<0, 1, 2>();
  amx::store<0>(sum, sizeof(sum[0]));
  const float expected[2][3] = {{100 + 1 + 20 + 12 + 160, 200 + 2 + 40 + 15 + 200, 300 + 3 + 60 + 18 + 240},
                                {400 + 5 + 60 + 28 + 320, 500 + 10 + 120 + 35 + 400, 600 + 15 + 180 + 42 + 480}};
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 3; ++j) CHECK(sum[i][j] == expected[i][j]);
    CHECK(std::isnan(sum[i][3]) && std::isnan(sum[i][4]));  // beyond the tile
  }
  float all[16][16];
  amx::store<3>(all, sizeof(all[0]));
  CHECK(std::isnan(all[0][0]) && std::isnan(all[15][15]));  // never written
  amx::zero<3>();
  amx::store<3>(all, sizeof(all[0]));
  CHECK(all[0][0] == 0 && all[15][15] == 0);
  amx::release();
}

// One sum of two pairs.
float sum_of(float before, const uint32_t (&left)[2], const uint32_t (&right)[2]) {
  amx::Configuration tiles;
  tiles.palette = 1;
  tiles.rows[5] = tiles.rows[6] = 1;
  tiles.rows[7] = 2;
  tiles.row_bytes[5] = tiles.row_bytes[7] = 4;
  tiles.row_bytes[6] = 8;
  amx::configure(tiles);
  amx::load<5>(&before, 4);
  amx::load<6>(left, 8);
  amx::load<7>(right, 4);
  amx::add_product<5, 6, 7>();
  amx::store<5>(&before, 4);
  amx::release();
  return before;
}

void sums_are_added_in_the_manuals_order_and_tiny_numbers_are_0() {
  const uint32_t ones[2] = {pair(1, 1), pair(1, 1)};
  // Even entries are added, then odd ones, then both to the previous sum: no other order gives these results.
  CHECK(sum_of(1, {pair(0x1p30f, 0x1p-10f), pair(-0x1p30f, 0x1p-10f)}, ones) == 1 + 0x1p-9f);
  CHECK(sum_of(0, {pair(0x1p30f, -0x1p30f), pair(1, 0)}, ones) == 0);
  CHECK(sum_of(-0x1p30f, {pair(0x1p30f, 0), pair(1, 0)}, ones) == 0);
  CHECK(sum_of(1, {pair(0x1p-24f, 0), pair(0, 0)}, ones) == 1);  // a tie, to even
  CHECK(sum_of(1 + 0x1p-23f, {pair(0x1p-24f, 0), pair(0, 0)}, ones) == 1 + 0x1p-22f);
  CHECK(sum_of(kTiny, {pair(0, 0), pair(0, 0)}, ones) == 0);
  CHECK(sum_of(0, {pair(kTiny, 0), pair(0, 0)}, {pair(0x1p20f, 1), pair(1, 1)}) == 0);
  CHECK(sum_of(0, {pair(0x1p-100f, 0), pair(0, 0)}, {pair(0x1p-30f, 1), pair(1, 1)}) == 0);
  CHECK(std::isnan(sum_of(0, {pair(0, 0), pair(0, 0)}, {pair(kNan, 0), pair(0, 0)})));
  CHECK(std::isnan(sum_of(kNan, {pair(0, 0), pair(0, 0)}, ones)));
}

// The next best set is used, and the report gives the reason.
void it_is_not_taken(const char* why) {
  CHECK(cpu::instruction_set() == std::string("avx512_bf16"));
  CHECK(cpu::instruction_sets().front().lacking == why);
}

}  // namespace

int main(int, char** arguments) {
  const std::string fault = arguments[1];
  if (!amx::has_tiles() || __builtin_cpu_supports("avx512bf16") == 0) {
    std::printf("skipped: this processor has AMX, or no avx512_bf16\n");
    return 77;
  }
  amx::faults.refuses = fault == "refuses";
  amx::faults.drops_a_row = fault == "drops_a_row";
  amx::faults.swaps_pairs = fault == "swaps_pairs";
  amx::faults.keeps_no_sums = fault == "keeps_no_sums";
  if (fault == "none") {
    small_tiles_multiply_as_the_manual_says();
    sums_are_added_in_the_manuals_order_and_tiny_numbers_are_0();
    CHECK(cpu::instruction_set() == std::string("avx512_amx"));
  } else if (fault == "refuses") {
    it_is_not_taken("amx-tile (the system does not permit it)");
  } else {
    it_is_not_taken("amx-bf16 (a trial product was wrong)");
  }
}
