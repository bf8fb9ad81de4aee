// The SDK's data path: a batch of blocks between the registered KV cache and the pool's memory, in one call.
//
// Nothing here allocates, locks or waits; the caller has checked that every run lies within its tensor. A block's bytes
// are, tensor by tensor, its tokens in order, as HostTensors in ems/buffer.py has them.

#include <cstdint>
#include <cstring>

#include "sums.hpp"

namespace {

using ems::Sum;
using ems::Xxh3;

constexpr int64_t kSkipped = -1;  // instead of a block number: tokens that a load leaves alone

// A registered tensor. stride: bytes from block to block; width: bytes of a token.
struct Tensor {
    uint8_t* data;
    int64_t stride;
    int64_t width;
    int64_t group;
};

// Tokens that lie together: the block of the cache, the first one in it, how many.
struct Run {
    int64_t number;
    int64_t start;
    int64_t count;
};

// What a batch moves. edges [num_blocks * num_groups + 1]: where the runs of each block and layer group begin.
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

int64_t block_bytes(const Batch& batch, int64_t block) {
    int64_t size = 0;
    for_pieces(batch, block, [&](const uint8_t*, size_t count) { size += static_cast<int64_t>(count); });
    return size;
}

}  // namespace

extern "C" {

// The sum of `size` bytes into `out` [16]: for the check that both sides sum alike.
void ems_sum(const Xxh3* xxh3, const uint8_t* data, uint64_t size, uint8_t* out) {
    const Sum sum = ems::sum_of(*xxh3, data, size);
    std::memcpy(out, sum.data(), sum.size());
}

// Writes each block's bytes to its target; sums [num_blocks][16], if not null, gets their sums.
void ems_gather(const Batch* batch, uint8_t* const* targets, const Xxh3* xxh3, uint8_t* sums) {
    for (int64_t block = 0; block < batch->num_blocks; block++) {
        uint8_t* position = targets[block];
        for_pieces(*batch, block, [&](const uint8_t* memory, size_t size) {
            std::memcpy(position, memory, size);
            position += size;
        });
        if (sums != nullptr) {
            const Sum sum = ems::sum_of(*xxh3, targets[block], position - targets[block]);
            std::memcpy(sums + block * sum.size(), sum.data(), sum.size());
        }
    }
}

// Writes each source's bytes to its block's tokens, if its length and its sum are what they must be.
//
// lengths [num_blocks] in bytes; sums [num_blocks][16], null = the sources are not checked. Returns how many blocks were
// written: the first that does not match, and those behind it, leave the cache as it was.
int64_t ems_scatter(const Batch* batch, const uint8_t* const* sources, const int64_t* lengths, const Xxh3* xxh3,
                    const uint8_t* sums) {
    for (int64_t block = 0; block < batch->num_blocks; block++) {
        const uint8_t* position = sources[block];
        if (lengths[block] != block_bytes(*batch, block)) {
            return block;
        }
        if (sums != nullptr) {
            const Sum sum = ems::sum_of(*xxh3, position, static_cast<size_t>(lengths[block]));
            if (std::memcmp(sum.data(), sums + block * sum.size(), sum.size()) != 0) {
                return block;
            }
        }
        for_pieces(*batch, block, [&](uint8_t* memory, size_t size) {
            if (memory != nullptr) {
                std::memcpy(memory, position, size);
            }
            position += size;
        });
    }
    return batch->num_blocks;
}

}  // extern "C"
