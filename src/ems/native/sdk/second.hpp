// A second thread for long batches. Who finds it idle has it take some of his steps; it is one a process, and starts with
// the first batch that is long enough.
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

constexpr int64_t kSharedBytes = 2 << 20;  // of a batch: below, waking another thread costs more than it saves

class Second {
  public:
    // Calls step(i) for each i below `num`, in order of beginning, by this thread alone or by both; returns when those that
    // began have ended. None begins after one that was false.
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

        // How many steps were taken.
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

    // Of this process, taken for one batch; null = it is at work, or has come too late lately, or cannot be had.
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
        static const int registered = pthread_atfork(nullptr, nullptr, [] {  // the thread is its parent's
            instance() = nullptr;
            is_taken() = false;
        });
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are the caller's threads'
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

    static constexpr int64_t kMaxPause = 63;  // longest pause in batches, after it was repeatedly too late

    std::mutex lock_;
    std::condition_variable changed_;
    Work* work_ = nullptr;  // not started by the second thread yet
    std::atomic<bool> is_busy_{false};
    std::atomic<int64_t> num_taken_{0};
    int64_t pause_ = 0;         // of who has taken it
    int64_t num_left_out_ = 0;  // likewise
};

}  // namespace ems
