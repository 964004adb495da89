// Shares items out among the threads of a step. Results must not depend on who computes what: items are claimed one by
// one by whoever is free, so a thread that the system has put aside takes fewer.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace kaiten {

// How many threads a call may take, its own among them. Each thread that calls says so at the door (c_abi.cpp).
extern constinit thread_local int64_t threads_max;

// Runs work(context) on the calling thread and, while that lasts, on up to `threads` - 1 others. Returns when all that
// have begun are done; one that comes too late is not waited for. So work must claim its share from something common.
void run_together(int64_t threads, void (*work)(const void*), const void* context);

template <class F>
void together(int64_t threads, const F& work) {
  run_together(threads, [](const void* f) { (*static_cast<const F*>(f))(); }, &work);
}

// The items [0, count) in a run per thread, which takes from its front. Who is through with his own takes from the back
// of another's, so a thread that has lost its core holds up nothing but the item it is at.
class Runs {
 public:
  static constexpr int64_t kMost = 64;

  Runs(int64_t count, int64_t runs) : runs_(std::min(runs, kMost)) {
    for (int64_t r = 0; r < runs_; ++r) left_[r].word = count * r / runs_ << 32 | count * (r + 1) / runs_;
  }

  struct Taken {
    int64_t item;  // -1: nothing is left
    int64_t next;  // what the same thread takes after it, unless another comes first; -1: nothing
  };

  Taken take(int64_t run) {
    for (int64_t k = 0; k < runs_; ++k) {
      std::atomic<uint64_t>& left = left_[(run + k) % runs_].word;
      uint64_t word = left.load(std::memory_order_relaxed);
      while (int64_t(word >> 32) < int64_t(word & kEnd)) {
        const bool is_own = k == 0;
        const int64_t begin = word >> 32, end = word & kEnd, next = is_own ? begin + 1 : end - 2;
        if (!left.compare_exchange_weak(word, is_own ? word + kBegin : word - 1)) continue;
        return {is_own ? begin : end - 1, next >= begin && next < end && end - begin > 1 ? next : -1};
      }
    }
    return {-1, -1};
  }

 private:
  static constexpr uint64_t kBegin = uint64_t(1) << 32, kEnd = kBegin - 1;
  struct alignas(64) Left {
    std::atomic<uint64_t> word;
  };
  const int64_t runs_;
  Left left_[kMost];
};

// Calls work(own, i, next, is_new) for every i in [0, count), each once; items may differ in cost. `own` is what begin() gave
// this thread; `next` what it probably takes after this one (-1: nothing), so that it can fetch ahead; `is_new`: it was not
// told of this one.
template <class Begin, class F>
void for_each_ahead(int64_t count, bool is_worth_threads, const Begin& begin, const F& work) {
  const int64_t threads = is_worth_threads ? std::min(threads_max, count) : 1;
  Runs runs(count, threads);
  std::atomic<int64_t> begun{0};
  together(threads, [&] {
    const int64_t run = begun++;
    auto own = begin();
    int64_t foretold = -1;
    for (Runs::Taken t = runs.take(run); t.item >= 0; foretold = t.next, t = runs.take(run))
      work(own, t.item, t.next, t.item != foretold);
  });
}

template <class F>
void for_each_ahead(int64_t count, bool is_worth_threads, const F& work) {
  for_each_ahead(count, is_worth_threads, [] { return nullptr; },
                 [&](auto, int64_t i, int64_t next, bool is_new) { work(i, next, is_new); });
}

template <class F>
void for_each_item(int64_t count, bool is_worth_threads, const F& work) {
  std::atomic<int64_t> claimed{0};
  together(is_worth_threads ? std::min(threads_max, count) : 1, [&] {
    for (int64_t i = claimed++; i < count; i = claimed++) work(i);
  });
}

// Calls work(begin, end) for runs that make up [0, count): of the first the first thread has more, of the last the last.
template <class F>
void for_each_run(int64_t count, int64_t runs_per_thread, bool is_worth_threads, const F& work) {
  const int64_t threads = is_worth_threads ? threads_max : 1;
  const int64_t runs = threads == 1 ? std::min<int64_t>(1, count) : std::min(count, threads * runs_per_thread);
  for_each_ahead(runs, threads > 1, [&](int64_t i, int64_t, bool) { work(count * i / runs, count * (i + 1) / runs); });
}

}  // namespace kaiten
