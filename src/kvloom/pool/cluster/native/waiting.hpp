// Waiting for a socket, until a deadline.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdint>

namespace ems {

constexpr int kClosed = -1;  // returned instead of an errno: the peer has closed the connection
// Bytes that must have arrived before a waiting receiver is woken, if so many are left.
constexpr uint64_t kWoken = 256 << 10;

// Waits until the socket is ready for `events`, at most until deadline_ns of CLOCK_MONOTONIC. Returns 0 or an errno.
inline int wait(int fd, short events, int64_t deadline_ns) {
    pollfd waiting{fd, events, 0};
    while (true) {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        const int64_t left_ns = deadline_ns - (int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec);
        if (left_ns <= 0) {
            return ETIMEDOUT;
        }
        const int left_ms = static_cast<int>(std::min<int64_t>(INT_MAX, left_ns / 1'000'000 + 1));
        const int ready = poll(&waiting, 1, left_ms);
        if (ready > 0) {
            return 0;
        }
        if (ready < 0 && errno != EINTR) {
            return errno;
        }
    }
}

// The low-water mark of a receiving socket (SO_RCVLOWAT): a wake-up for each segment costs the receiver, and a sender on
// the same machine, more than a copy. At the end of a call one byte is enough again, as readers of frames need it.
class LowWater {
  public:
    explicit LowWater(int fd) : fd_(fd) {}
    ~LowWater() { set(1); }
    LowWater(const LowWater&) = delete;
    LowWater& operator=(const LowWater&) = delete;

    // Waits for the next of the `left` bytes that are still to come. An errno, or 0.
    int await(uint64_t left, int64_t deadline_ns) {
        set(static_cast<int>(std::min(left, kWoken)));
        return wait(fd_, POLLIN, deadline_ns);
    }

  private:
    // Where the system refuses, the receiver is woken sooner.
    void set(int bytes) {
        if (bytes != bytes_ && setsockopt(fd_, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes) == 0) {
            bytes_ = bytes;
        }
    }

    int fd_;
    int bytes_ = 1;
};

}  // namespace ems
