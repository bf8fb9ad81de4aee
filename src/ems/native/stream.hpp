// Frames over a connected Unix socket, and a link of requests and their answers. Nothing here throws; what goes wrong is an
// error number, as errno has it.
#pragma once

#include <atomic>
#include <cerrno>
#include <ctime>
#include <poll.h>
#include <sys/socket.h>

#include "clock.hpp"
#include "lookout.hpp"
#include "sums.hpp"
#include "wire.hpp"

namespace ems {

constexpr int64_t kForEver = INT64_MAX;
constexpr int kMalformed = EBADMSG;

inline uint32_t left_ms(int64_t deadline_ns) {
    return static_cast<uint32_t>(std::clamp<int64_t>((deadline_ns - now_ns()) / 1000000, 0, UINT32_MAX));
}

// Until the socket can be read or written. 0, or ETIMEDOUT.
inline int wait_for(int fd, short events, int64_t deadline_ns) {
    while (true) {
        const int64_t left_ns = deadline_ns == kForEver ? 0 : deadline_ns - now_ns();
        if (left_ns < 0) {
            return ETIMEDOUT;
        }
        const timespec left{left_ns / 1000000000, left_ns % 1000000000};
        pollfd wanted{fd, events, 0};
        const int count = ppoll(&wanted, 1, deadline_ns == kForEver ? nullptr : &left, nullptr);
        if (count != 0 && (count > 0 || errno != EINTR)) {
            return count > 0 ? 0 : errno;
        }
    }
}

inline int send_all(int fd, const uint8_t* data, size_t size, int64_t deadline_ns) {
    while (size > 0) {
        if (deadline_ns != kForEver && now_ns() > deadline_ns) {
            return ETIMEDOUT;
        }
        const ssize_t count = send(fd, data, size, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (count >= 0) {
            data += count;
            size -= static_cast<size_t>(count);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            if (const int problem = wait_for(fd, POLLOUT, deadline_ns)) {
                return problem;
            }
        } else if (errno != EINTR) {
            return errno;
        }
    }
    return 0;
}

// A frame that was received. It stays until the next one is asked for.
struct Frame {
    Header header;
    const uint8_t* bytes;  // header and body; if it is not a frame, the bytes received
    size_t size;

    BodyReader body() const { return {bytes + kHeaderBytes, size - kHeaderBytes}; }
};

class FrameStream {
  public:
    explicit FrameStream(int fd) : fd_(fd) {}

    // Bytes received before this stream was created.
    void feed(const uint8_t* data, size_t size) {
        if (size == 0) {
            return;
        }
        buffer_.resize(std::max(buffer_.size(), end_ + size));
        std::memcpy(buffer_.data() + end_, data, size);
        end_ += size;
    }

    // Whether the whole of another frame is here; then `next` does not wait.
    bool has_frame() const {
        if (end_ - start_ < kHeaderBytes) {
            return false;
        }
        const Header header = header_here();
        return !is_sound(header) || end_ - start_ >= kHeaderBytes + header.body_bytes;
    }

    // Another frame whose whole is here, without going on to it. It was not checked.
    bool peek(Frame& frame) const {
        if (!has_frame() || !is_sound(header_here())) {
            return false;
        }
        frame = {header_here(), buffer_.data() + start_, kHeaderBytes + header_here().body_bytes};
        return true;
    }

    // The next frame. 0, ETIMEDOUT, ECONNRESET when the other side closed, kMalformed, or what recv says.
    int next(int64_t deadline_ns, Frame& frame) {
        while (!has_frame()) {
            if (const int problem = receive(deadline_ns)) {
                return problem;
            }
        }
        frame.header = header_here();
        frame.bytes = buffer_.data() + start_;
        frame.size = kHeaderBytes + frame.header.body_bytes;
        const bool is_good = is_sound(frame.header) && crc_of(frame.bytes, frame.header.body_bytes) == frame.header.crc;
        if (!is_good) {
            frame.size = end_ - start_;
        }
        start_ += frame.size;
        return is_good ? 0 : kMalformed;
    }

  private:
    static constexpr size_t kAhead = 1 << 16;

    static bool is_sound(const Header& header) {
        return header.magic == kMagic && header.version == kVersion && header.body_bytes <= kMaxBodyBytes;
    }

    Header header_here() const {
        Header header;
        std::memcpy(&header, buffer_.data() + start_, sizeof header);
        return header;
    }

    int receive(int64_t deadline_ns) {
        if (start_ == end_) {
            start_ = end_ = 0;
        }
        size_t wanted = kAhead;
        if (end_ - start_ >= kHeaderBytes) {
            wanted = std::max(wanted, kHeaderBytes + header_here().body_bytes - (end_ - start_));
        }
        if (start_ > 0 && buffer_.size() - end_ < wanted) {
            std::memmove(buffer_.data(), buffer_.data() + start_, end_ - start_);
            end_ -= start_;
            start_ = 0;
        }
        if (buffer_.size() < end_ + wanted) {
            buffer_.resize(end_ + wanted);
        }
        while (true) {
            // Who sleeps in `recv` itself is woken whenever the other end reads what it was sent: `poll` tells that apart.
            const ssize_t count = recv(fd_, buffer_.data() + end_, buffer_.size() - end_, MSG_DONTWAIT);
            if (count > 0) {
                end_ += static_cast<size_t>(count);
                return 0;
            }
            if (count == 0) {
                return ECONNRESET;
            }
            if (errno == EAGAIN || errno == EWOULDBLOCK) {
                if (const int problem = wait_for(fd_, POLLIN, deadline_ns)) {
                    return problem;
                }
            } else if (errno != EINTR) {
                return errno;
            }
        }
    }

    int fd_;
    std::vector<uint8_t> buffer_;  // of which start_ .. end_ is not read yet
    size_t start_ = 0;
    size_t end_ = 0;
};

}  // namespace ems

namespace ems {

// Instead of an error number.
constexpr int kUnexpected = -1;  // the answer is in `odd`
constexpr int kUnmapped = -2;    // segments must be mapped, or mapped again, before the call continues
constexpr int kOutside = -3;     // a block lies outside of its segment

}  // namespace ems

extern "C" {

// A link. odd: the frame that was not expected, until the next call.
struct EmsLine {
    int64_t deadline_ns;  // of the running call
    int64_t request_id;   // of the last request
    const uint8_t* odd;
    int64_t num_odd;
    std::atomic<int64_t>* board;  // where the agent looks for the last lease that was read; or null
};

}  // extern "C"

namespace ems {

// With buffers that are reused by all calls, so that none allocates memory.
class Exchange : public EmsLine {
  public:
    explicit Exchange(int fd) : EmsLine{}, fd_(fd), stream_(fd) {}

