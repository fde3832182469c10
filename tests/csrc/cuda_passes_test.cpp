// Compares the GPU's passes over a weight, run by an emulator, entry by entry with the definitions: rebuilding,
// embedding and masking.
#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "emulated_gpu.h"
#include "numbers.h"
#include "partkernels/cpu.h"
#include "partkernels/cuda.h"
#include "partkernels/packed_map.h"

namespace {

using namespace partkernels;

template <class T>
T random_bits() {
  T value;
  auto* const bytes = reinterpret_cast<unsigned char*>(&value);
  for (size_t i = 0; i < sizeof(T); ++i) bytes[i] = static_cast<unsigned char>(random_words());
  return value;
}

// The memory layout of a weight.
struct Layout {
  int64_t rows, in, height, width;
  int64_t row_stride, in_stride, y_stride, x_stride;
  int64_t origin = 0;  // offset of the first entry in memory that begins at a multiple of 16 bytes

  int64_t taps() const { return height * width; }
  int64_t cols() const { return in * taps(); }
  int64_t at(int64_t row, int64_t col) const {
    const int64_t tap = col / in;
    return origin + row * row_stride + col % in * in_stride + tap / width * y_stride + tap % width * x_stride;
  }
  int64_t size() const {
    int64_t most = 0;
    for (int64_t i = 0; i < 16; ++i) {
      const int64_t row = i & 1 ? rows - 1 : 0, channel = i & 2 ? in - 1 : 0,
                    tap = (i & 4 ? taps() - width : 0) + (i & 8 ? width - 1 : 0);
      most = std::max(most, at(row, tap * in + channel) + 1);
    }
    return most;
  }
  // The layout of a part with `some_rows` rows and `some_in` channels.
  Layout part(int64_t some_rows, int64_t some_in) const {
    Layout layout = *this;
    layout.rows = some_rows;
    layout.in = some_in;
    return layout;
  }
};

Layout linear(int64_t rows, int64_t in) { return {rows, in, 1, 1, in, 1, 0, 0}; }
Layout contiguous(int64_t rows, int64_t in, int64_t height, int64_t width) {
  return {rows, in, height, width, in * height * width, height * width, width, 1};
}
Layout channels_last(int64_t rows, int64_t in, int64_t height, int64_t width) {
  return {rows, in, height, width, in * height * width, 1, width * in, in};
}
Layout shifted(Layout layout, int64_t entries) {
  layout.origin += entries;
  return layout;
}

// Rows are innermost, then channels.
Layout transposed(const Layout& l) {
  return {l.rows, l.in, l.height, l.width, 1, l.rows, l.rows * l.in * l.width, l.rows * l.in};
}

// Layouts of one weight for reading and for writing.
struct Pair {
  Layout from, to;
};

const Pair kPairs[] = {
    {linear(33, 200), linear(33, 200)},
    {linear(3, 64), linear(3, 64)},
    {linear(1, 1), linear(1, 1)},
    {linear(5, 131), linear(5, 131)},                          // no vectors in its rows
    {{9, 68, 1, 1, 80, 1, 0, 0}, {9, 68, 1, 1, 72, 1, 0, 0}},  // gaps between rows
    {{9, 67, 1, 1, 72, 1, 0, 0}, {9, 67, 1, 1, 72, 1, 0, 0}},  // vectors would include gaps
    {{9, 68, 1, 1, 73, 1, 0, 0}, {9, 68, 1, 1, 73, 1, 0, 0}},  // some rows are not aligned
    {linear(4, 128), shifted(linear(4, 128), 1)},              // no vector is aligned
    {shifted(linear(4, 128), 1), linear(4, 128)},              //
    {transposed(linear(33, 40)), linear(33, 40)},
    {{6, 70, 1, 1, 70, -1, 0, 0, 69}, {6, 70, 1, 1, -70, 1, 0, 0, 350}},  // backwards
    {{6, 70, 1, 1, 0, 0, 0, 0}, linear(6, 70)},                           // expanded
    {contiguous(3, 64, 3, 3), contiguous(3, 64, 3, 3)},                   // convolutions: whole groups per tap,
    {contiguous(3, 70, 2, 3), contiguous(3, 70, 2, 3)},                   // partial groups per tap,
    {contiguous(5, 3, 3, 2), contiguous(5, 3, 3, 2)},                     // or several taps per group
    {contiguous(2, 5, 9, 10), contiguous(2, 5, 9, 10)},                   //
    {channels_last(4, 20, 3, 3), channels_last(4, 20, 3, 3)},             //
    {contiguous(3, 72, 3, 3), channels_last(3, 72, 3, 3)},                //
    {channels_last(3, 36, 1, 5), contiguous(3, 36, 1, 5)},                //
    {{5, 20, 3, 2, 250, 12, 4, 2}, {5, 20, 3, 2, 130, 1, 40, 20}},        // gaps everywhere
};

constexpr int kCounts[] = {1, 2, 3, 5, 17, 256};
int any_count() { return kCounts[integer(0, 5)]; }

// A map without spare memory, so that a sanitiser reports reads beyond it.
struct Map {
  std::vector<uint8_t> memory;
  Owners owners;

