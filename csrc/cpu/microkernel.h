// The multiplication of two packed blocks: the only place where floating-point work is done.
//
// Blocks hold units: an entry of float or double, or in bfloat16, where the processor multiplies them, a pair of
// entries that follow each other along the depth. So all types share one shape of code.
#pragma once

#include "accumulator.h"
#include "isa.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

struct alignas(4) Pair {
  bfloat16 entry[2];
};

#if defined(PARTKERNELS_AVX512_BF16) || defined(PARTKERNELS_NEON_BF16)
constexpr bool kMultipliesBfloat16 = true;
#else
constexpr bool kMultipliesBfloat16 = false;
#endif

template <class T>
struct UnitOf {
  using type = Accumulator<T>;
};
template <>
struct UnitOf<bfloat16> {
  using type = std::conditional_t<kMultipliesBfloat16, Pair, float>;
};

// How many entries along the depth a unit holds.
template <class Unit>
constexpr int64_t kUnitDepth = std::is_same_v<Unit, Pair> ? 2 : 1;

template <class Unit>
using Sum = std::conditional_t<std::is_same_v<Unit, double>, double, float>;

// A block of a product takes at most so many units of depth, 1 KiB of them: a panel and the left operands of a register
// tile then fit the first-level cache together. AMX's register tiles are taller.
template <class Unit>
constexpr int64_t kDepth = (kHasTiles ? 512 : 1024) / sizeof(Unit);

// The right block lies in panels of two vectors' width, each a unit of depth after the other.
template <class Unit>
constexpr int64_t kPanel = 2 * kVectorBytes / sizeof(Unit);

// Rows of a register tile: with two vectors each, their sums leave room for the operands.
constexpr int64_t kTall = kHasTiles ? 32 : kVectorRegisters == 32 ? 12 : 6;

// Whether a block's products are added one after another. Results in bfloat16 are rounded far above what that errs.
template <class Unit>
constexpr bool kInOneChain = std::is_same_v<Unit, Pair>;

// Otherwise the length of a chain of them; sums of chains are then added, and then those of blocks. One chain over the
// whole depth has up to 2.4 times the error of MKL's product at depth 392, and at depth 42, where oneDNN's convolutions
// add few terms in a row, even chains of 32 err too much.
constexpr int64_t chain_of(int64_t depth) { return depth < 128 ? 16 : 32; }

// How the left block, of kRows rows, lies in memory: a row after the other, or a unit of depth of all rows after the
// other. Known to the compiler, since a register tile takes all of the registers that addresses would need.
enum class Layout { row_major, depth_major };

constexpr int64_t kRows = kHasTiles ? 192 : 96;

// How far apart two rows, and two units of depth, lie in it.
template <class Unit, Layout layout>
constexpr int64_t left_row_stride = layout == Layout::row_major ? kDepth<Unit> : 1;
template <Layout layout>
constexpr int64_t left_depth_stride = layout == Layout::row_major ? 1 : kRows;

// A vector that may lie at any multiple of its entries' size.
template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes), aligned(sizeof(T)), may_alias));
};

template <class T>
using Vector = typename VectorOf<T>::type;

// A vector of units, and what multiplies two of them unit by unit.
template <class Unit>
struct Operand {
  using type = Vector<Unit>;
  static type load(const Unit* from) { return *reinterpret_cast<const type*>(from); }
  static type same(const Unit& entry) { return entry - type{}; }
  static void add_product(const type& left, const type& right, Vector<Unit>& sum) { sum += left * right; }
};

#if defined(PARTKERNELS_AVX512_BF16)
template <>
struct Operand<Pair> {
  using type = __m512bh;
  static type load(const Pair* from) { return (__m512bh)_mm512_loadu_si512(from); }
  static type same(const Pair& entry) {
    int bits;
    std::memcpy(&bits, &entry, sizeof(bits));
    return (__m512bh)_mm512_set1_epi32(bits);
  }
  static void add_product(const type& left, const type& right, Vector<float>& sum) {
    sum = (Vector<float>)_mm512_dpbf16_ps((__m512)sum, left, right);
  }
};
#elif defined(PARTKERNELS_NEON_BF16)
template <>
struct Operand<Pair> {
  using type = bfloat16x8_t;
  static type load(const Pair* from) { return vreinterpretq_bf16_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(from))); }
  static type same(const Pair& entry) {
    uint32_t bits;
    std::memcpy(&bits, &entry, sizeof(bits));
    return vreinterpretq_bf16_u32(vdupq_n_u32(bits));
  }
  static void add_product(const type& left, const type& right, Vector<float>& sum) {
    sum = (Vector<float>)vbfdotq_f32((float32x4_t)sum, left, right);
  }
};
#endif

