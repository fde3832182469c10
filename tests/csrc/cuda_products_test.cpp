// Compares the GPU's products, run by an emulator, with the definition in float64.
#include <cmath>
#include <cstring>
#include <iterator>
#include <random>
#include <type_traits>

#include "check.h"
#include "emulated_gpu.h"
#include "numbers.h"
#include "partkernels/cuda.h"
#include "partkernels/packed_map.h"

namespace {

using namespace partkernels;
using cuda::divide_up;

// Random entries in separate memory, aligned like a GPU's, with NaN between the entries.
template <class T>
struct Owned {
  std::vector<char> memory;
  Matrix<T> matrix;

  // Contiguous rows with gaps between them; or columns, with gaps that are not multiples of 16 bytes.
  Owned(int64_t rows, int64_t cols, int64_t gap = 0, bool is_transposed = false)
      : memory(sizeof(T) * (is_transposed ? cols * (rows + gap) : rows * (cols + gap)) + 256) {
    auto* const data = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256);
    matrix = is_transposed ? Matrix<T>{data, rows, cols, 1, rows + gap} : Matrix<T>{data, rows, cols, cols + gap, 1};
    std::fill_n(data, (is_transposed ? cols * (rows + gap) : rows * (cols + gap)), narrow<T>(NAN));
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) entry(r, c) = narrow<T>(uniform(-1, 1));
    }
  }
  T& entry(int64_t r, int64_t c) const { return matrix.data[r * matrix.row_stride + c * matrix.col_stride]; }
  double at(int64_t r, int64_t c) const { return widen(entry(r, c)); }
  Matrix<const T> view() const { return {matrix.data, matrix.rows, matrix.cols, matrix.row_stride, matrix.col_stride}; }
  template <class U = const T>
  Weight<U> weight() const {
    return {matrix.data, matrix.rows, matrix.cols, 1, 1, matrix.row_stride, matrix.col_stride, 0, 0};
  }
  void poison() {
    for (int64_t r = 0; r < matrix.rows; ++r) {
      for (int64_t c = 0; c < matrix.cols; ++c) entry(r, c) = narrow<T>(NAN);
    }
  }
};

struct Map {
  std::vector<uint8_t> memory;
  Owners owners;

  Map(int64_t rows, int64_t cols, int count) : owners{nullptr, row_bytes(cols, bits_for(count)), bits_for(count)} {
    memory.resize(rows * owners.row_bytes + 16);
    auto* const map = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 15) / 16 * 16);
    owners.map = map;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        map[r * owners.row_bytes + c * owners.bits / 8] |= integer(0, count - 1) << (c * owners.bits % 8);
      }
    }
  }
};

// The workspace of a product, filled with NaN.
struct Room {
  std::vector<float> memory;

  Room(int64_t rows, int64_t cols, int64_t terms) {
    size_t bytes = 0;
    CHECK(cuda::linear_workspace(rows, cols, terms, &bytes));
    memory.assign(bytes / sizeof(float), NAN);
  }
  cuda::Workspace workspace() { return {memory.data(), memory.size() * sizeof(float)}; }
};

// Checks that `found` is the sum of left(t) * right(t), accumulated in float32 and rounded once.
template <class T, class Left, class Right>
void check_sum(double found, double start, int terms, const Left& left, const Right& right, const char* what) {
  double sum = start, size = std::fabs(start);
  for (int t = 0; t < terms; ++t) {
    sum += left(t) * right(t);
    size += std::fabs(left(t) * right(t));
  }
  const double rounding = std::is_same_v<T, bfloat16> ? 1.0 / 256 : 1.0 / 2048;
  const double subnormal = std::is_same_v<T, float16> ? std::ldexp(1, -25) : 0;
  if (!(std::fabs(found - sum) <= rounding * std::fabs(sum) + subnormal + 1e-6 * size)) {
    std::fprintf(stderr, "%s: %g, not %g\n", what, found, sum);
    std::exit(1);
  }
}

struct Case {
  int m, n, k, count, active;
  DefaultKind kind;
  bool has_bias;
  int64_t gap;
  bool is_transposed;
};

// Whether partkernels/cuda.h documents a kernel for a case.
bool is_served(const Case& c) {
  if (c.m == 0 || c.n == 0) return true;
  const auto has_parts = [&](int rows) {
    if (c.is_transposed) return rows == 1 && (c.k == 1 || c.gap == 0);
    return rows == 1 || (c.k + c.gap) % 8 == 0;
  };
  if (!has_parts(c.m) || !has_parts(c.n)) return false;
  return c.m <= 16 || (cuda::emulated::options.major == 9 && c.n % 8 == 0 && (c.n + c.gap) % 8 == 0 && c.k > 0);
}

