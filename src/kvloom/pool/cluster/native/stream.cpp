// Transfers the bytes of a batch of blocks between a socket and the pool's memory in one call, without the interpreter
// lock.
// Received bytes are checksummed while they are still in the processor's cache. After a failed call the position in the
// stream is unknown, and the caller must close the connection.

#include "tls.hpp"

using ems::Piece;
using ems::Position;
using ems::Sum;
using ems::Summing;
using ems::Tls;
using ems::Xxh3;

namespace {

int receive_plain(int fd, Position& position, Summing& summing, int64_t deadline_ns) {
    uint8_t unwanted[ems::kUnwantedBytes];
    iovec parts[ems::kPieces];
    ems::LowWater low_water(fd);
    while (!position.is_at_end()) {
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = static_cast<size_t>(position.parts(parts, unwanted));
        const ssize_t count = recvmsg(fd, &message, MSG_DONTWAIT);
        if (count > 0) {
            position.advance(static_cast<size_t>(count), summing);
        } else if (count == 0) {
            return ems::kClosed;
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

int send_plain(int fd, Position& position, int64_t deadline_ns) {
    iovec parts[ems::kPieces];
    while (!position.is_at_end()) {
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = static_cast<size_t>(position.parts(parts, nullptr));
        const ssize_t count = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (count >= 0) {
            position.advance(static_cast<size_t>(count), [](int64_t, const uint8_t*, size_t, bool, bool) {});
        } else if (errno != EINTR) {
            const bool is_full = errno == EAGAIN || errno == EWOULDBLOCK;
            const int problem = is_full ? ems::wait(fd, POLLOUT, deadline_ns) : errno;
            if (problem != 0) {
                return problem;
            }
        }
    }
    return 0;
}

}  // namespace

extern "C" {

// Writes the checksum of `size` bytes to out[16].
void stream_sum(const Xxh3* xxh3, const uint8_t* data, uint64_t size, uint8_t* out) {
    const Sum sum = ems::sum_of(*xxh3, data, size);
    std::memcpy(out, sum.data(), sum.size());
}

// Receives the pieces from a socket, inside TLS unless `tls` is null; writes the checksums of those with memory to
// sums [num][16]. Returns 0, an errno, kClosed or kBroken.
int stream_receive(int fd, const Tls* tls, const Xxh3* xxh3, const Piece* pieces, int64_t num, int64_t deadline_ns,
                   Sum* sums) {
    Summing summing(*xxh3, sums);
    if (!summing.is_ready()) {
        return ENOMEM;
    }
    Position position(pieces, num);
    if (tls == nullptr) {
        return receive_plain(fd, position, summing, deadline_ns);
    }
    return ems::TlsStream(*tls, fd, deadline_ns).receive(position, summing);
}

// Sends the pieces, all of which must have memory, inside TLS unless `tls` is null. Returns as stream_receive.
int stream_send(int fd, const Tls* tls, const Piece* pieces, int64_t num, int64_t deadline_ns) {
    Position position(pieces, num);
    if (tls == nullptr) {
        return send_plain(fd, position, deadline_ns);
    }
    return ems::TlsStream(*tls, fd, deadline_ns).send(position);
}

}  // extern "C"
