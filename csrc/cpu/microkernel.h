// Multiplies two packed blocks: the floating-point work of the blocked products.
//
// Blocks consist of units. A unit is one entry of float or double; for bfloat16, on processors that multiply it, a unit
// is a pair of entries that are adjacent along the depth. So all types share the same code.
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

// The number of entries along the depth in a unit.
template <class Unit>
constexpr int64_t kUnitDepth = std::is_same_v<Unit, Pair> ? 2 : 1;

template <class Unit>
using Sum = std::conditional_t<std::is_same_v<Unit, double>, double, float>;

// The maximum number of units of depth in a block, 1 KiB: a panel and the left operands of a register tile then fit the
// first-level cache together. Register tiles for AMX are taller.
template <class Unit>
constexpr int64_t kDepth = (kHasTiles ? 512 : 1024) / sizeof(Unit);

// The right block consists of panels that are two vectors wide, stored one unit of depth after another.
template <class Unit>
constexpr int64_t kPanel = 2 * kVectorBytes / sizeof(Unit);

// Rows of a register tile: with two vectors each, their sums leave registers for the operands.
constexpr int64_t kTall = kHasTiles ? 32 : kVectorRegisters == 32 ? 12 : 6;

// Whether a block's products are added in a single chain. bfloat16's rounding error is far larger than that of the
// chain.
template <class Unit>
constexpr bool kInOneChain = std::is_same_v<Unit, Pair>;

// Otherwise, the length of a chain: products are added in chains, then the chains of a block, then the blocks. A single
// chain over the whole depth has up to 2.4 times the error of MKL's product at depth 392. At depth 42, where oneDNN's
// convolutions add few terms in a row, even chains of 32 have too large an error.
constexpr int64_t chain_of(int64_t depth) { return depth < 128 ? 16 : 32; }

// The memory layout of the left block of kRows rows: row after row, or for each unit of depth all rows. It is a
// template argument, since a register tile takes all of the registers that variable addresses would need.
enum class Layout { row_major, depth_major };

constexpr int64_t kRows = kHasTiles ? 192 : 96;

// The distance of two rows, and of two units of depth, in the left block.
template <class Unit, Layout layout>
constexpr int64_t left_row_stride = layout == Layout::row_major ? kDepth<Unit> : 1;
template <Layout layout>
constexpr int64_t left_depth_stride = layout == Layout::row_major ? 1 : kRows;

// A vector aligned to the size of its entries only.
template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes), aligned(sizeof(T)), may_alias));
};

template <class T>
using Vector = typename VectorOf<T>::type;

// A vector of units, and the multiplication of two of them unit by unit.
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

// Stores all sums of a register tile.
struct StoreAll {
  template <class V>
  V operator()(const V& sums, int, int) const {
    return sums;
  }
};

// Stores the marked sums of a register tile, and zeros elsewhere. Rows of marks, one bit per entry, are kMarksOfRow
// bytes apart.
constexpr int64_t kMarksOfRow = 128;
struct StoreMarked {
  const uint8_t* marks;
  int shift;  // position of the first sum's bit

  // The v-th vector of a row.
  template <class V>
  V operator()(const V& sums, int row, int v) const {
    constexpr int kWidth = kVectorBytes / sizeof(sums[0]);
    const uint8_t* const from = marks + row * kMarksOfRow;
#if defined(PARTKERNELS_AVX512)
    if constexpr (kWidth == 16) {
      __mmask16 mask;
      std::memcpy(&mask, from + 2 * v, sizeof(mask));
      return (V)_mm512_maskz_mov_ps(mask, (__m512)sums);
    }
#endif
    using Bits = std::conditional_t<sizeof(sums[0]) == 8, int64_t, int32_t>;
    uint32_t word;
    std::memcpy(&word, from, sizeof(word));
    Vector<Bits> each;
    for (int i = 0; i < kWidth; ++i) each[i] = Bits{1} << i;
    const Vector<Bits> bits = Vector<Bits>{} + static_cast<Bits>(word >> (shift + v * kWidth));
    return (V)((Vector<Bits>)sums & ((bits & each) != 0));
  }
};

// sum[r][panel] (+)= left[r] times one panel of the right block, for Rows rows; rows of sum are sum_stride apart.
template <class Unit, Layout layout, int Rows, class Stored>
void multiply_tile(const Unit* left, const Unit* right, int64_t depth, bool accumulate, Sum<Unit>* sum,
                   int64_t sum_stride, const Stored& stored) {
  using V = Vector<Sum<Unit>>;
  constexpr int64_t kWidth = kVectorBytes / sizeof(Unit);
  using Sums = V[Rows][2];
  // Calls use(row of sums, r). Each row's address is computed from the one before: keeping all of them would take
  // registers.
  const auto for_rows = [&](const auto& use) __attribute__((always_inline)) {
    Sum<Unit>* row = sum;
    for (int r = 0; r < Rows; ++r, row += sum_stride) {
      asm("" : "+r"(row));
      use(row, r);
    }
  };
  for_rows([](Sum<Unit>* row, int) __attribute__((always_inline)) {
    for (int v = 0; v < 2; ++v) __builtin_prefetch(row + v * kWidth, 1);
  });
  const auto add_products = [&](int64_t count, Sums& chain) __attribute__((always_inline)) {
#pragma GCC unroll 2  // where two threads share a core, the number of instructions limits the speed
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
  Sums total;
  V zeros = {};
  asm("" : "+m"(zeros));  // otherwise the compiler calls memset, which takes as long as a short chain
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < 2; ++v) total[r][v] = zeros;
  }
  if constexpr (kInOneChain<Unit>) {
    add_products(depth, total);
  } else {
    const int64_t most = chain_of(depth);
    if (depth <= 0) __builtin_unreachable();
    for (int64_t start = 0; start < depth; start += most) {
      Sums chain = {};
      add_products(std::min(most, depth - start), chain);
      for (int r = 0; r < Rows; ++r) {
        for (int v = 0; v < 2; ++v) total[r][v] += chain[r][v];
      }
    }
  }
  for_rows([&](Sum<Unit>* row, int r) __attribute__((always_inline)) {
    for (int v = 0; v < 2; ++v) {
      V* const to = reinterpret_cast<V*>(row + v * kWidth);
      *to = stored(accumulate ? *to + total[r][v] : total[r][v], r, v);
    }
  });
}

