// The SDK's data path: a batch of blocks between the registered KV cache and the pool's memory, in one call.
//
// Nothing here allocates, locks or waits; the caller has checked that every run lies within its tensor. A block's bytes
// are, tensor by tensor, its tokens in order, as HostTensors in ems/buffer.py has them.

#include "blocks.hpp"

using ems::Batch;
using ems::Sum;
using ems::Xxh3;

extern "C" {

// The sum of `size` bytes into `out` [16]: for the check that both sides sum alike.
void ems_sum(const Xxh3* xxh3, const uint8_t* data, uint64_t size, uint8_t* out) {
    const Sum sum = ems::sum_of(*xxh3, data, size);
    std::memcpy(out, sum.data(), sum.size());
}

// Writes each block's bytes to its target; sums [num_blocks][16], if not null, gets their sums.
void ems_gather(const Batch* batch, uint8_t* const* targets, const Xxh3* xxh3, uint8_t* sums) {
    for (int64_t block = 0; block < batch->num_blocks; block++) {
        const uint8_t* end = ems::gather(*batch, block, targets[block]);
        if (sums != nullptr) {
            const Sum sum = ems::sum_of(*xxh3, targets[block], end - targets[block]);
            std::memcpy(sums + block * sum.size(), sum.data(), sum.size());
        }
    }
}

// Writes each source's bytes to its block's tokens, if length and checksum match.
//
// lengths [num_blocks] in bytes; sums [num_blocks][16], null = the sources are not checked. Returns how many blocks were
// written: the first that does not match, and those behind it, leave the cache as it was.
int64_t ems_scatter(const Batch* batch, const uint8_t* const* sources, const int64_t* lengths, const Xxh3* xxh3,
                    const Sum* sums) {
    for (int64_t block = 0; block < batch->num_blocks; block++) {
        if (lengths[block] != block_bytes(*batch, block)) {
            return block;
        }
        if (sums != nullptr && ems::sum_of(*xxh3, sources[block], static_cast<size_t>(lengths[block])) != sums[block]) {
            return block;
        }
        ems::scatter(*batch, block, sources[block], block + 1 < batch->num_blocks ? sources[block + 1] : nullptr);
    }
    return batch->num_blocks;
}

}  // extern "C"
