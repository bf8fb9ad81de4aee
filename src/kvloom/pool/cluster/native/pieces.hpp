// The blocks of a batch: their memory, the position in it, and their checksums.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>

#include "sums.hpp"

namespace ems {

constexpr size_t kMost = 256 << 10;          // most bytes per system call: well within a core's second-level cache
constexpr int kPieces = 64;                  // most blocks per system call
constexpr size_t kUnwantedBytes = 16 << 10;  // most unwanted bytes read at a time

// A block's memory; data null = its bytes are received and dropped.
struct Piece {
    uint8_t* data;
    uint64_t size;
};

// The position in a batch: the current piece, and the number of its bytes that are done.
class Position {
  public:
    Position(const Piece* pieces, int64_t num) : pieces_(pieces), num_(num) { skip_empty(); }

    bool is_at_end() const { return index_ == num_; }

    // Bytes that are not transferred yet.
    uint64_t left() const {
        const auto add = [](uint64_t size, const Piece& piece) { return size + piece.size; };
        return std::accumulate(pieces_ + index_, pieces_ + num_, uint64_t{0}, add) - done_;
    }

    // The memory to send from or receive into next: the rest of the current piece, at most kMost bytes.
    iovec part(uint8_t* unwanted) const {
        const Piece& piece = pieces_[index_];
        const uint64_t left = piece.size - done_;
        if (piece.data == nullptr) {
            return {unwanted, std::min<uint64_t>(left, kUnwantedBytes)};
        }
        return {piece.data + done_, std::min<uint64_t>(left, kMost)};
    }

    // Fills `parts` with the memory to send from or receive into next, at most kMost bytes; returns the number of
    // parts. `unwanted`: memory for bytes that are dropped.
    int parts(iovec* parts, uint8_t* unwanted) const {
        int count = 0;
        size_t room = kMost;
        uint64_t done = done_;
        for (int64_t i = index_; i < num_ && count < kPieces && room > 0; i++) {
            const Piece& piece = pieces_[i];
            const bool is_wanted = piece.data != nullptr;
            const size_t size = std::min<uint64_t>(piece.size - done, is_wanted ? room : std::min(room, kUnwantedBytes));
            parts[count++] = {is_wanted ? piece.data + done : unwanted, size};
            room -= size;
            if (done + size < piece.size) {
                break;
            }
            done = 0;
        }
        return count;
    }

    // Advances by `count` bytes. For each piece calls take(index, memory or null, number of bytes, whether these are
    // the piece's first, whether its last).
    template <typename Take>
    void advance(size_t count, Take&& take) {
        while (count > 0) {
            const Piece& piece = pieces_[index_];
            const size_t size = std::min<uint64_t>(piece.size - done_, count);
            take(index_, piece.data == nullptr ? nullptr : piece.data + done_, size, done_ == 0, done_ + size == piece.size);
            count -= size;
            done_ += size;
            if (done_ == piece.size) {
                index_++;
                done_ = 0;
                skip_empty();
            }
        }
    }

  private:
    void skip_empty() {
        while (index_ < num_ && pieces_[index_].size == 0) {
            index_++;
        }
    }

    const Piece* pieces_;
    int64_t num_;
    int64_t index_ = 0;
    uint64_t done_ = 0;
};

// Computes the checksums of pieces that arrive in parts.
class Summing {
  public:
    Summing(const Xxh3& xxh3, Sum* sums) : xxh3_(xxh3), sums_(sums), state_(xxh3.create()) {}
    ~Summing() { xxh3_.release(state_); }
    Summing(const Summing&) = delete;
    Summing& operator=(const Summing&) = delete;

    bool is_ready() const { return state_ != nullptr; }

    void operator()(int64_t number, const uint8_t* data, size_t size, bool begins, bool ends) {
        if (data == nullptr) {
            return;
        }
        if (begins && ends) {
            sums_[number] = sum_of(xxh3_, data, size);
            return;
        }
        if (begins) {
            xxh3_.reset(state_);
        }
        xxh3_.update(state_, data, size);
        if (ends) {
            sums_[number] = canonical(xxh3_.digest(state_));
        }
    }

  private:
    const Xxh3& xxh3_;
    Sum* sums_;
    void* state_;
};

}  // namespace ems
