// A thread pool for the kernels' loops, for use without a tensor library that has one.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>

#include "partkernels/cpu.h"

namespace partkernels::numpy {

// Serves calls from several threads concurrently. Each caller also works on its own loop, so it never waits for a free
// worker.
class ThreadPool {
 public:
  // The pool of this process. A forked child inherits no threads and starts its own.
  static ThreadPool& here();

  // Calls body(begin, end) over [0, count) in at most threads() ranges of about equal size; rethrows exceptions of
  // body.
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
  // Runs the next range of a loop; releases the lock meanwhile.
  void run_range(Loop& loop, std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;
  std::condition_variable has_work_, has_finished_;
  std::deque<Loop*> loops_;  // loops with ranges that have not begun
  int threads_ = 1, workers_ = 0;
};

}  // namespace partkernels::numpy
