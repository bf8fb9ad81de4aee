// Transfers the bytes of a batch of blocks between a socket and the pool's memory in one call, without the interpreter
// lock.
// Received bytes are checksummed while they are still in the processor's cache. Only the state of a checksum is
// allocated. No state is kept between calls: after a failed call the position in the stream is unknown, and the caller
// must close the connection.

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <numeric>

#include "sums.hpp"

namespace {

using ems::Sum;
using ems::Xxh3;

constexpr int kClosed = -1;               // returned instead of an errno: the peer has closed the connection
constexpr size_t kMost = 256 << 10;       // most bytes per system call: well within a core's second-level cache
// Bytes that must have arrived before a waiting receiver is woken, if so many are left.
constexpr uint64_t kWoken = 256 << 10;
constexpr int kPieces = 64;               // most blocks per system call
constexpr size_t kUnwantedBytes = 16 << 10;  // most unwanted bytes read at a time

// A block's memory; data null = its bytes are received and dropped.
struct Piece {
    uint8_t* data;
    uint64_t size;
};

// Waits until the socket is ready for `events`, at most until deadline_ns of CLOCK_MONOTONIC. Returns 0 or an errno.
int wait(int fd, short events, int64_t deadline_ns) {
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

// The position in a batch: the current piece, and the number of its bytes that are done.
class Position {
  public:
    Position(const Piece* pieces, int64_t num) : pieces_(pieces), num_(num) { skip_empty(); }

    bool is_at_end() const { return index_ == num_; }

    // Bytes that are not transferred yet.
    uint64_t left() const {
        const auto add = [](uint64_t size, const Piece& piece) { return size + piece.size; };
        return std::accumulate(pieces_ + index_, pieces_ + num_, uint64_t{0}, add) - done_;
    }

    // Fills `parts` with the memory to send from or receive into next, at most kMost bytes; returns the number of
    // parts. `unwanted`: memory for bytes that are dropped.
    int parts(iovec* parts, uint8_t* unwanted) const {
        int count = 0;
        size_t room = kMost;
        uint64_t done = done_;
        for (int64_t i = index_; i < num_ && count < kPieces && room > 0; i++) {
            const Piece& piece = pieces_[i];
            const bool is_wanted = piece.data != nullptr;
            const size_t size = std::min<uint64_t>(piece.size - done, is_wanted ? room : std::min(room, kUnwantedBytes));
            parts[count++] = {is_wanted ? piece.data + done : unwanted, size};
            room -= size;
            if (done + size < piece.size) {
                break;
            }
            done = 0;
        }
        return count;
    }

    // Advances by `count` bytes. For each piece calls take(index, memory or null, number of bytes, whether these are
    // the piece's first, whether its last).
    template <typename Take>
    void advance(size_t count, Take&& take) {
        while (count > 0) {
            const Piece& piece = pieces_[index_];
            const size_t size = std::min<uint64_t>(piece.size - done_, count);
            take(index_, piece.data == nullptr ? nullptr : piece.data + done_, size, done_ == 0, done_ + size == piece.size);
            count -= size;
            done_ += size;
            if (done_ == piece.size) {
                index_++;
                done_ = 0;
                skip_empty();
            }
        }
    }

  private:
    void skip_empty() {
        while (index_ < num_ && pieces_[index_].size == 0) {
            index_++;
        }
    }

    const Piece* pieces_;
    int64_t num_;
    int64_t index_ = 0;
    uint64_t done_ = 0;
};

// Computes the checksums of pieces that arrive in parts.
class Summing {
  public:
    Summing(const Xxh3& xxh3, Sum* sums) : xxh3_(xxh3), sums_(sums), state_(xxh3.create()) {}
    ~Summing() { xxh3_.release(state_); }
    Summing(const Summing&) = delete;
    Summing& operator=(const Summing&) = delete;

    bool is_ready() const { return state_ != nullptr; }

    void operator()(int64_t number, const uint8_t* data, size_t size, bool begins, bool ends) {
        if (data == nullptr) {
            return;
        }
        if (begins && ends) {
            sums_[number] = ems::sum_of(xxh3_, data, size);
            return;
        }
        if (begins) {
            xxh3_.reset(state_);
        }
        xxh3_.update(state_, data, size);
        if (ends) {
            sums_[number] = ems::canonical(xxh3_.digest(state_));
        }
    }

  private:
    const Xxh3& xxh3_;
    Sum* sums_;
    void* state_;
};

}  // namespace

extern "C" {

// Writes the checksum of `size` bytes to out[16].
void stream_sum(const Xxh3* xxh3, const uint8_t* data, uint64_t size, uint8_t* out) {
    const Sum sum = ems::sum_of(*xxh3, data, size);
    std::memcpy(out, sum.data(), sum.size());
}

// Receives the pieces from a socket; writes the checksums of those with memory to sums [num][16]. Returns 0, an errno
// or kClosed.
int stream_receive(int fd, const Xxh3* xxh3, const Piece* pieces, int64_t num, int64_t deadline_ns, Sum* sums) {
    Summing summing(*xxh3, sums);
    if (!summing.is_ready()) {
        return ENOMEM;
    }
    uint8_t unwanted[kUnwantedBytes];
    iovec parts[kPieces];
    LowWater low_water(fd);
    for (Position position(pieces, num); !position.is_at_end();) {
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = static_cast<size_t>(position.parts(parts, unwanted));
        const ssize_t count = recvmsg(fd, &message, MSG_DONTWAIT);
        if (count > 0) {
            position.advance(static_cast<size_t>(count), summing);
        } else if (count == 0) {
            return kClosed;
        } else if (errno != EINTR) {
            const bool is_empty = errno == EAGAIN || errno == EWOULDBLOCK;
            const int problem = is_empty ? low_water.await(position.left(), deadline_ns) : errno;
            if (problem != 0) {
                return problem;
            }
        }
    }
    return 0;
}

// Sends the pieces, all of which must have memory. Returns 0 or an errno.
int stream_send(int fd, const Piece* pieces, int64_t num, int64_t deadline_ns) {
    iovec parts[kPieces];
    for (Position position(pieces, num); !position.is_at_end();) {
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = static_cast<size_t>(position.parts(parts, nullptr));
        const ssize_t count = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (count >= 0) {
            position.advance(static_cast<size_t>(count), [](int64_t, const uint8_t*, size_t, bool, bool) {});
        } else if (errno != EINTR) {
            const int problem = errno == EAGAIN || errno == EWOULDBLOCK ? wait(fd, POLLOUT, deadline_ns) : errno;
            if (problem != 0) {
                return problem;
            }
        }
    }
    return 0;
}

}  // extern "C"
