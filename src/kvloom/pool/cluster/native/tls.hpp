// Bytes of blocks inside TLS: OpenSSL encrypts and decrypts in memory, and many records pass in one system call.
//
// The connection belongs to Python, which shook hands on it; its functions are called by address, since the library is
// not linked to OpenSSL.
#pragma once

#include <memory>

#include "pieces.hpp"
#include "waiting.hpp"

namespace ems {

constexpr int kBroken = -2;  // returned instead of an errno: TLS refuses what came, or its use
// A record of TLS 1.3 is never longer: 16 KiB of plain text, what encrypting adds, and a header (RFC 8446, 5.2).
constexpr uint64_t kRecordBytes = (16 << 10) + 256 + 5;

// An SSL*, the memory BIOs that it reads from and writes to, and functions of OpenSSL. As TlsEnds in library.py.
struct Tls {
    void *ssl, *from_peer, *to_peer;
    int (*ssl_read)(void*, void*, int);
    int (*ssl_write)(void*, const void*, int);
    int (*ssl_get_error)(void*, int);
    int (*bio_read)(void*, void*, int);
    int (*bio_write)(void*, const void*, int);
    void (*err_clear_error)();
};

class TlsStream {
  public:
    // The calling thread's earlier errors are forgotten: OpenSSL would take them for those of this connection.
    TlsStream(const Tls& tls, int fd, int64_t deadline_ns) : tls_(tls), fd_(fd), deadline_ns_(deadline_ns), low_water_(fd) {
        tls_.err_clear_error();
    }

    // Fills the memory from `position` on. Returns 0, an errno, kClosed or kBroken.
    int receive(Position& position, Summing& summing) {
        uint8_t unwanted[kUnwantedBytes];
        while (!position.is_at_end()) {
            const iovec part = position.part(unwanted);
            const int count = tls_.ssl_read(tls_.ssl, part.iov_base, static_cast<int>(part.iov_len));
            if (count > 0) {
                position.advance(static_cast<size_t>(count), summing);
            } else if (const int problem = more(count, position.left()); problem != 0) {
                return problem;
            }
        }
        return 0;
    }

    // Sends the memory from `position` on. Returns as `receive`.
    int send(Position& position) {
        while (!position.is_at_end()) {
            for (size_t held = 0; held < kMost && !position.is_at_end();) {
                const iovec part = position.part(nullptr);
                const int count = tls_.ssl_write(tls_.ssl, part.iov_base, static_cast<int>(part.iov_len));
                if (count <= 0) {
                    return kBroken;
                }
                held += static_cast<size_t>(count);
                position.advance(static_cast<size_t>(count), [](int64_t, const uint8_t*, size_t, bool, bool) {});
            }
            if (const int problem = flush(); problem != 0) {
                return problem;
            }
        }
        return 0;
    }

  private:
    static constexpr int kWantsBytes = 2, kEnded = 6;  // SSL_ERROR_WANT_READ, SSL_ERROR_ZERO_RETURN

    // Gives TLS more bytes of the peer after a read that returned `result`; `left`: bytes that the caller still wants.
    int more(int result, uint64_t left) {
        const int why = tls_.ssl_get_error(tls_.ssl, result);
        const int problem = flush();  // an alert, or an answer to the peer's change of keys
        if (why != kWantsBytes) {
            return why == kEnded ? kClosed : kBroken;
        }
        if (problem != 0) {
            return problem;
        }
        while (true) {
            const ssize_t count = recv(fd_, room(), kRoomBytes, MSG_DONTWAIT);
            if (count > 0) {
                return tls_.bio_write(tls_.from_peer, room(), static_cast<int>(count)) == count ? 0 : ENOMEM;
            }
            if (count == 0) {
                return kClosed;
            }
            if (errno == EAGAIN || errno == EWOULDBLOCK) {
                // of the record that is under way, all but one byte may be here already
                const uint64_t surely = left > kRecordBytes ? left - kRecordBytes : 1;
                if (const int late = low_water_.await(surely, deadline_ns_); late != 0) {
                    return late;
                }
            } else if (errno != EINTR) {
                return errno;
            }
        }
    }

    // Sends what TLS has for the peer.
    int flush() {
        int size;
        while ((size = tls_.bio_read(tls_.to_peer, room(), kRoomBytes)) > 0) {
            for (int done = 0; done < size;) {
                const ssize_t count = ::send(fd_, room() + done, static_cast<size_t>(size - done), MSG_DONTWAIT | MSG_NOSIGNAL);
                if (count >= 0) {
                    done += static_cast<int>(count);
                } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
                    if (const int late = wait(fd_, POLLOUT, deadline_ns_); late != 0) {
                        return late;
                    }
                } else if (errno != EINTR) {
                    return errno;
                }
            }
        }
        return 0;
    }

    static constexpr int kRoomBytes = kMost + (32 << 10);  // kMost bytes in records

    // Memory of each thread, kept: fresh pages for each call would cost more than the bytes.
    static uint8_t* room() {
        static thread_local const std::unique_ptr<uint8_t[]> own(new uint8_t[kRoomBytes]);
        return own.get();
    }

    const Tls& tls_;
    int fd_;
    int64_t deadline_ns_;
    LowWater low_water_;
};

}  // namespace ems
