// The blocks of a batch in the registered KV cache: the pieces of memory of which each consists, and copying them.
#pragma once

#include <cstdint>
#include <cstring>

#include "sums.hpp"

namespace ems {

constexpr int64_t kSkipped = -1;  // Run::number of tokens that a load does not write

// A registered tensor. stride: bytes from block to block; width: bytes of a token; group: its layer group.
struct Tensor {
    uint8_t* data;
    int64_t stride;
    int64_t width;
    int64_t group;
};

// Contiguous tokens: the number of the cache's block, the first token in it, the number of tokens.
struct Run {
    int64_t number;
    int64_t start;
    int64_t count;
};

// The blocks of a batch. edges [num_blocks * num_groups + 1]: index of the first run of each block and layer group.
struct Batch {
    const Tensor* tensors;
    int64_t num_tensors;
    int64_t num_groups;
    const Run* runs;
    const int64_t* edges;
    int64_t num_blocks;
};

// Calls move(memory of the cache or null, bytes) for each piece of a block in the order of its bytes.
template <typename Move>
void for_pieces(const Batch& batch, int64_t block, Move move) {
    for (int64_t t = 0; t < batch.num_tensors; t++) {
        const Tensor& tensor = batch.tensors[t];
        const int64_t* edge = batch.edges + block * batch.num_groups + tensor.group;
        for (const Run* run = batch.runs + edge[0]; run != batch.runs + edge[1]; run++) {
            uint8_t* memory = nullptr;
            if (run->number != kSkipped) {
                memory = tensor.data + run->number * tensor.stride + run->start * tensor.width;
            }
            move(memory, static_cast<size_t>(run->count * tensor.width));
        }
    }
}

inline int64_t block_bytes(const Batch& batch, int64_t block) {
    int64_t size = 0;
    for_pieces(batch, block, [&](const uint8_t*, size_t count) { size += static_cast<int64_t>(count); });
    return size;
}

// Copies a block's bytes to `target`; returns the end of the copy.
inline uint8_t* gather(const Batch& batch, int64_t block, uint8_t* target) {
    for_pieces(batch, block, [&](const uint8_t* memory, size_t size) {
        std::memcpy(target, memory, size);
        target += size;
    });
    return target;
}

// The same, and the checksum of what was copied. A block of one piece is written past the caches.
inline Sum gather_summed(const Batch& batch, int64_t block, uint8_t* target, const Xxh3& xxh3) {
    int num_pieces = 0;
    const uint8_t* first = nullptr;
    size_t size = 0;
    for_pieces(batch, block, [&](const uint8_t* memory, size_t count) {
        first = num_pieces++ == 0 ? memory : first;
        size += count;
    });
    if (num_pieces == 1) {
        SummedCopy copy(xxh3);
        if (copy.is_ready()) {
            return copy(target, first, size);
        }
    }
    gather(batch, block, target);
    return sum_of(xxh3, target, size);
}

// Copies `source`, which has as many bytes as the block, to the block's tokens. next: the source that will be read
// after it, to be prefetched; or null.
inline void scatter(const Batch& batch, int64_t block, const uint8_t* source, const uint8_t* next) {
    const uint8_t* ahead = next != nullptr ? next : source + kAhead;
    for_pieces(batch, block, [&](uint8_t* memory, size_t count) {
        if (memory != nullptr) {
            copy_ahead(memory, source, count, ahead);
        }
        source += count;
        ahead += count;
    });
}

}  // namespace ems
