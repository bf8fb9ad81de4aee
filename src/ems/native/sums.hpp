// xxh3-128 sums of blocks. The functions are those of the xxhash library that Python has loaded anyway: their addresses
// are handed in, so that both sides sum with the same code and nothing of it is copied here.
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

// Addresses of xxhash's functions, in the order in which Python hands them in.
struct Xxh3 {
    Hash128 (*whole)(const void* data, size_t size);
    void* (*create)();
    int (*release)(void* state);
    int (*reset)(void* state);
    int (*update)(void* state, const void* data, size_t size);
    Hash128 (*digest)(const void* state);
};

// The canonical form: the high half first, big-endian, as Python's digest() gives it.
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

// Copies blocks and sums what it wrote, in pieces: each is summed while it is still in the cache.
class SummedCopy {
  public:
    explicit SummedCopy(const Xxh3& xxh3) : xxh3_(xxh3), state_(xxh3.create()) {}
    ~SummedCopy() { xxh3_.release(state_); }
    SummedCopy(const SummedCopy&) = delete;
    SummedCopy& operator=(const SummedCopy&) = delete;

    bool is_ready() const { return state_ != nullptr; }

    // The sum is of the bytes at `target`: a process that still writes to `source` cannot make the two differ.
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
    static constexpr size_t kPiece = 8 << 10;   // source and copy together fit into the first cache of a core
    static constexpr size_t kLarge = 4 << 10;   // goes past the caches: hardly a block is read while they would have it

    // Writes a piece; where the same bytes can be summed.
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
    bool is_past_ = false;  // whether this block goes past the caches
};

}  // namespace ems
