// The threads of one model: each step is one parallel region, in phases. A thread that loses its core delays the others
// only while it writes results (docs/decisions/kernel-speed.md).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
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

#ifdef __SANITIZE_THREAD__
// A thread that helps may read what others write meanwhile, and then does not win. To the sanitizer that is a race.
constexpr bool kHelps = false;
#else
constexpr bool kHelps = true;
#endif

// An item of a phase that a thread has begun. If the thread seems to have lost its core, others compute the item as well,
// and the first one to be done keeps its results.
class Claim {
  public:
    Claim(std::atomic<uint64_t>& word, uint64_t open) : word_(&word), open_(open) {}

    int64_t item() const { return int64_t(open_ & UINT32_MAX) >> 1; }
    // Whether the caller is the first one: then it must write the item's results, else it must not. To be called once,
    // before anything is written that other threads can see. What the caller has read until then may be newer than the
    // phase if it is not the first one.
    bool wins() { return word_->compare_exchange_strong(open_, open_ | 1, std::memory_order_acq_rel); }

  private:
    std::atomic<uint64_t>* word_;
    uint64_t open_;  // the word while the item can be won: phase << 32 | item << 1
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

    // Inside run() all threads go through the same phases in the same order. Each phase is a call of barrier() or of
    // share() by every thread. Writes made in a phase are visible to all threads after it.

    // Returns when all threads have called it.
    void barrier(int thread) {
        Member& own = members_[size_t(thread)];
        count_done(own);
        own.due += size_;
        if (phase_.arrive(own.phase, size_)) phase_.end(own.phase);
        else wait(own, [] { return false; });
        own.phase++;
    }

    // Does `count` items. next() takes one for the calling thread, or gives `count` if none is left; work(claim) computes
    // an item, writes its results if claim.wins(), and returns whether it did. Returns when all items are done, even if
    // threads have not come this far: a late thread finds no items left. So between two phases a thread must use only
    // what is its own, or does not change during run().
    template <class Next, class Work>
    void share(int thread, int64_t count, const Next& next, const Work& work) {
        Member& own = members_[size_t(thread)];
        const auto work_on = [&](Claim claim) {
            if (work(claim)) count_done(own);
        };
        for (int64_t item; (item = next()) < count;) work_on(claim(own, item));
        own.due += count;
        if (phase_.arrive(own.phase, size_) && all_done(own.due)) phase_.end(own.phase);
        else wait(own, [&] { return help(own, work_on); });
        own.phase++;
    }

  private:
    // A counter of turns that threads wait for, spinning or asleep in the kernel (futex). It also counts the threads that
    // have arrived at the end of the current turn.
    struct Signal {
        std::atomic<uint32_t> value{0};  // turn << kArrivedBits | arrived
        std::atomic<int> sleepers{0};
        bool is_over(uint32_t turn, uint32_t value) const { return ((value >> kArrivedBits) ^ turn) << kArrivedBits != 0; }
        bool is_over_soon(uint32_t turn, int spins) const;
        bool arrive(uint32_t turn, int size);  // whether the caller is the last of `size` threads
        void end(uint32_t turn);               // does nothing if it is over
        void sleep(uint32_t turn);             // until it is over
    };
    struct alignas(64) Member {
        std::atomic<uint64_t> claim{1};  // the item that it works on, as in Claim; odd = somebody has won it
        std::atomic<int64_t> done{0};    // items that it has won and finished since the pool was made
        // the following are used by the thread alone
        int64_t due = 0;                 // items of all phases until now
        uint32_t phase = 0;
    };

    static void count_done(Member& own) { own.done.store(own.done.load(std::memory_order_relaxed) + 1, std::memory_order_release); }
    static Claim claim(Member& own, int64_t item) {
        const uint64_t open = uint64_t(own.phase) << 32 | uint64_t(item) << 1;
        own.claim.store(open, std::memory_order_release);
        return {own.claim, open};
    }
    bool all_done(int64_t due) const;
    void work(int thread);

    // Waits for the end of the thread's phase. help() does an item that another thread has begun, and returns whether
    // there was one.
    template <class Help>
    void wait(Member& own, const Help& help) {
        int spins = 0;
        while (!phase_.is_over_soon(own.phase, kLeastSpins)) {
            do {
                if (all_done(own.due)) return phase_.end(own.phase);
            } while (help());
            spins += kLeastSpins;
            if (spins < barrier_spins) continue;
            barrier_spins = kLeastSpins;
            return phase_.sleep(own.phase);
        }
        barrier_spins = std::min(barrier_spins * 2, kMostSpins);
    }

    // Does an item of the thread's phase that another thread has begun and nobody has won.
    template <class Work>
    bool help(Member& own, const Work& work_on) {
        for (Member& other : members_) {
            const uint64_t word = other.claim.load(std::memory_order_acquire);
            if (!kHelps || &other == &own || word >> 32 != own.phase || word % 2 != 0) continue;
            work_on(Claim(other.claim, word));
            return true;
        }
        return false;
    }

    static constexpr int kArrivedBits = 12;  // 4,095 threads
    // Most spins at the end of a phase before a thread sleeps, about 25 us: longer than most items.
    static constexpr int kMostSpins = 2000;
    // 5 us: longer than most waits of threads that keep their cores, so that such threads soon spin instead of sleeping.
    // After as long a thread looks for items of others.
    static constexpr int kLeastSpins = 400;
    // Number of times that this thread spins at the end of a phase before it sleeps. A wait that ended in sleep sets it to
    // kLeastSpins: the late thread has probably lost its core and can run on this one. A wait that ended while spinning
    // doubles it, up to kMostSpins.
    static thread_local int barrier_spins;

    const int size_;
    alignas(64) Signal region_;  // its turns end when run() begins a region, and when the pool is destroyed
    alignas(64) Signal phase_;
    std::vector<Member> members_;
    const std::function<void(int)>* body_ = nullptr;  // of the current region; null = threads end
    std::vector<std::thread> threads_;
};

}  // namespace kvl
