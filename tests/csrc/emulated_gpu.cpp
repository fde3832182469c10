#include "emulated_gpu.h"

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <random>

namespace partkernels::cuda {

float16 to_float16(float value) {
  const uint32_t bits = float_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return {static_cast<uint16_t>(sign | 0x7E00)};
  if (magnitude >= 0x477FF000) return {static_cast<uint16_t>(sign | 0x7C00)};
  // Below the smallest normal number, steps are 2^-24; scaled to integers, nearbyint rounds ties to even.
  if (magnitude < 0x38800000) {
    return {static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(std::ldexp(std::fabs(value), 24))))};
  }
  const uint32_t rounded = magnitude + 0xFFF + (magnitude >> 13 & 1);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13))};
}

float as_float(float16 value) {
  const int exponent = value.bits >> 10 & 0x1F, fraction = value.bits & 0x3FF;
  const float magnitude = exponent == 31  ? (fraction ? NAN : INFINITY)
                          : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                          : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  return value.bits & 0x8000 ? -magnitude : magnitude;
}

namespace emulated {

Options options;

namespace {

constexpr int kFirstAddress = 1024;  // so that 0 is not a valid address
constexpr size_t kStack = 256 << 10;

using Work = std::function<void()>;

struct Meeting {
  int come = 0;
  int64_t generation = 0;
};

struct Barrier {
  int arrivals, pending;
  int64_t bytes, phase;
};

struct Exchange {
  std::vector<char> given[2];
};

// Committed groups of work, and the group that is still open.
struct Queue {
  std::vector<Work> open;
  std::deque<std::vector<Work>> committed;

  void commit() {
    committed.push_back(std::move(open));
    open.clear();
  }
  void run_all_but(int pending) {
    for (; static_cast<int>(committed.size()) > pending; committed.pop_front()) {
      for (const Work& work : committed.front()) work();
    }
  }
};

struct Block {
  int index;
  std::unique_ptr<char, void (*)(void*)> memory{nullptr, std::free};
  int bytes;
  std::map<std::pair<Group, int>, Meeting> meetings;
  std::map<std::pair<Group, int>, Exchange> exchanges;
  std::map<SharedAddress, Barrier> barriers;
  std::map<int, Queue> products;  // per warpgroup
};

// A fiber's stack. Stacks are reused, since allocating them from the system is slow.
class Stack {
 public:
  Stack() {
    if (unused_.empty()) unused_.emplace_back(new char[kStack]);
    memory_ = std::move(unused_.back());
    unused_.pop_back();
  }
  ~Stack() { unused_.push_back(std::move(memory_)); }
  char* data() const { return memory_.get(); }