  Map(const Layout& size, int count) : owners{nullptr, row_bytes(size.cols(), bits_for(count)), bits_for(count)} {
    memory.resize(size.rows * owners.row_bytes);
    for (int64_t r = 0; r < size.rows; ++r) {
      for (int64_t c = 0; c < size.cols(); ++c) {
        memory[r * owners.row_bytes + c * owners.bits / 8] |= integer(0, count - 1) << (c * owners.bits % 8);
      }
    }
    owners.map = memory.data();
  }
  int partition(int64_t row, int64_t col) const { return id_at(owners.row(row), col, owners.bits) + 1; }
};

template <class T>
struct Tensor {
  Layout layout;
  std::vector<T> memory;

  explicit Tensor(const Layout& of) : layout(of), memory(of.size()) {
    for (T& entry : memory) entry = random_bits<T>();
  }
  T& at(int64_t row, int64_t col) { return memory[layout.at(row, col)]; }
  const T& at(int64_t row, int64_t col) const { return memory[layout.at(row, col)]; }
  void poison() { std::memset(static_cast<void*>(memory.data()), 0xFF, memory.size() * sizeof(T)); }

  template <class Entry>
  static Weight<Entry> weight(Entry* data, const Layout& l) {
    return {data + l.origin, l.rows, l.in, l.height, l.width, l.row_stride, l.in_stride, l.y_stride, l.x_stride};
  }
  Weight<T> view() { return weight(memory.data(), layout); }
  Weight<const T> view() const { return weight(memory.data(), layout); }
};

template <class T>
bool are_same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// Checks the part that begins at a row and a channel; `part` is the layout of out.
template <class T>
void a_subnetworks_weight_has_live_entries_and_defaults(const Pair& pair, const Layout& part, int64_t first_row,
                                                        int64_t first_in, int count, int active, DefaultKind kind) {
  const Map map(pair.from, count);
  const Layout layouts[] = {pair.from, pair.to, transposed(pair.from), shifted(pair.from, 1)};
  const Tensor<T> weight(pair.from), stored(layouts[integer(0, 3)]);
  const Defaults whole{kind, kind == DefaultKind::uniform ? round_to_bfloat16(0.003f) : 0.003f,
                       (uint64_t{3} << 33) | 11, (uint64_t{1} << 40) | 12};
  Defaults shard = whole;
  shard.row = integer(0, 100000);
  shard.col = 64 * integer(0, 1000);
  const Subnetwork<T> w{weight.view(), map.owners, count, active, shard, stored.view()};
  Tensor<T> out(part);
  out.poison();
  std::vector<T> expected = out.memory;
  for (int64_t row = 0; row < part.rows; ++row) {
    for (int64_t col = 0; col < part.cols(); ++col) {
      const int64_t of_row = first_row + row, of_col = col / part.in * pair.from.in + first_in + col % part.in;
      expected[part.at(row, col)] = map.partition(of_row, of_col) <= active ? weight.at(of_row, of_col)
                                    : kind == DefaultKind::stored
                                        ? stored.at(of_row, of_col)
                                        : narrow<T>(default_value(whole, shard.row + of_row, shard.col + of_col));
    }
  }
  CHECK(cuda::subnetwork_weight(w, first_row, first_in, out.view(), nullptr));
  CHECK(are_same(out.memory, expected));
}

template <class T>
void an_embedding_is_rows_of_the_weight(const Layout& layout, int rows, DefaultKind kind) {
  const int count = kCounts[integer(1, 5)];
  const Map map(layout, count);
  const Tensor<T> weight(layout), stored(layout);
  const Defaults defaults{kind, round_to_bfloat16(0.003f), 11, 12, integer(0, 100000), 64 * integer(0, 1000)};
  const Subnetwork<T> w{weight.view(), map.owners, count, (count + 1) / 2, defaults, stored.view()};
  Tensor<T> whole(linear(layout.rows, layout.in)), out(linear(rows, layout.in));
  whole.poison();
  out.poison();
  CHECK(cuda::subnetwork_weight(w, 0, 0, whole.view(), nullptr));
  std::vector<int64_t> ids(rows);
  for (int64_t& id : ids) id = integer(0, static_cast<int>(layout.rows) - 1);
  CHECK(cuda::embedding(ids.data(), rows, w, out.memory.data(), nullptr));
  for (int64_t i = 0; i < rows; ++i) {
    CHECK(std::memcmp(&out.at(i, 0), &whole.at(ids[i], 0), layout.in * sizeof(T)) == 0);
  }
}

template <class T>
void a_gradient_is_kept_in_a_range_of_partitions(const Pair& pair, int count, bool is_in_place) {
  const Map map(pair.from, count);
  const int first = integer(1, count), last = integer(first, count);
  Tensor<T> grad(is_in_place ? pair.to : pair.from);
  Tensor<T> out(pair.to);
  out.poison();
  if (is_in_place) out.memory = grad.memory;
  std::vector<T> expected = out.memory;
  for (int64_t row = 0; row < pair.to.rows; ++row) {
    for (int64_t col = 0; col < pair.to.cols(); ++col) {
      const int partition = map.partition(row, col);
      expected[pair.to.at(row, col)] = first <= partition && partition <= last ? grad.at(row, col) : T{};
    }
  }
  const Tensor<T>& from = is_in_place ? out : grad;
  CHECK(cuda::subnetwork_weight_grad(from.view(), map.owners, first, last, out.view(), nullptr));
  CHECK(are_same(out.memory, expected));
}

template <class T>
void nothing_is_done_to_an_empty_weight() {
  for (const Layout& empty : {linear(0, 8), linear(8, 0), contiguous(2, 4, 0, 3)}) {
    const auto of = Tensor<T>::template weight<T>(nullptr, empty);
    const auto read = Tensor<T>::template weight<const T>(nullptr, empty);
    CHECK(cuda::subnetwork_weight(Subnetwork<T>{read, {nullptr, 0, 1}, 2, 1, {}, {}}, 0, 0, of, nullptr));
    CHECK(cuda::subnetwork_weight_grad(read, {nullptr, 0, 1}, 1, 1, of, nullptr));
  }
}

template <class T>
void check_passes() {
  for (const Pair& pair : kPairs) {
    for (const DefaultKind kind :
         {DefaultKind::zeros, DefaultKind::uniform, DefaultKind::normal, DefaultKind::stored}) {
      for (int i = 0; i < 2; ++i) {
        const int count = any_count();
        a_subnetworks_weight_has_live_entries_and_defaults<T>(pair, pair.to, 0, 0, count, integer(1, count), kind);
      }
    }
    for (const bool is_in_place : {false, true}) {
      a_gradient_is_kept_in_a_range_of_partitions<T>(pair, any_count(), is_in_place);
    }
  }
  for (const Layout& table : {linear(9, 128), linear(40, 71), transposed(linear(12, 200))}) {
    for (const DefaultKind kind :
         {DefaultKind::zeros, DefaultKind::uniform, DefaultKind::normal, DefaultKind::stored}) {
      for (const int rows : {0, 1, 33, 70}) an_embedding_is_rows_of_the_weight<T>(table, rows, kind);
    }
  }
  for (const int first_in : {0, 3, 12, 128}) {
    for (const DefaultKind kind : {DefaultKind::uniform, DefaultKind::normal, DefaultKind::stored}) {
      for (const Layout& whole : {linear(6, 164), contiguous(6, 164, 2, 2), channels_last(6, 192, 1, 3)}) {
        const int count = kCounts[integer(1, 5)];
        a_subnetworks_weight_has_live_entries_and_defaults<T>({whole, whole}, whole.part(3, 36), 2, first_in, count,
                                                              (count + 1) / 2, kind);
      }
    }
  }
  nothing_is_done_to_an_empty_weight<T>();
}

}  // namespace

int main() {
  random_words.seed(11);
  check_passes<float>();
  check_passes<double>();
  check_passes<bfloat16>();
  check_passes<float16>();
}
