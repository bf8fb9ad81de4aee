// XXH3-128 checksums of blocks, computed by the xxhash library that Python has loaded: Python passes the addresses of
// its functions, so that both use the same code and the library's source need not be copied.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "copies.hpp"

namespace ems {

// XXH128_hash_t of xxhash.h.
struct Hash128 {
    uint64_t low;
    uint64_t high;
};

// Addresses of xxhash's functions, in the order in which Python passes them.
struct Xxh3 {
    Hash128 (*whole)(const void* data, size_t size);
    void* (*create)();
    int (*release)(void* state);
    int (*reset)(void* state);
    int (*update)(void* state, const void* data, size_t size);
    Hash128 (*digest)(const void* state);
};

// A checksum in canonical form: the high half first, big-endian, as Python's digest() returns it.
using Sum = std::array<uint8_t, 16>;

inline Sum canonical(Hash128 hash) {
    Sum sum;
    for (int i = 0; i < 8; i++) {
        sum[i] = static_cast<uint8_t>(hash.high >> (56 - 8 * i));
        sum[8 + i] = static_cast<uint8_t>(hash.low >> (56 - 8 * i));
    }
    return sum;
}

inline Sum sum_of(const Xxh3& xxh3, const uint8_t* data, size_t size) { return canonical(xxh3.whole(data, size)); }

// Copies blocks and computes the checksum of the written bytes, piece by piece, while each is still in the cache.
class SummedCopy {
  public:
    explicit SummedCopy(const Xxh3& xxh3) : xxh3_(xxh3), state_(xxh3.create()) {}
    ~SummedCopy() { xxh3_.release(state_); }
    SummedCopy(const SummedCopy&) = delete;
    SummedCopy& operator=(const SummedCopy&) = delete;

    bool is_ready() const { return state_ != nullptr; }

    // The checksum is that of the copied bytes: it is right even if another process still writes to `source`.
    Sum operator()(uint8_t* target, const uint8_t* source, size_t size) {
        Sum sum;
        is_past_ = kHasLines && size >= kLarge;
        if (size <= kPiece) {
            sum = sum_of(xxh3_, put(target, source, size), size);
        } else {
            xxh3_.reset(state_);
            for (size_t start = 0; start < size; start += kPiece) {
                const size_t count = std::min(kPiece, size - start);
                xxh3_.update(state_, put(target + start, source + start, count), count);
            }
            sum = canonical(xxh3_.digest(state_));
        }
        finish_copies();
        return sum;
    }

  private:
    static constexpr size_t kPiece = 8 << 10;   // source and copy together fit a core's first-level cache
    // Blocks of at least this size are written past the caches: few are read while the caches would still hold them.
    static constexpr size_t kLarge = 4 << 10;

    // Writes a piece; returns the address of a cached copy, to compute the checksum from.
    const uint8_t* put(uint8_t* target, const uint8_t* source, size_t size) {
        if (!is_past_ || reinterpret_cast<uintptr_t>(target) % kLine != 0) {
            std::memcpy(target, source, size);
            return target;
        }
        const size_t lines = size / kLine * kLine;
        copy_lines(target, kept_, source, lines);
        std::memcpy(kept_ + lines, source + lines, size - lines);
        std::memcpy(target + lines, kept_ + lines, size - lines);
        return kept_;
    }

    alignas(kLine) uint8_t kept_[kPiece];
    const Xxh3& xxh3_;
    void* state_;
    bool is_past_ = false;  // whether this block is written past the caches
};

}  // namespace ems
