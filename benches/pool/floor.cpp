// What two processes need at least for a batch: a message and its answer over a Unix socket, the copies and the sums of
// the same bytes, and nothing else: no index, no names, no checks, no memory to be found.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <sys/socket.h>
#include <unistd.h>

#include "sums.hpp"

namespace {

constexpr size_t kMessageBytes = 2500;  // of 64 keys, where they lie and their sums, about

// Blocks of the arena to be copied into the pool, and summed. At most as many as the arena has.
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

// Answers until its caller is gone.
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

// `num` blocks of `source` into the arena, and from there to block `to` of the pool, in messages of `at_once` blocks.
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

// A message and its answer, then `num` blocks of the pool from `from` on: each is summed, then copied. 0 = a ping.
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

// What client and agent do to `num` blocks, by one thread: copied into a staging area of 512 KiB, from there into
// the pool with sums; then as many others of the pool are summed and copied to `target`.
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
