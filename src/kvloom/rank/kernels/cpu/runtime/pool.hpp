// The threads of one model: one parallel region a step, a barrier between its phases.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace kvl {

// While it lives, subnormal floats (below 2^-126) are 0 in this thread, as operands and as results: the processor takes
// a hundred times as long for them, and they do not affect any sum. On other processors than x86-64 it does nothing.
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
    explicit Pool(int num_threads);  // the caller of run() is thread 0; the others are started here
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return size_; }

    // Calls body(thread) on every thread and returns when all are back. One caller at a time; body must not throw.
    void run(const std::function<void(int)>& body);

    // Inside run(): returns once every thread has called it. Writes made before it are seen by all after it.
    void barrier();

  private:
    // A number that threads wait on to change: they spin first, and sleep in the kernel then.
    struct Signal {
        std::atomic<int> value{0};
        std::atomic<int> sleepers{0};
        void advance();
        bool changes_soon(int old, int spins) const;
        void sleep(int old);
    };

    void work(int thread);

    const int size_;
    alignas(64) Signal region_;   // advances when run() has new work, or at the end of the pool
    alignas(64) Signal phase_;    // advances when the last thread reaches a barrier
    alignas(64) std::atomic<int> arrived_{0};
    const std::function<void(int)>* body_ = nullptr;  // null in a region = stop
    std::vector<std::thread> threads_;
};

}  // namespace kvl
