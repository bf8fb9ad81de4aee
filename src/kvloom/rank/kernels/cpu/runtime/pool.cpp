#include "runtime/pool.hpp"

#include <climits>
#include <system_error>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvl {
namespace {

void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Sleeps until woken; returns at once if the value is not `old`. May return spuriously.
void sleep_while(std::atomic<uint32_t>& value, uint32_t old) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
#else
    if (value.load() == old) std::this_thread::yield();
#endif
}

void wake_all(std::atomic<uint32_t>& value) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
}

}  // namespace

bool Pool::Signal::is_over_soon(uint32_t turn, int spins) const {
    for (int i = 0; i < spins; i++) {
        if (is_over(turn, value.load(std::memory_order_acquire))) return true;
        pause_cpu();
    }
    return false;
}

bool Pool::Signal::arrive(uint32_t turn, int size) {
    uint32_t now = value.load(std::memory_order_acquire);
    do {
        if (is_over(turn, now)) return false;
    } while (!value.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel));
    return int((now + 1) & ((1u << kArrivedBits) - 1)) == size;
}

// Sequentially consistent here and in sleep(): either the waiting thread sees the new value, or this call sees that it
// sleeps and wakes it.
void Pool::Signal::end(uint32_t turn) {
    uint32_t now = value.load();
    do {
        if (is_over(turn, now)) return;
    } while (!value.compare_exchange_weak(now, (turn + 1) << kArrivedBits));
    if (sleepers.load() > 0) wake_all(value);
}

void Pool::Signal::sleep(uint32_t turn) {
    sleepers.fetch_add(1);
    for (uint32_t now; !is_over(turn, now = value.load());) sleep_while(value, now);
    sleepers.fetch_sub(1);
}

thread_local int Pool::barrier_spins = kMostSpins;

Pool::Pool(int num_threads) : size_(num_threads), members_(size_t(num_threads)) {
    try {
        for (int thread = 1; thread < size_; thread++) threads_.emplace_back([this, thread] { work(thread); });
    } catch (const std::system_error&) {  // there is no further thread: those that run end
        region_.end(0);
        for (std::thread& thread : threads_) thread.join();
        throw;
    }
}

Pool::~Pool() {
    body_ = nullptr;
    region_.end(region_.value.load() >> kArrivedBits);
    for (std::thread& thread : threads_) thread.join();
}

void Pool::run(const std::function<void(int)>& body) {
    body_ = &body;
    region_.end(region_.value.load() >> kArrivedBits);
    {
        const TinyIsZero tiny;
        body(0);
    }
    barrier(0);
}

// Whether all items of all phases until now are done. The fence makes at least one of two threads that finish the last
// two items at a time see both.
bool Pool::all_done(int64_t due) const {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    int64_t done = 0;
    for (const Member& member : members_) done += member.done.load(std::memory_order_acquire);
    return done == due;
}

// Main loop of a thread. Between regions it sleeps at once, because the server's other threads then have work for its
// core, and the next region does not wait for it. It counts regions itself: run() cannot begin the next one before all threads have reached the
// barrier at the end of the last, so the thread misses none.
void Pool::work(int thread) {
    const TinyIsZero tiny;
    for (uint32_t seen = 0;; seen++) {
        region_.sleep(seen);
        if (body_ == nullptr) return;
        (*body_)(thread);
        barrier(thread);
    }
}

}  // namespace kvl