 private:
  static inline std::vector<std::unique_ptr<char[]>> unused_;
  std::unique_ptr<char[]> memory_;
};

struct Thread {
  int index;
  ucontext_t context;
  Stack stack;
  std::function<bool()> may_run;
  const char* waits_for = "";
  bool is_done = false;
  Queue copies;
  std::map<Group, int64_t> exchanged;
};

// Blocks run one after another, since no block waits for another.
struct Machine {
  Block block;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<Work> pending;
  std::mt19937 random;
  ucontext_t scheduler;
  int block_count, thread_count;
  const std::function<void()>* kernel;
};

Machine* machine;
Thread* now;

void enter() {
  (*machine->kernel)();
  now->is_done = true;
  swapcontext(&now->context, &machine->scheduler);
}

void block_until(const char* what, std::function<bool()> may_run) {
  if (may_run()) return;
  now->may_run = std::move(may_run);
  now->waits_for = what;
  swapcontext(&now->context, &machine->scheduler);
}

// Half of the runs do all asynchronous work as late as possible; the others do some of it immediately.
bool is_early() { return options.seed % 2 != 0; }
bool is_done_at_once() { return is_early() && machine->random() % 2 == 0; }

bool run_something_pending() {
  if (machine->pending.empty()) return false;
  const size_t i = machine->random() % machine->pending.size();
  const Work work = std::move(machine->pending[i]);
  machine->pending.erase(machine->pending.begin() + static_cast<int64_t>(i));
  work();
  return true;
}

[[noreturn]] void report_deadlock() {
  std::fprintf(stderr, "no thread can go on:\n");
  for (const auto& thread : machine->threads) {
    if (!thread->is_done && thread->index % kWarp == 0) {
      std::fprintf(stderr, "  block %d thread %d waits for %s\n", machine->block.index, thread->index,
                   thread->waits_for);
    }
  }
  std::exit(1);
}

// Early runs advance one warp, or warpgroup, as far as possible before the next one, so that threads that nobody waits
// for fall far behind.
void run_threads() {
  std::vector<Thread*> order;
  for (const auto& thread : machine->threads) order.push_back(thread.get());
  const int crew = !is_early() ? machine->thread_count : options.seed % 4 == 1 ? kWarp : kWarpgroup;
  const int crews = divide_up(machine->thread_count, crew);
  int favourite = 0, without_progress = 0;
  for (size_t done = 0; done < order.size();) {
    bool progress = false;
    std::shuffle(order.begin(), order.end(), machine->random);
    for (Thread* thread : order) {
      if (thread->index / crew != favourite || thread->is_done || !thread->may_run()) continue;
      progress = true;
      now = thread;
      swapcontext(&machine->scheduler, &thread->context);
      if (thread->is_done) ++done;
      if (is_early() && machine->random() % 64 == 0) run_something_pending();
    }
    without_progress = progress ? 0 : without_progress + 1;
    if (progress) continue;
    favourite = (favourite + 1) % crews;
    if (without_progress < crews) continue;
    if (!run_something_pending()) report_deadlock();
    without_progress = 0;
  }
  while (run_something_pending()) {
  }
}

Barrier& barrier_at(SharedAddress address) {
  const auto found = machine->block.barriers.find(address);
  if (found == machine->block.barriers.end()) fail("no barrier was made there");
  return found->second;
}

void end_phase_if_complete(Barrier& barrier) {
  if (barrier.pending < 0) fail("more threads arrived than the barrier has");
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.arrivals;
}

int number_of(Group group) {
  return group == Group::warp ? now->index / kWarp : group == Group::warpgroup ? now->index / kWarpgroup : 0;
}

std::unique_ptr<Thread> fiber(int index) {
  auto thread = std::make_unique<Thread>();
  thread->index = index;
  thread->may_run = [] { return true; };
  getcontext(&thread->context);
  thread->context.uc_stack.ss_sp = thread->stack.data();
  thread->context.uc_stack.ss_size = kStack;
  makecontext(&thread->context, enter, 0);
  return thread;
}

}  // namespace

void run(int blocks, int threads, int shared_bytes, const std::function<void()>& kernel) {
  if (shared_bytes > options.shared_memory) fail("a block asks for more shared memory than there is");
  for (int index = 0; index < blocks; ++index) {
    Machine one;
    machine = &one;
    one.random.seed(options.seed + static_cast<uint32_t>(index));
    one.block_count = blocks;
    one.thread_count = threads;
    one.kernel = &kernel;
    one.block.index = index;
    one.block.bytes = shared_bytes;
    const size_t whole = (static_cast<size_t>(shared_bytes) + 1023) / 1024 * 1024;
    one.block.memory.reset(static_cast<char*>(std::aligned_alloc(1024, std::max<size_t>(whole, 1024))));
    std::memset(one.block.memory.get(), 0xFF, std::max<size_t>(whole, 1024));  // NaN
    for (int i = 0; i < threads; ++i) one.threads.push_back(fiber(i));
    run_threads();
    for (const auto& [group, meeting] : one.block.meetings) {
      if (meeting.come != 0) fail("some threads of a group came to a meeting and others ended");
    }
    machine = nullptr;
  }
}

int thread_index() { return now->index; }
int block_index() { return machine->block.index; }
int blocks() { return machine->block_count; }
int threads() { return machine->thread_count; }
char* shared_memory() { return machine->block.memory.get(); }

char* at(SharedAddress address, int bytes) {
  const int offset = static_cast<int>(address) - kFirstAddress;
  if (offset < 0 || offset + bytes > machine->block.bytes) fail("an address outside of shared memory");
  return shared_memory() + offset;
}

void fail(const char* what) {
  if (machine != nullptr && now != nullptr) {
    std::fprintf(stderr, "block %d thread %d: ", machine->block.index, now->index);
  }
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

void meet(Group group, int number, int size) {
  Meeting& meeting = machine->block.meetings[{group, number}];
  const int64_t generation = meeting.generation;
  if (++meeting.come == size) {
    meeting.come = 0;
    ++meeting.generation;
    return;
  }
  block_until("other threads", [&meeting, generation] { return meeting.generation != generation; });
}

void exchange(Group group, int size, const void* own, void* all, int bytes) {
  const int number = number_of(group), member = now->index % size;
  std::vector<char>& given = machine->block.exchanges[{group, number}].given[now->exchanged[group]++ % 2];
  given.resize(static_cast<size_t>(size) * bytes);
  std::memcpy(given.data() + member * bytes, own, bytes);
  meet(group, number, size);
  std::memcpy(all, given.data(), given.size());
}

void later(Work work) { machine->pending.push_back(std::move(work)); }
void at_wait_for_copies(Work work) { now->copies.open.push_back(std::move(work)); }
void commit_copies() {
  now->copies.commit();
  if (is_done_at_once()) now->copies.run_all_but(0);
}
void wait_for_copies(int pending) { now->copies.run_all_but(pending); }

void at_wait_for_products(Work work) {
  machine->block.products[now->index / kWarpgroup].open.push_back(std::move(work));
}
void commit_products() {
  meet(Group::warpgroup, now->index / kWarpgroup, kWarpgroup);
  if (now->index % kWarpgroup == 0) {
    Queue& products = machine->block.products[now->index / kWarpgroup];
    products.commit();
    if (is_done_at_once()) products.run_all_but(0);
  }
}
void wait_for_products(int pending) {
  const int warpgroup = now->index / kWarpgroup;
  meet(Group::warpgroup, warpgroup, kWarpgroup);
  if (now->index % kWarpgroup == 0) machine->block.products[warpgroup].run_all_but(pending);
  meet(Group::warpgroup, warpgroup, kWarpgroup);
}

bool takes_map(const TensorMap& map) {
  const auto is_size = [](int64_t size) { return size > 0 && size <= int64_t{1} << 32; };
  const auto is_side = [](int side) { return side > 0 && side <= 256; };
  const int box_bytes = map.box_cols * map.entry_bytes;
  return reinterpret_cast<uintptr_t>(map.data) % 16 == 0 && is_size(map.rows) && is_size(map.cols) &&
         map.row_bytes % 16 == 0 && map.row_bytes < int64_t{1} << 40 && map.row_bytes >= map.cols * map.entry_bytes &&
         is_side(map.box_rows) && is_side(map.box_cols) && box_bytes % 16 == 0 &&
         (!map.is_swizzled || box_bytes <= 128);
}

void make_barrier(SharedAddress barrier, int arrivals) {
  if (barrier % 8 != 0 || arrivals < 1) fail("a barrier of 8 bytes and one arrival at least");
  at(barrier, 8);
  machine->block.barriers[barrier] = {arrivals, arrivals, 0, 0};
}

void arrive(SharedAddress address, int bytes) {
  Barrier& barrier = barrier_at(address);
  barrier.bytes += bytes;
  --barrier.pending;
  end_phase_if_complete(barrier);
}

void complete(SharedAddress address, int bytes) {
  Barrier& barrier = barrier_at(address);
  barrier.bytes -= bytes;
  end_phase_if_complete(barrier);
}

void wait(SharedAddress address, int parity) {
  const Barrier& barrier = barrier_at(address);
  block_until("a barrier", [&barrier, parity] { return (barrier.phase & 1) != parity; });
}

SharedAddress swizzled(SharedAddress address) { return address ^ (address >> 3 & 0x70); }

namespace {

// An entry of an operand of a warpgroup's product, given its row and its term (of 16).
uint16_t entry_of(uint64_t operand, int row, int term) {
  const auto start = static_cast<SharedAddress>((operand & 0x3FFF) << 4);
  const auto stride = static_cast<SharedAddress>((operand >> 32 & 0x3FFF) << 4);
  if (operand >> 62 != 1) fail("an operand that is not swizzled by 128 bytes");
  const auto of = [](int n) { return static_cast<SharedAddress>(n); };
  const SharedAddress offset = of(row / 8) * stride + of(row % 8 * 128 + term * 2);
  uint16_t entry;
  std::memcpy(&entry, at(swizzled(start + offset), 2), 2);
  return entry;
}

}  // namespace

void multiply_warpgroup(float* const* d, const uint32_t* const* a, uint64_t b, int across, bool accumulate,
                        float (*widen)(uint16_t)) {
  std::vector<float> left(64 * 16), right(static_cast<size_t>(across) * 16);
  for (int row = 0; row < 64; ++row) {
    for (int term = 0; term < 16; ++term) {
      const int thread = row / 16 * kWarp + row % 8 * 4 + term % 8 / 2;
      const uint32_t pair = a[thread][row % 16 / 8 + 2 * (term / 8)];
      left[row * 16 + term] = widen(static_cast<uint16_t>(pair >> (16 * (term % 2))));
    }
  }
  for (int col = 0; col < across; ++col) {
    for (int term = 0; term < 16; ++term) {
      right[static_cast<size_t>(col) * 16 + term] = widen(entry_of(b, col, term));
    }
  }
  for (int row = 0; row < 64; ++row) {
    for (int col = 0; col < across; ++col) {
      float& sum = d[row / 16 * kWarp + row % 8 * 4 + col % 8 / 2][4 * (col / 8) + 2 * (row % 16 / 8) + col % 2];
      if (!accumulate) sum = 0;
      for (int term = 0; term < 16; ++term) sum += left[row * 16 + term] * right[static_cast<size_t>(col) * 16 + term];
    }
  }
}

}  // namespace emulated

SharedAddress shared_address(const void* pointer) {
  const auto offset = static_cast<const char*>(pointer) - emulated::shared_memory();
  if (offset < 0 || offset > emulated::machine->block.bytes) emulated::fail("a pointer that is not to shared memory");
  return static_cast<uint32_t>(offset + emulated::kFirstAddress);
}

void load_box(SharedAddress to, const TensorMap& map, int col, int row, SharedAddress barrier) {
  const int row_bytes = map.box_cols * map.entry_bytes;
  if (to % (map.is_swizzled ? 1024 : 128) != 0) emulated::fail("a box that is not aligned");
  if (map.is_swizzled && row_bytes != 128) emulated::fail("a swizzled box whose rows are not 128 bytes");
  emulated::at(to, row_bytes * map.box_rows);
  emulated::barrier_at(barrier);
  emulated::later([=] {
    for (int r = 0; r < map.box_rows; ++r) {
      for (int c = 0; c < map.box_cols; ++c) {
        const auto at = to + static_cast<SharedAddress>(r * row_bytes + c * map.entry_bytes);
        char* const there = emulated::at(map.is_swizzled ? emulated::swizzled(at) : at, map.entry_bytes);
        if (row + r >= 0 && row + r < map.rows && col + c >= 0 && col + c < map.cols) {
          std::memcpy(there, map.data + (row + r) * map.row_bytes + int64_t{col + c} * map.entry_bytes,
                      map.entry_bytes);
        } else {
          std::memset(there, 0, map.entry_bytes);
        }
      }
    }
    emulated::complete(barrier, row_bytes * map.box_rows);
  });
}

}  // namespace partkernels::cuda
