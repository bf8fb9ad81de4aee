// The SDK's data path: copies a batch of blocks between the registered KV cache and the pool's memory in one call.
//
// These functions do not allocate, lock or wait. The caller has checked that every run lies within its tensor. The
// bytes of a block are its tokens in order, tensor by tensor, as in HostTensors of ems/buffer.py.

#include "blocks.hpp"

using ems::Batch;
using ems::Sum;
using ems::Xxh3;

extern "C" {

// Writes the checksum of `size` bytes to out[16]; used to check that Python and C++ compute the same checksums.
void ems_sum(const Xxh3* xxh3, const uint8_t* data, uint64_t size, uint8_t* out) {
    const Sum sum = ems::sum_of(*xxh3, data, size);
    std::memcpy(out, sum.data(), sum.size());
}

// Copies each block's bytes to its target, and writes their checksums to sums [num_blocks][16], unless that is null.
void ems_gather(const Batch* batch, uint8_t* const* targets, const Xxh3* xxh3, uint8_t* sums) {
    for (int64_t block = 0; block < batch->num_blocks; block++) {
        const uint8_t* end = ems::gather(*batch, block, targets[block]);
        if (sums != nullptr) {
            const Sum sum = ems::sum_of(*xxh3, targets[block], end - targets[block]);
            std::memcpy(sums + block * sum.size(), sum.data(), sum.size());
        }
    }
}

// Copies each source's bytes to its block's tokens, if length and checksum match.
//
// lengths: [num_blocks] in bytes; sums: [num_blocks][16], null = checksums are not compared. Returns the number of
// blocks written: the first block that does not match, and the blocks after it, are not written.
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
