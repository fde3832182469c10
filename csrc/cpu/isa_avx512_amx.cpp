#include "isa_includes.h"

#if defined(PARTKERNELS_X86_TARGETS)
#include "amx.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,fma")
#define PARTKERNELS_ISA avx512_amx
#define PARTKERNELS_AVX2
#define PARTKERNELS_AVX512
#define PARTKERNELS_AVX512_BF16
#define PARTKERNELS_AMX
#include "conv2d.h"
#include "linear.h"

namespace partkernels::cpu {

// The operators of avx512_bf16, except for bfloat16 products.
const Operators& avx512_amx_operators() {
  static const Operators operators = [] {
    Operators all = avx512_bf16_operators();
    OperatorsOn<bfloat16>& products = all.on_bfloat16;
    products.linear = avx512_amx::linear<bfloat16>;
    products.linear_grad_input = avx512_amx::linear_grad_input<bfloat16>;
    products.linear_grad_weight = avx512_amx::linear_grad_weight<bfloat16>;
    products.conv2d = avx512_amx::conv2d<bfloat16>;
    products.conv2d_grad_input = avx512_amx::conv2d_grad_input<bfloat16>;
    products.conv2d_grad_weight = avx512_amx::conv2d_grad_weight<bfloat16>;
    return all;
  }();
  return operators;
}

// Computes a product that is exact in float, of two blocks in which all rows and columns differ, twice and adds both.
bool avx512_amx_multiplies_rightly() {
  using namespace avx512_amx;
  constexpr int64_t kSize = 32, kUnits = 17;
  constexpr Layout layout = Layout::depth_major;
  const auto integer = [](int64_t n) { return static_cast<float>(n % 251 - 125); };
  const auto left = [&](int64_t i, int64_t k) { return integer(37 * i + 101 * k); };
  const auto right = [&](int64_t k, int64_t j) { return integer(59 * k + 83 * j); };
  Workspace<Pair>& space = workspace<Pair>();
  for (int64_t k = 0; k < kUnits; ++k) {
    for (int64_t i = 0; i < kSize; ++i) {
      space.left[i * left_row_stride<Pair, layout> + k * left_depth_stride<layout>] = {
          {to_bfloat16(left(i, 2 * k)), to_bfloat16(left(i, 2 * k + 1))}};
      space.right[k * kPanel<Pair> + i] = {{to_bfloat16(right(2 * k, i)), to_bfloat16(right(2 * k + 1, i))}};
    }
  }
  {
    const Tiles tiles;
    for (const bool again : {false, true}) {
      multiply<Pair, layout>(space.left, space.right, kSize, kSize, kUnits, again, space.product, kCols);
    }
  }
  for (int64_t i = 0; i < kSize; ++i) {
    for (int64_t j = 0; j < kSize; ++j) {
      float sum = 0;
      for (int64_t k = 0; k < 2 * kUnits; ++k) sum += 2 * left(i, k) * right(k, j);
      if (space.product[i * kCols + j] != sum) return false;
    }
  }
  return true;
}

}  // namespace partkernels::cpu
#endif
