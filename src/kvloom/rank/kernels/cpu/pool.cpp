#include "pool.hpp"

#include <climits>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvl {
namespace {

// About 50 us: longer than the gap between phases and between steps of a busy engine, short enough not to steal a core
// from the server's other threads while the engine is idle or another process holds the core of a late thread.
constexpr int kSpins = 2000;

void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Sleeps until woken, or returns at once when the value is no longer `old`. May wake for no reason.
void sleep_while(std::atomic<int>& value, int old) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<int*>(&value), FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
#else
    if (value.load() == old) std::this_thread::yield();
#endif
}

void wake_all(std::atomic<int>& value) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<int*>(&value), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
}

}  // namespace

// Sequentially consistent on both sides: either the waiter sees the new value, or this sees the waiter.
void Pool::Signal::advance() {
    value.fetch_add(1);
    if (sleepers.load() > 0) wake_all(value);
}

void Pool::Signal::wait_while(int old) {
    for (int i = 0; i < kSpins; i++) {
        if (value.load(std::memory_order_acquire) != old) return;
        pause_cpu();
    }
    sleepers.fetch_add(1);
    while (value.load() == old) sleep_while(value, old);
    sleepers.fetch_sub(1);
}

Pool::Pool(int num_threads) : size_(num_threads) {
    for (int thread = 1; thread < size_; thread++) threads_.emplace_back([this, thread] { work(thread); });
}

Pool::~Pool() {
    body_ = nullptr;
    region_.advance();
    for (std::thread& thread : threads_) thread.join();
}

void Pool::run(const std::function<void(int)>& body) {
    body_ = &body;
    region_.advance();
    {
        const TinyIsZero tiny;
        body(0);
    }
    barrier();
}

void Pool::barrier() {
    if (size_ == 1) return;
    const int phase = phase_.value.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1) + 1 == size_) {
        arrived_.store(0);
        phase_.advance();
    } else {
        phase_.wait_while(phase);
    }
}

// A thread counts regions itself: the next one cannot begin before it has left the barrier of the last.
void Pool::work(int thread) {
    const TinyIsZero tiny;
    for (int seen = 0;; seen++) {
        region_.wait_while(seen);
        if (body_ == nullptr) return;
        (*body_)(thread);
        barrier();
    }
}

}  // namespace kvl
