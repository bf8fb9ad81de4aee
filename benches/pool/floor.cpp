// The least that two processes need for a batch: a message and its answer over a Unix socket, and copies and checksums
// of the bytes; no index, no names, no checks, no allocation.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <sys/socket.h>
#include <unistd.h>

#include "sums.hpp"

namespace {

constexpr size_t kMessageBytes = 2500;  // about the bytes of 64 keys with their locations and checksums

// An order to copy blocks of the arena into the pool and checksum them; at most as many blocks as the arena holds.
struct Order {
    int64_t from;
    int64_t to;
    int64_t count;
};

bool receive(int fd, uint8_t* data, size_t size) {
    for (size_t have = 0; have < size;) {
        const ssize_t count = recv(fd, data + have, size - have, 0);
        if (count <= 0) {
            return false;
        }
        have += static_cast<size_t>(count);
    }
    return true;
}

}  // namespace

extern "C" {

// Serves orders until the caller closes the socket.
void floor_serve(int fd, const ems::Xxh3* xxh3, uint8_t* arena, uint8_t* pool, int64_t block_bytes) {
    ems::SummedCopy copy(*xxh3);
    const auto size = static_cast<size_t>(block_bytes);
    uint8_t message[kMessageBytes] = {};
    while (receive(fd, message, kMessageBytes)) {
        Order order;
        std::memcpy(&order, message, sizeof order);
        for (int64_t i = 0; i < order.count; i++) {
            copy(pool + (order.to + i) * block_bytes, arena + (order.from + i) * block_bytes, size);
        }
        send(fd, message, kMessageBytes, MSG_NOSIGNAL);
    }
}

// Copies `num` blocks of `source` to the arena, and from there to the pool, from block `to` on, `at_once` blocks per
// message.
void floor_save(int fd, const uint8_t* source, uint8_t* arena, int64_t block_bytes, int64_t num, int64_t at_once,
                int64_t to) {
    uint8_t message[kMessageBytes] = {};
    int64_t num_sent = 0;
    for (int64_t from = 0; from < num; from += at_once, num_sent++) {
        const int64_t count = std::min(at_once, num - from);
        std::memcpy(arena + from * block_bytes, source + from * block_bytes, static_cast<size_t>(count * block_bytes));
        const Order order{from, to + from, count};
        std::memcpy(message, &order, sizeof order);
        send(fd, message, kMessageBytes, MSG_NOSIGNAL);
    }
    for (; num_sent > 0; num_sent--) {
        receive(fd, message, kMessageBytes);
    }
}

// Exchanges a message and its answer, then checksums and copies `num` blocks of the pool, from block `from` on. 0 = a
// ping.
uint64_t floor_load(int fd, const ems::Xxh3* xxh3, const uint8_t* pool, uint8_t* target, int64_t block_bytes,
                    int64_t num, int64_t from) {
    uint8_t message[kMessageBytes] = {};
    send(fd, message, kMessageBytes, MSG_NOSIGNAL);
    receive(fd, message, kMessageBytes);
    uint64_t sums = 0;
    for (int64_t i = 0; i < num; i++) {
        const uint8_t* block = pool + (from + i) * block_bytes;
        sums ^= xxh3->whole(block, static_cast<size_t>(block_bytes)).low;
        std::memcpy(target + i * block_bytes, block, static_cast<size_t>(block_bytes));
    }
    return sums;
}

// The work of client and agent for `num` blocks, on one thread: copies them to a staging area of 512 KiB and from
// there, with checksums, to the pool; then checksums as many other blocks of the pool and copies them to `target`.
uint64_t floor_mixed(const ems::Xxh3* xxh3, const uint8_t* source, uint8_t* pool, const uint8_t* saved, uint8_t* target,
                     int64_t block_bytes, int64_t num) {
    constexpr int64_t kArenaBytes = 512 << 10;
    alignas(64) static uint8_t arena[kArenaBytes];
    ems::SummedCopy copy(*xxh3);
    const auto size = static_cast<size_t>(block_bytes);
    uint64_t sums = 0;
    for (int64_t first = 0; first < num; first += kArenaBytes / block_bytes) {
        const int64_t end = std::min(num, first + kArenaBytes / block_bytes);
        for (int64_t i = first; i < end; i++) {
            std::memcpy(arena + (i - first) * block_bytes, source + i * block_bytes, size);
        }
        for (int64_t i = first; i < end; i++) {
            sums ^= copy(pool + i * block_bytes, arena + (i - first) * block_bytes, size)[0];
        }
    }
    for (int64_t i = 0; i < num; i++) {
        sums ^= xxh3->whole(saved + i * block_bytes, size).low;
        std::memcpy(target + i * block_bytes, saved + i * block_bytes, size);
    }
    return sums;
}

}  // extern "C"
