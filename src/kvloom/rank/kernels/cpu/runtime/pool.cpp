#include "runtime/pool.hpp"

#include <algorithm>
#include <climits>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvl {
namespace {

// Most spins before a thread sleeps, about 25 us: longer than the gaps between phases, and between the steps of a busy
// engine; short enough not to take a core from the server's other threads while the engine is idle.
constexpr int kMostSpins = 2000;
// 5 us: longer than most waits of threads that keep their cores, so that such threads soon spin instead of sleeping.
constexpr int kLeastSpins = 400;

// Number of times that this thread spins in a barrier before it sleeps. A wait that ended in sleep sets it to
// kLeastSpins: the late thread has probably lost its core and can run on this one. A wait that ended while spinning
// doubles it, up to kMostSpins.
thread_local int barrier_spins = kMostSpins;

void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Sleeps until woken; returns at once if the value is not `old`. May return spuriously.
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

// Sequentially consistent here and in sleep(): either the waiting thread sees the new value, or this call sees that it
// sleeps and wakes it.
void Pool::Signal::advance() {
    value.fetch_add(1);
    if (sleepers.load() > 0) wake_all(value);
}

bool Pool::Signal::changes_soon(int old, int spins) const {
    for (int i = 0; i < spins; i++) {
        if (value.load(std::memory_order_acquire) != old) return true;
        pause_cpu();
    }
    return false;
}

void Pool::Signal::sleep(int old) {
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
    } else if (phase_.changes_soon(phase, barrier_spins)) {
        barrier_spins = std::min(barrier_spins * 2, kMostSpins);
    } else {
        barrier_spins = kLeastSpins;
        phase_.sleep(phase);
    }
}

// Main loop of a thread. It counts regions itself: run() cannot begin the next one before all threads have reached the
// barrier at the end of the last, so the thread misses none.
void Pool::work(int thread) {
    const TinyIsZero tiny;
    for (int seen = 0;; seen++) {
        if (!region_.changes_soon(seen, kMostSpins)) region_.sleep(seen);
        if (body_ == nullptr) return;
        (*body_)(thread);
        barrier();
    }
}

}  // namespace kvl
