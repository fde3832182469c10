#include "thread_pool.h"

#include <algorithm>
#include <system_error>
#include <thread>

#if __has_include(<pthread.h>)
#include <pthread.h>
#endif

namespace partkernels::numpy {
namespace {

// Never destroyed: its threads wait on it until the process ends.
ThreadPool* pool = nullptr;

}  // namespace

ThreadPool& ThreadPool::here() {
  static std::once_flag once;
  std::call_once(once, [] {
    pool = new ThreadPool;
#if __has_include(<pthread.h>)
    pthread_atfork(nullptr, nullptr, [] {
      const int threads = pool->threads_;
      pool = new ThreadPool;
      pool->threads_ = threads;
    });
#endif
  });
  return *pool;
}

int ThreadPool::threads() {
  const std::lock_guard lock(mutex_);
  return threads_;
}

void ThreadPool::set_threads(int threads) {
  const std::lock_guard lock(mutex_);
  threads_ = threads;
}

void ThreadPool::run(int64_t count, const cpu::Body& body) {
  if (count <= 0) return;
  std::unique_lock lock(mutex_);
  const int64_t ranges = std::min<int64_t>(count, threads_);
  if (ranges == 1) {
    lock.unlock();
    body(0, count);
    return;
  }
  try {
    for (; workers_ < ranges - 1; ++workers_) std::thread([this] { work(); }).detach();
  } catch (const std::system_error&) {
    // No more threads can be created: the existing ones do all of the work.
  }
  Loop loop{body, count, ranges};
  loops_.push_back(&loop);
  has_work_.notify_all();
  while (loop.next < loop.ranges) run_range(loop, lock);
  has_finished_.wait(lock, [&] { return loop.unfinished == 0; });
  if (loop.error) std::rethrow_exception(loop.error);
}

void ThreadPool::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    has_work_.wait(lock, [&] { return !loops_.empty(); });
    run_range(*loops_.front(), lock);
  }
}

void ThreadPool::run_range(Loop& loop, std::unique_lock<std::mutex>& lock) {
  const int64_t range = loop.next++;
  if (loop.next == loop.ranges) loops_.erase(std::find(loops_.begin(), loops_.end(), &loop));
  ++loop.unfinished;
  lock.unlock();
  std::exception_ptr error;
  try {
    loop.body(loop.count * range / loop.ranges, loop.count * (range + 1) / loop.ranges);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  if (error) loop.error = error;
  if (--loop.unfinished == 0 && loop.next == loop.ranges) has_finished_.notify_all();
}

}  // namespace partkernels::numpy
