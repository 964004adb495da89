// Shares items out among the threads of a step. Results must not depend on who computes what: items are claimed one by
// one by whoever is free, so a thread that the system has put aside takes fewer.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace kaiten {

// Runs work(context) on the calling thread and, while that lasts, on up to `threads` - 1 others. Returns when all that
// have begun are done; one that comes too late is not waited for. So work must claim its share from something common.
void run_together(int64_t threads, void (*work)(const void*), const void* context);

template <class F>
void together(int64_t threads, const F& work) {
  run_together(threads, [](const void* f) { (*static_cast<const F*>(f))(); }, &work);
}

// Calls work(i, next, is_first) for every i in [0, count), each once; items may differ in cost. `next` is what the same
// thread takes after this one (-1: nothing), so that it can fetch ahead; `is_first`: nothing came before on this thread.
template <class F>
void for_each_ahead(int64_t count, bool is_worth_threads, const F& work) {
  std::atomic<int64_t> claimed{0};
  together(is_worth_threads ? std::min<int64_t>(at::get_num_threads(), count) : 1, [&] {
    bool is_first = true;
    for (int64_t i = claimed++; i < count; is_first = false) {
      const int64_t next = claimed++;
      work(i, next < count ? next : -1, is_first);
      i = next;
    }
  });
}

template <class F>
void for_each_item(int64_t count, bool is_worth_threads, const F& work) {
  std::atomic<int64_t> claimed{0};
  together(is_worth_threads ? std::min<int64_t>(at::get_num_threads(), count) : 1, [&] {
    for (int64_t i = claimed++; i < count; i = claimed++) work(i);
  });
}

// Calls work(begin, end) for runs that make up [0, count), each on whichever thread is free.
template <class F>
void for_each_run(int64_t count, int64_t runs_per_thread, bool is_worth_threads, const F& work) {
  const int64_t threads = is_worth_threads ? at::get_num_threads() : 1;
  const int64_t runs = threads == 1 ? std::min<int64_t>(1, count) : std::min(count, threads * runs_per_thread);
  for_each_item(runs, threads > 1, [&](int64_t i) { work(count * i / runs, count * (i + 1) / runs); });
}

}  // namespace kaiten