template <class T>
void the_product_is_that_of_the_definition(const Case& c) {
  std::printf("%d x %d x %d, %d of %d partitions, kind %d, gap %d%s\n", c.m, c.n, c.k, c.active, c.count,
              static_cast<int>(c.kind), static_cast<int>(c.gap), c.is_transposed ? ", transposed" : "");
  std::fflush(stdout);
  const Owned<T> x(c.m, c.k, c.gap, c.is_transposed), w(c.n, c.k, c.gap, c.is_transposed), bias(1, c.n);
  const Owned<T> stored(c.n, c.k, c.gap);
  const Map map(c.n, c.k, c.count);
  const Defaults whole{c.kind, c.kind == DefaultKind::uniform ? round_to_bfloat16(0.003f) : 0.003f, 42, 7};
  Defaults shard = whole;
  shard.row = integer(0, 100000);
  shard.col = 64 * integer(0, 1000);
  const Subnetwork<T> subnetwork{w.weight(), map.owners, c.count, c.active, shard, stored.weight()};
  std::vector<double> rebuilt(int64_t{c.n} * c.k);
  for (int n = 0; n < c.n; ++n) {
    for (int k = 0; k < c.k; ++k) {
      const bool live = id_at(map.owners.row(n), k, map.owners.bits) < c.active;
      rebuilt[int64_t{n} * c.k + k] = live ? w.at(n, k)
                                      : c.kind == DefaultKind::stored
                                          ? stored.at(n, k)
                                          : widen(narrow<T>(default_value(whole, shard.row + n, shard.col + k)));
    }
  }
  const auto entry = [&](int n, int k) { return rebuilt[int64_t{n} * c.k + k]; };

  Owned<T> y(c.m, c.n, c.gap, c.is_transposed);
  y.poison();
  Room room(c.m, c.n, c.k);
  const cuda::Status status = cuda::linear<T>(x.view(), subnetwork, c.has_bias ? bias.matrix.data : nullptr, y.matrix,
                                              nullptr, room.workspace());
  CHECK(status.code == (is_served(c) ? cuda::Code::ok : cuda::Code::no_kernel));
  if (!status) return;
  for (int m = 0; m < c.m; ++m) {
    for (int n = 0; n < c.n; ++n) {
      check_sum<T>(
          y.at(m, n), c.has_bias ? bias.at(0, n) : 0, c.k, [&](int k) { return x.at(m, k); },
          [&](int k) { return entry(n, k); }, "y");
    }
  }
}

// Overlapping rows, like the windows of unfold or an expanded row, which the copy engine does not take.
void rows_may_overlap_where_they_are_few() {
  constexpr int kCols = 64;
  for (const int64_t stride : {8, 0}) {
    for (const int count : {16, 40}) {
      const Owned<bfloat16> memory(1, count * stride + kCols), w(kCols, kCols);
      const Map map(kCols, kCols, 2);
      const Subnetwork<bfloat16> all{w.weight(), map.owners, 2, 2, {}, {}};
      const Matrix<const bfloat16> rows{memory.matrix.data, count, kCols, stride, 1};
      Owned<bfloat16> y(count, kCols);
      y.poison();
      const cuda::Status status = cuda::linear<bfloat16>(rows, all, nullptr, y.matrix, nullptr);
      CHECK(status.code == (count == 16 ? cuda::Code::ok : cuda::Code::no_kernel));
      if (!status) continue;
      for (int m = 0; m < count; ++m) {
        for (int n = 0; n < kCols; ++n) {
          check_sum<bfloat16>(
              y.at(m, n), 0, kCols, [&](int k) { return memory.at(0, m * stride + k); },
              [&](int k) { return w.at(n, k); }, "y");
        }
      }
    }
  }
}

// More shares than the pipeline's number of terms allows, more than the workspace allows, and a number that does not
// divide the terms.
void sums_are_shared_where_there_are_few_tiles() {
  const int before = cuda::emulated::options.multiprocessors;
  for (const int multiprocessors : {8, 132}) {
    cuda::emulated::options.multiprocessors = multiprocessors;
    size_t bytes = 0;
    CHECK(cuda::linear_workspace(60, 128, 1592, &bytes) && bytes >= 2 * 60 * 128 * sizeof(float));
    for (const bool has_bias : {false, true}) {
      if (multiprocessors == 8 && has_bias) {
        the_product_is_that_of_the_definition<bfloat16>(
            {60, 128, 1592, 3, 2, DefaultKind::uniform, has_bias, 8, false});
      }
      if (multiprocessors == 132 && !has_bias) {
        the_product_is_that_of_the_definition<float16>({60, 1592, 128, 3, 1, DefaultKind::stored, has_bias, 8, false});
      }
    }
  }
  cuda::emulated::options.multiprocessors = before;
}

