// A second thread that shares the work of long batches. There is one per process, started by the first batch that is
// long enough; a caller that finds it busy works alone.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

namespace ems {

constexpr int64_t kSharedBytes = 2 << 20;  // smallest batch to share: else waking a thread costs more than it saves

class Second {
  public:
    // Calls step(i) for i = 0 .. num - 1, started in this order, on this thread or on both; returns when all started
    // steps have returned. After a step that returns false no other is started. `step` must be safe to call from two
    // threads.
    template <typename Step>
    static void share(int64_t num, int64_t bytes, Step step) {
        Work work{&step, [](void* with, int64_t i) { return (*static_cast<Step*>(with))(i); }, num};
        Second* second = bytes >= kSharedBytes && num > 1 ? idle() : nullptr;
        if (second == nullptr) {
            work.run();
        } else {
            second->run(work);
        }
    }

  private:
    struct Work {
        void* with;
        bool (*step)(void* with, int64_t i);
        const int64_t num;
        std::atomic<int64_t> next{0};
        std::atomic<bool> is_over{false};

        // Runs steps until none is left; returns how many this thread ran.
        int64_t run() {
            int64_t count = 0;
            while (!is_over) {
                const int64_t i = next++;
                if (i >= num) {
                    break;
                }
                count++;
                if (!step(with, i)) {
                    is_over = true;
                }
            }
            return count;
        }
    };

    // Reserves the process's second thread for one batch; null = it is busy, recently began too late to help, or cannot
    // be started.
    static Second* idle() {
        if (is_taken().exchange(true)) {
            return nullptr;
        }
        Second*& second = instance();
        if (second == nullptr) {
            second = start();
        }
        if (second == nullptr || second->num_left_out_-- > 0) {
            is_taken() = false;
            return nullptr;
        }
        return second;
    }

    static std::atomic<bool>& is_taken() {
        static std::atomic<bool> taken{false};
        return taken;
    }

    static Second*& instance() {
        static Second* made = nullptr;
        return made;
    }

    static Second* start() {
        if (std::thread::hardware_concurrency() < 2) {
            return nullptr;
        }
        static const int registered = pthread_atfork(nullptr, nullptr, [] {  // a forked child does not have the thread
            instance() = nullptr;
            is_taken() = false;
        });
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // the new thread inherits the mask: it handles no signals
        auto* made = new Second;
        try {
            std::thread(&Second::serve, made).detach();
        } catch (const std::system_error&) {
            delete made;
            made = nullptr;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return registered == 0 ? made : nullptr;
    }

    void run(Work& work) {
        {
            const std::lock_guard<std::mutex> lock(lock_);
            work_ = &work;
            num_taken_ = 0;
        }
        changed_.notify_one();
        work.run();
        {
            const std::lock_guard<std::mutex> lock(lock_);
            work_ = nullptr;
        }
        while (is_busy_) {
            sched_yield();
        }
        const bool was_late = num_taken_ == 0;
        pause_ = was_late ? std::min<int64_t>(2 * pause_ + 1, kMaxPause) : 0;
        num_left_out_ = pause_;
        is_taken() = false;
    }

    void serve() {
        while (true) {
            Work* work;
            {
                std::unique_lock<std::mutex> lock(lock_);
                changed_.wait(lock, [&] { return work_ != nullptr; });
                work = work_;
                work_ = nullptr;
                is_busy_ = true;
            }
            num_taken_ = work->run();
            is_busy_ = false;
        }
    }

    static constexpr int64_t kMaxPause = 63;  // most batches done without it after it was repeatedly too late

    std::mutex lock_;
    std::condition_variable changed_;
    Work* work_ = nullptr;  // work that the second thread has not taken yet
    std::atomic<bool> is_busy_{false};
    std::atomic<int64_t> num_taken_{0};
    int64_t pause_ = 0;         // accessed only by the caller that has reserved it
    int64_t num_left_out_ = 0;  // likewise
};

}  // namespace ems
