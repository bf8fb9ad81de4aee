// The names of a batch of blocks; the reference is keys.py. SHA-256 is computed by the library that Python's hashlib
// calls; Python passes the addresses of its functions.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "plan.hpp"

namespace {

constexpr size_t kNameBytes = 32;
constexpr size_t kMaxIntegerBytes = 13;  // an encoded integer: sign, length, magnitude of at most 64 bits

}  // namespace

namespace {

// Memory for a SHA256_CTX, which has 112 bytes.
struct alignas(16) Hash {
    uint8_t state[256];
};

// Encodes an integer as keys.encode_int does; returns the number of bytes.
size_t encode(uint64_t value, bool is_signed, uint8_t* out) {
    const bool is_negative = is_signed && static_cast<int64_t>(value) < 0;
    const uint64_t magnitude = is_negative ? ~value + 1 : value;
    uint32_t size = 0;
    while (size < 8 && magnitude >> (8 * size) != 0) {
        size++;
    }
    out[0] = is_negative;
    std::memcpy(out + 1, &size, sizeof size);
    for (uint32_t i = 0; i < size; i++) {
        out[5 + i] = static_cast<uint8_t>(magnitude >> (8 * (size - 1 - i)));
    }
    return 5 + size;
}

}  // namespace

extern "C" {

// Names of blocks whose prefix hash the caller has computed. values: [num] these hashes; counts: [num, num_groups]
// tokens in each layer group; out: the names, packed.
void ems_hash_names(const EmsSha256* sha256, const uint8_t* base, int64_t num_base, const uint64_t* values,
                    int is_signed, const uint64_t* counts, int64_t num_groups, int64_t num, uint8_t* out) {
    uint8_t integer[kMaxIntegerBytes];
    Hash hash;
    for (int64_t i = 0; i < num; i++) {
        sha256->init(&hash);
        sha256->update(&hash, base, num_base);
        sha256->update(&hash, integer, encode(values[i], is_signed != 0, integer));
        sha256->update(&hash, counts + i * num_groups, num_groups * sizeof *counts);
        sha256->final(out + i * kNameBytes, &hash);
    }
}

// Names of the blocks of a token sequence: each one depends on the names before it. out: the names, packed.
void ems_token_names(const EmsSha256* sha256, const uint8_t* base, int64_t num_base, const int64_t* tokens, int64_t num,
                     int64_t block_size, uint8_t* out) {
    Hash hash;
    for (int64_t start = 0; start < num; start += block_size, out += kNameBytes) {
        const uint64_t count = num - start < block_size ? num - start : block_size;
        sha256->init(&hash);
        sha256->update(&hash, base, num_base);
        if (start > 0) {
            sha256->update(&hash, out - kNameBytes, kNameBytes);
        }
        sha256->update(&hash, &count, sizeof count);
        sha256->update(&hash, tokens + start, count * sizeof *tokens);
        sha256->final(out, &hash);
    }
}

}  // extern "C"
