// The threads of one model: each step is one parallel region, with barriers between its phases.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace kvl {

// During its lifetime, the calling thread treats subnormal floats (below 2^-126) as 0, as operands and as results:
// processors take about a hundred times as long for them, and sums do not need them. Only x86-64; elsewhere it does
// nothing.
class TinyIsZero {
  public:
#if defined(__x86_64__)
    TinyIsZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlushed); }
    ~TinyIsZero() { _mm_setcsr(before_); }
#else
    TinyIsZero() {}
#endif
    TinyIsZero(const TinyIsZero&) = delete;
    TinyIsZero& operator=(const TinyIsZero&) = delete;

#if defined(__x86_64__)
  private:
    static constexpr unsigned kFlushed = 0x8040;  // FTZ and DAZ of MXCSR
    const unsigned before_;
#endif
};

class Pool {
  public:
    explicit Pool(int num_threads);  // starts num_threads - 1 threads; the caller of run() is thread 0
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return size_; }

    // Calls body(thread) on every thread and returns when all calls have returned. One caller at a time; body must not
    // throw.
    void run(const std::function<void(int)>& body);

    // To be called inside run() by every thread; returns when all have called it. Writes made before it are visible to
    // all threads after it.
    void barrier();

  private:
    // A counter whose change threads wait for: they spin first, then sleep in the kernel (futex).
    struct Signal {
        std::atomic<int> value{0};
        std::atomic<int> sleepers{0};
        void advance();
        bool changes_soon(int old, int spins) const;
        void sleep(int old);
    };

    void work(int thread);

    const int size_;
    alignas(64) Signal region_;   // advances when run() begins a region, and when the pool is destroyed
    alignas(64) Signal phase_;    // advances when the last thread reaches a barrier
    alignas(64) std::atomic<int> arrived_{0};
    const std::function<void(int)>* body_ = nullptr;  // of the current region; null = threads end
    std::vector<std::thread> threads_;
};

}  // namespace kvl
