// Frames over a connected Unix socket, and a link that exchanges requests and answers. Functions report failures by
// returning an errno (0 = success) and do not throw.
#pragma once

#include <atomic>
#include <cerrno>
#include <ctime>
#include <poll.h>
#include <sys/socket.h>

#include "clock.hpp"
#include "lookout.hpp"
#include "messages.hpp"
#include "sums.hpp"

namespace ems {

constexpr int64_t kForEver = INT64_MAX;
constexpr int kMalformed = EBADMSG;

inline uint32_t left_ms(int64_t deadline_ns) {
    return static_cast<uint32_t>(std::clamp<int64_t>((deadline_ns - now_ns()) / 1000000, 0, UINT32_MAX));
}

// Waits until the socket is ready for `events`. Returns 0, ETIMEDOUT or another errno.
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

// A received frame; it is valid until the next call of FrameStream::next.
struct Frame {
    Header header;
    const uint8_t* bytes;  // header and body; if malformed, all bytes received
    size_t size;

    // Whether it is a message of this kind that can be read. The message is valid as long as the frame.
    template <typename Message>
    bool read(Message& message) const {
        if (header.op != Message::kOp) {
            return false;
        }
        BodyReader body{bytes + kHeaderBytes, size - kHeaderBytes};
        message.read(body);
        return body.is_good(Message::kNumValues - Message::kNumRequired);
    }
};

class FrameStream {
  public:
    explicit FrameStream(int fd) : fd_(fd) {}

    // Adds bytes that were received before this stream was created.
    void feed(const uint8_t* data, size_t size) {
        if (size == 0) {
            return;
        }
        buffer_.resize(std::max(buffer_.size(), end_ + size));
        std::memcpy(buffer_.data() + end_, data, size);
        end_ += size;
    }

    // Whether another complete frame was received; then next() does not wait.
    bool has_frame() const {
        if (end_ - start_ < kHeaderBytes) {
            return false;
        }
        const Header header = header_here();
        return !is_sound(header) || end_ - start_ >= kHeaderBytes + header.body_bytes;
    }

    // Looks at the next frame, if it was received completely, without consuming it or checking its CRC.
    bool peek(Frame& frame) const {
        if (!has_frame() || !is_sound(header_here())) {
            return false;
        }
        frame = {header_here(), buffer_.data() + start_, kHeaderBytes + header_here().body_bytes};
        return true;
    }

    // Receives the next frame. Returns 0, ETIMEDOUT, ECONNRESET if the peer has closed, kMalformed, or an errno of
    // recv.
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
            // Not a blocking recv: a thread that sleeps in one is also woken when the peer reads what it was sent; poll
            // is not.
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
    std::vector<uint8_t> buffer_;  // bytes [start_, end_) are not consumed yet
    size_t start_ = 0;
    size_t end_ = 0;
};

}  // namespace ems

namespace ems {

// Returned instead of an errno.
constexpr int kUnexpected = -1;  // the answer is in `odd`
constexpr int kUnmapped = -2;    // segments must be mapped, or mapped again, before the call continues
constexpr int kOutside = -3;     // a block lies outside of its segment

}  // namespace ems

extern "C" {

// A link. odd: an unexpected frame of num_odd bytes, valid until the next call.
struct EmsLine {
    int64_t deadline_ns;  // deadline of the current call
    int64_t request_id;   // number of the last request
    const uint8_t* odd;
    int64_t num_odd;
    std::atomic<int64_t>* board;  // shared memory: the number of the last lease that was read, for the agent; or null
};

}  // extern "C"

namespace ems {

// A link with its connection, and buffers that all calls reuse, so that calls do not allocate memory. Not thread-safe.
class Exchange : public EmsLine {
  public:
    explicit Exchange(int fd) : EmsLine{}, fd_(fd), stream_(fd) {}

    Found found;                   // the last load's answer: locations of the blocks
    Reserved reserved;             // the last reservation's answer
    std::vector<int64_t> numbers;  // the index in the request of each block that was found
    std::vector<Sum> sums;         // checksums of these
    std::vector<uint8_t> statuses;  // of the blocks of the last reservation

    // Sends a request. Returns 0 or an errno.
    template <typename Request>
    int send(const Request& request) {
        writer_.data.clear();
        writer_.add(request, static_cast<uint64_t>(++request_id), left_ms(deadline_ns));
        return send_all(fd_, writer_.data.data(), writer_.data.size(), deadline_ns);
    }

    // Receives the next answer, which must be of this kind. Returns 0, an errno or kUnexpected.
    template <typename Answer>
    int receive(Answer& answer) {
        if (!stream_.has_frame()) {
            lookout_.look(fd_);
        }
        const int problem = stream_.next(deadline_ns, frame_);
        const bool is_odd = problem == kMalformed || (problem == 0 && !frame_.read(answer));
        return is_odd ? unexpected() : problem;
    }

    // Sends a request and receives its answer.
    template <typename Request>
    int call(const Request& request, typename Request::Answer& answer) {
        const int problem = send(request);
        return problem != 0 ? problem : receive(answer);
    }

    // Whether the connection is open and there is nothing to read.
    bool is_idle() const {
        pollfd wanted{fd_, POLLIN, 0};
        return !stream_.has_frame() && poll(&wanted, 1, 0) == 0;
    }

    // Leaves the last answer to Python.
    int unexpected() {
        odd = frame_.bytes;
        num_odd = static_cast<int64_t>(frame_.size);
        return kUnexpected;
    }

  private:
    int fd_;
    Frame frame_{};  // the last answer
    FrameStream stream_;
    FrameWriter writer_;
    Lookout lookout_;
};

}  // namespace ems