// sum[r][panel] (+)= left[r] times one panel of the right block, for Rows rows; sum's rows are sum_stride apart.
template <class Unit, Layout layout, int Rows>
void multiply_tile(const Unit* left, const Unit* right, int64_t depth, bool accumulate, Sum<Unit>* sum,
                   int64_t sum_stride) {
  using V = Vector<Sum<Unit>>;
  constexpr int64_t kWidth = kVectorBytes / sizeof(Unit);
  using Sums = V[Rows][2];
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < 2; ++v) __builtin_prefetch(sum + r * sum_stride + v * kWidth, 1);
  }
  const auto add_products = [&](int64_t count, Sums& chain) __attribute__((always_inline)) {
    for (int64_t k = 0; k < count; ++k) {
      const auto first = Operand<Unit>::load(right);
      const auto second = Operand<Unit>::load(right + kWidth);
      for (int r = 0; r < Rows; ++r) {
        const auto entry = Operand<Unit>::same(left[r * left_row_stride<Unit, layout>]);
        Operand<Unit>::add_product(entry, first, chain[r][0]);
        Operand<Unit>::add_product(entry, second, chain[r][1]);
      }
      left += left_depth_stride<layout>;
      right += kPanel<Unit>;
    }
  };
  Sums total = {};
  if constexpr (kInOneChain<Unit>) {
    add_products(depth, total);
  } else {
    const int64_t most = chain_of(depth);
    for (int64_t start = 0; start < depth; start += most) {
      Sums chain = {};
      add_products(std::min(most, depth - start), chain);
      for (int r = 0; r < Rows; ++r) {
        for (int v = 0; v < 2; ++v) total[r][v] += chain[r][v];
      }
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < 2; ++v) {
      V* const to = reinterpret_cast<V*>(sum + r * sum_stride + v * kWidth);
      *to = accumulate ? *to + total[r][v] : total[r][v];
    }
  }
}

template <class Unit, Layout layout, int Rows = kTall>
void multiply_rows(int64_t rows, const Unit* left, const Unit* right, int64_t depth, bool accumulate, Sum<Unit>* sum,
                   int64_t sum_stride) {
  if constexpr (Rows > 0) {
    if (rows == Rows) {
      multiply_tile<Unit, layout, Rows>(left, right, depth, accumulate, sum, sum_stride);
    } else {
      multiply_rows<Unit, layout, Rows - 1>(rows, left, right, depth, accumulate, sum, sum_stride);
    }
  }
}

#if !defined(PARTKERNELS_AMX)
// product[i][j] (+)= the sum over k in [0, depth) units of left(i, k) right(k, j), for i in [0, rows) and whole panels
// of j up to cols. Panel p of the right block starts at right + p * kPanel * kDepth.
template <class Unit, Layout layout>
void multiply(const Unit* left, const Unit* right, int64_t rows, int64_t cols, int64_t depth, bool accumulate,
              Sum<Unit>* product, int64_t product_stride) {
  for (int64_t j = 0; j < cols; j += kPanel<Unit>) {
    for (int64_t i = 0; i < rows; i += kTall) {
      const Unit* const part = left + i * left_row_stride<Unit, layout>;
      multiply_rows<Unit, layout>(std::min(kTall, rows - i), part, right + j * kDepth<Unit>, depth, accumulate,
                                  product + i * product_stride + j, product_stride);
    }
  }
}

// What a thread holds while it multiplies: nothing, but for AMX.
struct Tiles {};
#endif

}  // namespace partkernels::cpu::PARTKERNELS_ISA