    // Of the last load: where its blocks lie, and their sums.
    std::vector<int64_t> segments, offsets, lengths;
    std::vector<int64_t> numbers;  // of those that were there, where each was asked for
    std::vector<Sum> sums;

    FrameWriter& begin(Op op, uint8_t num_values) {
        writer_.data.clear();
        writer_.begin(op, static_cast<uint64_t>(++request_id), left_ms(deadline_ns), num_values);
        return writer_;
    }

    int send() {
        writer_.end();
        return send_all(fd_, writer_.data.data(), writer_.data.size(), deadline_ns);
    }

    // The next answer, which must be that message. 0, an error number, or kUnexpected.
    int receive(Op op, Frame& frame) {
        if (!stream_.has_frame()) {
            lookout_.look(fd_);
        }
        const int problem = stream_.next(deadline_ns, frame);
        const bool is_odd = problem == kMalformed || (problem == 0 && frame.header.op != op);
        return is_odd ? unexpected(frame) : problem;
    }

    // Whether the connection is there, with nothing to be read.
    bool is_idle() const {
        pollfd wanted{fd_, POLLIN, 0};
        return !stream_.has_frame() && poll(&wanted, 1, 0) == 0;
    }

    int unexpected(const Frame& frame) {
        odd = frame.bytes;
        num_odd = static_cast<int64_t>(frame.size);
        return kUnexpected;
    }

  private:
    int fd_;
    FrameStream stream_;
    FrameWriter writer_;
    Lookout lookout_;
};

}  // namespace ems
