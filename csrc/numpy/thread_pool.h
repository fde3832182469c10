// Threads that the loops of kernels share, where no library of tensors has any.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>

#include "partkernels/cpu.h"

namespace partkernels::numpy {

// Calls of several threads are served at once; each works on its own loop as well, so that none waits for a worker.
class ThreadPool {
 public:
  // The pool of this process: a child that was forked has none of its parent's threads, and starts its own.
  static ThreadPool& here();

  // body(begin, end) over [0, count) in at most threads() ranges of about the same size; throws what a body throws.
  void run(int64_t count, const cpu::Body& body);

  int threads();
  void set_threads(int threads);

 private:
  struct Loop {
    const cpu::Body& body;
    int64_t count, ranges, next = 0, unfinished = 0;
    std::exception_ptr error;
  };

  void work();
  // Runs the next range of a loop; the lock is let go meanwhile.
  void run_range(Loop& loop, std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;
  std::condition_variable has_work_, has_finished_;
  std::deque<Loop*> loops_;  // of which some ranges have not begun
  int threads_ = 1, workers_ = 0;
};

}  // namespace partkernels::numpy
