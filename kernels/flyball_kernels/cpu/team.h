// Ops as work that a team of threads shares, so that an op can contain others: a parallel region costs more than they do
// when a step has few tokens.
#pragma once

#include <atomic>
#include <functional>
#include <initializer_list>
#include <vector>

#include "tensors.h"

namespace flyball {

// What a thread does while it waits: it looks again and again, and after so many times sleeps, if it can.
struct Wait {
  // When the library is loaded: later a thread may have a core of its own (place_threads), and knows no others.
  static inline const int64_t num_cores = omp_get_num_procs();

  // As many as OpenMP's threads are told to (see flyball_runtime/engine), and few where threads have to share cores.
  static int max_spins(int64_t num_threads) { return num_threads > num_cores ? 100 : 10000; }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
};

// What a thread that runs works by itself has others do with it, once they have nothing else to do: runs of numbers.
class Offer {
 public:
  // Calls f(i) for each i below n. All are done when it returns.
  template <class F>
  void share(int64_t n, const F& f) {
    const Call call{[](const void* of, int64_t i) { (*static_cast<const F*>(of))(i); }, &f, n};
    call_.store(&call);
    call.run();
    call_.store(nullptr);
    while (const uint32_t num = num_helpers_.load()) num_helpers_.wait(num);
  }

  // Takes part in what is offered, by another thread. Returns whether anything was.
  bool help() {
    if (!call_.load(std::memory_order_relaxed)) return false;
    num_helpers_.fetch_add(1);  // before the look at what is offered, or its owner would not know that somebody has seen it
    if (const Call* const call = call_.load()) call->run();
    if (num_helpers_.fetch_sub(1) == 1) num_helpers_.notify_all();
    return true;
  }

 private:
  struct Call {
    void (*const f)(const void*, int64_t);
    const void* const of;
    const int64_t n;
    mutable std::atomic<int64_t> next{0};

    void run() const {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) f(of, i);
    }
  };

  alignas(64) std::atomic<const Call*> call_{nullptr};
  alignas(64) std::atomic<uint32_t> num_helpers_{0};
};

// The threads of a parallel region; each has its own object, and they call the same functions in the same order. OpenMP's
// loops would do, but its barrier makes a system call each time, which takes longer than many of the loops.
class Team {
 public:
  // Of what share_runs shares, the runs that lie next to each other for one thread.
  struct alignas(64) Part {
    std::atomic<int64_t> num_taken[2] = {};  // in this call, and 0 for the next one
    int64_t turn = 0;                        // which of them; of the part's thread
  };

  struct Shared {
    alignas(64) std::atomic<uint32_t> num_arrived{0};
    alignas(64) std::atomic<uint32_t> num_barriers{0};
    alignas(64) std::atomic<int64_t> next{0};
    std::vector<Part> parts;
    Offer* const offer;  // of a single thread, or null

    explicit Shared(int64_t most_threads, Offer* offer = nullptr) : parts(most_threads), offer(offer) {}
  };

  Team(Shared& shared, int64_t index, int64_t size) : shared_(shared), index_(index), size_(size) {}

  int64_t size() const { return size_; }

  // Calls f(i) for each i below n, a run of them on each thread. All are done when it returns.
  template <class F>
  void share(int64_t n, F f) const {
    for (int64_t i = index_ * n / size_, end = (index_ + 1) * n / size_; i < end; ++i) f(i);
    barrier();
  }

  // The same, in chunks that go to whichever thread is free.
  template <class F>
  void share_chunks(int64_t n, int64_t chunk, F f) const {
    for (int64_t start; (start = shared_.next.fetch_add(chunk, std::memory_order_relaxed)) < n;)
      for (int64_t i = start, end = std::min(n, start + chunk); i < end; ++i) f(i);
    barrier();
  }

  // Calls f(begin, end) for runs of `unit` numbers below n. A thread has the same part of them in each call, and goes through it
  // from its beginning; one that is done takes runs from the others' parts, so that threads end together.
  template <class F>
  void share_runs(int64_t n, int64_t unit, F f) const {
    const int64_t num_runs = round_up(n, unit) / unit;
    if (shared_.offer) return shared_.offer->share(num_runs, [&](int64_t run) { f(run * unit, std::min(n, (run + 1) * unit)); });
    Part& own = shared_.parts[index_];
    const int64_t turn = own.turn;
    own.turn = 1 - turn;
    own.num_taken[own.turn].store(0, std::memory_order_relaxed);  // all are here, so none is in the call before
    for (int64_t i = 0; i < size_; ++i) {
      const int64_t part = (index_ + i) % size_, first = part * num_runs / size_, last = (part + 1) * num_runs / size_;
      std::atomic<int64_t>& num_taken = shared_.parts[part].num_taken[turn];
      for (int64_t run; (run = first + num_taken.fetch_add(1, std::memory_order_relaxed)) < last;)
        f(run * unit, std::min(n, (run + 1) * unit));
    }
    barrier();
  }

  // Calls f on one thread.
  template <class F>
  void run_once(F f) const {
    if (index_ == 0) f();
    barrier();
  }

 private:
  // Waits for all threads. A thread that waits for long sleeps: what it waits for may need its core.
  void barrier() const {
    const uint32_t before = shared_.num_barriers.load(std::memory_order_relaxed);
    if (shared_.num_arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      shared_.num_arrived.store(0, std::memory_order_relaxed);
      shared_.next.store(0, std::memory_order_relaxed);
      shared_.num_barriers.store(before + 1, std::memory_order_release);
      shared_.num_barriers.notify_all();
      return;
    }
    for (int spins = Wait::max_spins(size_); spins > 0; --spins) {
      if (shared_.num_barriers.load(std::memory_order_acquire) != before) return;
      Wait::pause();
    }
    shared_.num_barriers.wait(before, std::memory_order_acquire);
  }

  Shared& shared_;
  const int64_t index_, size_;
};

// Prepared by one thread, and then run by each thread of a team. It holds pointers: the tensors have to live until it has run.
struct Work {
  int64_t num_floats = 0;  // of the memory that the team has for it
  std::function<void(const Team& team, float* memory)> run;
};

// Runs works one after another, in one parallel region if that is worth it. Of a single thread, others may take runs that it shares:
// those of its offer, if it has one.
template <class Works = std::initializer_list<Work>>
void run_in_team(const Works& works, bool is_parallel = true, Offer* offer = nullptr) {
  struct Memory;
  int64_t num_floats = 0;
  for (const Work& work : works) num_floats = std::max(num_floats, work.num_floats);
  float* const memory = scratch<Memory>(num_floats);
  Team::Shared shared(is_parallel ? omp_get_max_threads() : 1, offer);
  const auto run = [&](int64_t index, int64_t size) {
    const Team team(shared, index, size);
    for (const Work& work : works) work.run(team, memory);
  };
  if (!is_parallel || omp_get_max_threads() == 1) return run(0, 1);
#pragma omp parallel
  run(omp_get_thread_num(), omp_get_num_threads());
}

}  // namespace flyball