#if defined(PARTKERNELS_NEON_BF16)
// The same with bfmmla, which multiplies two rows with two columns, two pairs deep, in the time in which bfdot does
// half of that. An odd last row is multiplied together with the memory behind it, in sums that are not used.
template <Layout layout, int Rows>
void multiply_tile_of_pairs(const Pair* left, const Pair* right, int64_t depth, bool accumulate, float* sum,
                            int64_t sum_stride) {
  constexpr int kTwos = (Rows + 1) / 2;
  static_assert(kPanel<Pair> == 8);
  const auto words = [](const Pair* from) { return reinterpret_cast<const uint32_t*>(from); };
  const auto multiplicand = [](uint32x4_t pairs) { return vreinterpretq_bf16_u32(pairs); };
  // Rows 2 * two and 2 * two + 1 at two units of depth, or at one unit and zeros.
  const auto rows_of = [&]<bool kBoth>(int two, std::bool_constant<kBoth>) __attribute__((always_inline)) {
    const Pair* const first = left + 2 * two * left_row_stride<Pair, layout>;
    if constexpr (layout == Layout::depth_major) {
      const uint32x2_t here = vld1_u32(words(first));
      const uint32x2_t next = kBoth ? vld1_u32(words(first + kRows)) : vdup_n_u32(0);
      return multiplicand(vcombine_u32(vzip1_u32(here, next), vzip2_u32(here, next)));
    } else {
      const Pair* const second = first + left_row_stride<Pair, layout>;
      if constexpr (kBoth) return multiplicand(vcombine_u32(vld1_u32(words(first)), vld1_u32(words(second))));
      const uint32x2_t none = vdup_n_u32(0);
      return multiplicand(vcombine_u32(vld1_lane_u32(words(first), none, 0), vld1_lane_u32(words(second), none, 0)));
    }
  };
  float32x4_t total[kTwos][4] = {};
  const auto add_products = [&](auto both) __attribute__((always_inline)) {
    bfloat16x8_t columns[4];
    for (int half = 0; half < 2; ++half) {
      const uint32x4_t here = vld1q_u32(words(right + 4 * half));
      const uint32x4_t next = both ? vld1q_u32(words(right + kPanel<Pair> + 4 * half)) : vdupq_n_u32(0);
      columns[2 * half] = multiplicand(vzip1q_u32(here, next));
      columns[2 * half + 1] = multiplicand(vzip2q_u32(here, next));
    }
    for (int two = 0; two < kTwos; ++two) {
      const bfloat16x8_t rows = rows_of(two, both);
      for (int c = 0; c < 4; ++c) total[two][c] = vbfmmlaq_f32(total[two][c], rows, columns[c]);
    }
  };
  for (int64_t k = 0; k + 2 <= depth; k += 2) {
    add_products(std::true_type{});
    left += 2 * left_depth_stride<layout>;
    right += 2 * kPanel<Pair>;
  }
  if (depth % 2 == 1) add_products(std::false_type{});
  for (int r = 0; r < Rows; ++r) {
    for (int half = 0; half < 2; ++half) {
      const float64x2_t first = vreinterpretq_f64_f32(total[r / 2][2 * half]);
      const float64x2_t second = vreinterpretq_f64_f32(total[r / 2][2 * half + 1]);
      const float32x4_t found =
          vreinterpretq_f32_f64(r % 2 == 0 ? vzip1q_f64(first, second) : vzip2q_f64(first, second));
      float* const to = sum + r * sum_stride + 4 * half;
      vst1q_f32(to, accumulate ? vaddq_f32(vld1q_f32(to), found) : found);
    }
  }
}
#endif

template <class Unit, Layout layout, int Rows = kTall, class Stored = StoreAll>
void multiply_rows(int64_t rows, const Unit* left, const Unit* right, int64_t depth, bool accumulate, Sum<Unit>* sum,
                   int64_t sum_stride, const Stored& stored = {}) {
  if constexpr (Rows > 0) {
    if (rows == Rows) {
#if defined(PARTKERNELS_NEON_BF16)
      if constexpr (std::is_same_v<Unit, Pair>) {
        multiply_tile_of_pairs<layout, Rows>(left, right, depth, accumulate, sum, sum_stride);
        return;
      }
#endif
      multiply_tile<Unit, layout, Rows>(left, right, depth, accumulate, sum, sum_stride, stored);
    } else {
      multiply_rows<Unit, layout, Rows - 1>(rows, left, right, depth, accumulate, sum, sum_stride, stored);
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

// A thread's state while it multiplies; empty except with AMX.
struct Tiles {};
#endif

}  // namespace partkernels::cpu::PARTKERNELS_ISA