// Sums with many more terms than stages, and several tiles in a row: a stage that is released too early is overwritten,
// in early or late runs.
void stages_are_used_again() {
  const int before = cuda::emulated::options.multiprocessors;
  cuda::emulated::options.multiprocessors = 1;
  const int many = 520;
  ++cuda::emulated::options.seed;
  the_product_is_that_of_the_definition<bfloat16>({136, 136, many, 3, 2, DefaultKind::uniform, true, 8, false});
  the_product_is_that_of_the_definition<bfloat16>({136, many, 136, 3, 2, DefaultKind::stored, false, 8, false});
  the_product_is_that_of_the_definition<bfloat16>({16, 72, 3 * many, 3, 2, DefaultKind::uniform, true, 8, false});
  cuda::emulated::options.multiprocessors = before;
}

void sizes_of_zero() {
  for (const Case& c : {Case{0, 8, 8, 2, 1, DefaultKind::uniform, true, 0, false},
                        {8, 0, 8, 2, 1, DefaultKind::uniform, false, 0, false},
                        {24, 8, 0, 2, 1, DefaultKind::uniform, true, 0, false}}) {
    the_product_is_that_of_the_definition<bfloat16>(c);
  }
}

void a_gpu_that_is_too_old_is_refused() {
  cuda::emulated::options.major = 7;
  const cuda::Status status = cuda::linear<bfloat16>({}, {}, nullptr, {}, nullptr);
  CHECK(status.code == cuda::Code::no_kernel && std::strstr(status.message, "8.0") != nullptr);
}

// Maps of every width: all of them with each kind of defaults; one under the sanitizers, which take several times as
// long.
constexpr int kCounts[] = {3, 1, 2, 4, 9, 200};
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kCountsOfEach = 1;
#else
constexpr size_t kCountsOfEach = std::size(kCounts);
#endif
size_t next_count = 0;

template <class T>
void random_cases() {
  for (const DefaultKind kind : {DefaultKind::zeros, DefaultKind::uniform, DefaultKind::normal, DefaultKind::stored}) {
    for (size_t i = 0; i < kCountsOfEach; ++i) {
      const int count = kCounts[next_count++ % std::size(kCounts)];
      ++cuda::emulated::options.seed;
      const int m = integer(0, 2) == 0 ? integer(1, 16) : integer(17, 300);
      const Case c{m,
                   integer(1, 200),
                   integer(1, 200),
                   count,
                   integer(1, count),
                   kind,
                   integer(0, 1) == 1,
                   integer(0, 9),
                   integer(0, 1) == 1};
      // Sizes that suit copies of 16 bytes.
      const Case even{m, 8 * divide_up(c.n, 8), 8 * divide_up(c.k, 8), count, c.active, kind, c.has_bias, 8, false};
      the_product_is_that_of_the_definition<T>(c);
      the_product_is_that_of_the_definition<T>(even);
    }
  }
}

}  // namespace

// Argument: "hopper" for the kernels of compute capability 9.0, otherwise an older GPU.
int main(int count, char** arguments) {
  CHECK(count == 2);
  random_words.seed(7);
  // The default run tests one dtype on each GPU.
  if (std::strcmp(arguments[1], "hopper") == 0) {
    random_cases<bfloat16>();
    if (is_full()) random_cases<float16>();
    rows_may_overlap_where_they_are_few();
    sums_are_shared_where_there_are_few_tiles();
    stages_are_used_again();
    return 0;
  }
  // Without the copy engine, and with less shared memory.
  cuda::emulated::options.major = 8;
  cuda::emulated::options.shared_memory = 99 << 10;
  if (is_full()) random_cases<bfloat16>();
  random_cases<float16>();
  sums_are_shared_where_there_are_few_tiles();
  if (is_full()) stages_are_used_again();
  // Shared memory for one stage only.
  the_product_is_that_of_the_definition<bfloat16>({9, 40, 1032, 200, 100, DefaultKind::stored, true, 8, false});
  sizes_of_zero();
  a_gpu_that_is_too_old_is_refused();
}
