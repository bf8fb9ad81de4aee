// Spinning for an answer before sleeping until it comes. A thread on a sleeping core starts 20 to 35 us after it is woken,
// and waking it keeps the other side busy for 10 us.
#pragma once

#include <algorithm>
#include <cstdint>
#include <poll.h>
#include <sys/resource.h>
#include <thread>

#include "clock.hpp"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace ems {

// Whether to spin. A thread that spun in vain skips it for the next answers, for twice as many each time; so does one that
// was preempted since the last call, because other threads want the core.
class Patience {
  public:
    bool may_look(bool was_preempted) {
        if (was_preempted) {
            put_off();
        }
        if (num_left_out_ == 0) {
            return true;
        }
        num_left_out_--;
        return false;
    }

    void looked(bool has_come) { has_come ? forgive() : put_off(); }

  private:
    static constexpr int64_t kMaxPause = 63;

    void forgive() { pause_ /= 2; }

    void put_off() {
        pause_ = std::min<int64_t>(2 * pause_ + 1, kMaxPause);
        num_left_out_ = pause_;
    }

    int64_t pause_ = 0;  // answers that are left out the next time, about
    int64_t num_left_out_ = 0;
};

// Of one link.
class Lookout {
  public:
    // Until the socket can be read, kMostNs at most, if that seems worth it.
    void look(int fd) {
        static const bool has_cores = std::thread::hardware_concurrency() > 1;
        if (has_cores && patience_.may_look(was_preempted())) {
            patience_.looked(comes(fd));
        }
    }

  private:
    static constexpr int64_t kMostNs = 100'000;  // a save's last answer takes 80 us, a load's 30
    static constexpr int kPauses = 8;            // of the processor, between two looks

    static bool comes(int fd) {
        const int64_t end_ns = now_ns() + kMostNs;
        do {
            pollfd wanted{fd, POLLIN, 0};
            if (poll(&wanted, 1, 0) != 0) {
                return true;
            }
            relax();
        } while (now_ns() < end_ns);
        return false;
    }

    static void relax() {
#ifdef __x86_64__
        for (int i = 0; i < kPauses; i++) {
            _mm_pause();
        }
#endif
    }

    // Whether the kernel took the core from this thread since it asked last.
    static bool was_preempted() {
        static thread_local long num_known = 0;
        rusage used{};
        getrusage(RUSAGE_THREAD, &used);
        const bool was = used.ru_nivcsw != num_known;
        num_known = used.ru_nivcsw;
        return was;
    }

    Patience patience_;
};

}  // namespace ems
