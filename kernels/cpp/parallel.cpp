// The threads that help in a step. OpenMP's would do, but its regions begin by waking every thread and end by waiting
// for every thread, and a step has a hundred of them: on a machine shared with the gateway and the scheduler that is
// where milliseconds go. Here a helper spins for as long as an operator is away from the next, sleeps after that, and
// nobody waits for one that has not begun.
#include "parallel.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kaiten {
namespace {

constexpr auto kSpin = std::chrono::microseconds(200);
constexpr int kPausesPerLook = 64;

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// One word says everything about the running job, so that entering it is one exchange:
// generation (48 bits) | helpers wanted, 0 once the caller is done (8) | helpers that have begun (8)
struct Job {
  uint64_t word;
  uint64_t generation() const { return word >> 16; }
  unsigned wanted() const { return word >> 8 & 0xFF; }
  unsigned begun() const { return word & 0xFF; }
};

class Team {
 public:
  void run(int64_t threads, void (*work)(const void*), const void* context) {
    std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
    if (threads <= 1 || !owner) return work(context);  // another thread's job has the helpers
    const unsigned wanted = unsigned(std::min<int64_t>(threads - 1, 0xFF));
    for (; helpers_ < wanted; ++helpers_) std::thread([this] { help(); }).detach();
    work_ = work, context_ = context;
    done_.store(0, std::memory_order_relaxed);
    job_.store(++generation_ << 16 | wanted << 8);
    if (sleepers_.load() > 0) wake();
    work(context);
    const Job left{job_.fetch_and(~uint64_t(0xFF00))};
    for (int turns = 0; done_.load(std::memory_order_acquire) < left.begun(); ++turns)
      turns < kPausesPerLook * kPausesPerLook ? pause() : std::this_thread::yield();
  }

 private:
  void help() {
    for (uint64_t seen = 0;;) {
      Job job = next_after(seen);
      seen = job.generation();
      while (job.generation() == seen && job.begun() < job.wanted())
        if (job_.compare_exchange_weak(job.word, job.word + 1)) {
          work_(context_);
          done_.fetch_add(1, std::memory_order_release);
          // For who waits for this core, and would else take it in the middle of an item that all wait for: beside
          // services that serve 64 rows on the same two cores that was a tenth of the time, and is a fortieth (Sapphire
          // Rapids, 2026-11-27).
          std::this_thread::yield();
          break;
        }
    }
  }

  Job next_after(uint64_t seen) {
    using Clock = std::chrono::steady_clock;
    for (const auto end = Clock::now() + kSpin; Clock::now() < end;)
      for (int i = 0; i < kPausesPerLook; ++i, pause())
        if (const Job job{job_.load()}; job.generation() != seen) return job;
    std::unique_lock<std::mutex> lock(sleep_);
    // Before looking once more: whoever stores a job after that look sees the sleeper.
    sleepers_.fetch_add(1);
    woken_.wait(lock, [&] { return Job{job_.load()}.generation() != seen; });
    sleepers_.fetch_sub(1);
    return Job{job_.load()};
  }

  void wake() {
    { std::lock_guard<std::mutex> lock(sleep_); }
    woken_.notify_all();
  }

  std::mutex owner_, sleep_;
  std::condition_variable woken_;
  unsigned helpers_ = 0;
  uint64_t generation_ = 0;
  void (*work_)(const void*) = nullptr;
  const void* context_ = nullptr;
  alignas(64) std::atomic<uint64_t> job_{0};
  alignas(64) std::atomic<unsigned> done_{0};
  std::atomic<int> sleepers_{0};
};

}  // namespace

constinit thread_local int64_t threads_max = 1;

void run_together(int64_t threads, void (*work)(const void*), const void* context) {
  // Never destroyed: its helpers sleep on it until the process is gone.
  static Team* team = new Team;
  team->run(threads, work, context);
}

}  // namespace kaiten
