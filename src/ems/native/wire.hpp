// Frames and their MessagePack bodies, for the calls that move batches; the format is that of ems/wire/frames.py and
// packing.py. Malformed input is only reported as malformed: Python decodes it again and raises the detailed error.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "crc.hpp"

namespace ems {

constexpr uint32_t kMagic = 0x31534D45;  // "EMS1"
constexpr uint8_t kVersion = 1;
constexpr size_t kHeaderBytes = 28;
constexpr size_t kCrcAt = 24;  // offset of the CRC in the header; it covers all bytes before and after it
constexpr size_t kMaxBodyBytes = 1 << 20;
constexpr size_t kKeyBytes = 32;
// Bytes of a message: in the frame that was read, or where its writer has them.
struct Bytes {
    const uint8_t* data = nullptr;
    size_t size = 0;

    Bytes() = default;
    Bytes(const void* from, size_t num_bytes) : data(static_cast<const uint8_t*>(from)), size(num_bytes) {}
};

struct Header {
    uint32_t magic;
    uint8_t version;
    uint8_t op;
    uint16_t flags;
    uint64_t request_id;
    uint32_t deadline_ms;
    uint32_t body_bytes;
    uint32_t crc;
} __attribute__((packed));
static_assert(sizeof(Header) == kHeaderBytes, "the header is packed, little-endian");

inline uint32_t crc_of(const uint8_t* frame, size_t body_bytes) {
    return crc32(frame + kHeaderBytes, body_bytes, crc32(frame, kCrcAt));
}

// Appends frames of messages (messages.hpp) to `data`. Integers are encoded in the fewest bytes.
class FrameWriter {
  public:
    std::vector<uint8_t> data;

    template <typename Message>
    void add(const Message& message, uint64_t request_id, uint32_t deadline_ms = 0) {
        const size_t start = data.size();
        data.resize(start + kHeaderBytes);
        const Header header{kMagic, kVersion, Message::kOp, 0, request_id, deadline_ms, 0, 0};
        std::memcpy(data.data() + start, &header, sizeof header);
        data.push_back(0x90 | Message::kNumValues);
        message.write(*this);
        end(start);
    }

    void boolean(bool value) { data.push_back(value ? 0xC3 : 0xC2); }

    void integer(int64_t value) {
        const uint64_t bits = static_cast<uint64_t>(value);
        if (value >= -32 && value < 0x80) {
            put(bits, 1);
        } else if (value < 0) {
            put_as(0xD0 + width_of(~value), bits, 1 << width_of(~value));
        } else if (value <= 0xFF) {
            put_as(0xCC, bits, 1);
        } else if (value <= 0xFFFF) {
            put_as(0xCD, bits, 2);
        } else {
            value <= 0xFFFFFFFF ? put_as(0xCE, bits, 4) : put_as(0xCF, bits, 8);
        }
    }

    void bytes(const Bytes& value) {
        if (value.size <= 0xFF) {
            put_as(0xC4, value.size, 1);
        } else {
            value.size <= 0xFFFF ? put_as(0xC5, value.size, 2) : put_as(0xC6, value.size, 4);
        }
        if (value.size > 0) {
            data.insert(data.end(), value.data, value.data + value.size);
        }
    }

    void integers(const std::vector<int64_t>& values) {
        if (values.size() <= 15) {
            data.push_back(static_cast<uint8_t>(0x90 | values.size()));
        } else {
            values.size() <= 0xFFFF ? put_as(0xDC, values.size(), 2) : put_as(0xDD, values.size(), 4);
        }
        for (const int64_t value : values) {
            integer(value);
        }
    }

  private:
    void end(size_t start) {
        const size_t body_bytes = data.size() - start - kHeaderBytes;
        uint8_t* frame = data.data() + start;
        const auto size = static_cast<uint32_t>(body_bytes);
        std::memcpy(frame + kCrcAt - sizeof size, &size, sizeof size);
        const uint32_t crc = crc_of(frame, body_bytes);
        std::memcpy(frame + kCrcAt, &crc, sizeof crc);
    }

    // Width of a negative number, given its complement: 0 to 3 for 1, 2, 4 or 8 bytes.
    static uint8_t width_of(int64_t below) { return below < 0x80 ? 0 : below < 0x8000 ? 1 : below < 0x80000000 ? 2 : 3; }

    void put(uint64_t value, int size) {
        for (int i = size - 1; i >= 0; i--) {
            data.push_back(static_cast<uint8_t>(value >> (8 * i)));
        }
    }

    void put_as(uint8_t first, uint64_t value, int size) {
        data.push_back(first);
        put(value, size);
    }
};

// Reads the values of a body in order; a missing one becomes its default. After a value of an unexpected type is_good()
// is false.
class BodyReader {
  public:
    BodyReader(const uint8_t* data, size_t size) : at_(data), end_(data + size), left_(head(0x90, 0xDC)) {}

    void boolean(bool& value, bool otherwise = false) {
        value = otherwise;
        if (next()) {
            const uint64_t first = take(1);
            is_good_ = is_good_ && (first == 0xC2 || first == 0xC3);
            value = first == 0xC3;
        }
    }

    void integer(int64_t& value, int64_t otherwise = 0) { value = next() ? number() : otherwise; }

    void bytes(Bytes& value) {
        value = {};
        if (!next()) {
            return;
        }
        const uint64_t first = take(1);
        const bool is_bytes = first >= 0xC4 && first <= 0xC6;
        const uint64_t size = is_bytes ? take(1 << (first - 0xC4)) : 0;
        is_good_ = is_good_ && is_bytes && size <= static_cast<uint64_t>(end_ - at_);
        if (is_good_) {
            value = {at_, size};
            at_ += size;
        }
    }

    void integers(std::vector<int64_t>& values) {
        values.clear();
        if (!next()) {
            return;
        }
        const uint64_t count = head(0x90, 0xDC);
        is_good_ = is_good_ && count <= static_cast<uint64_t>(end_ - at_);
        for (uint64_t i = 0; is_good_ && i < count; i++) {
            values.push_back(number());
        }
    }

    // Whether all values had the expected types and at most num_missing were absent, as in messages of older versions.
    // Further values, which newer versions append, are ignored.
    bool is_good(uint64_t num_missing = 0) const {
        return is_good_ && num_missing_ <= num_missing && (left_ > 0 || at_ == end_);
    }

  private:
    bool next() {
        if (left_ == 0) {
            num_missing_++;
            return false;
        }
        left_--;
        return is_good_;
    }

    uint64_t take(int size) {
        if (!is_good_ || end_ - at_ < size) {
            is_good_ = false;
            return 0;
        }
        uint64_t value = 0;
        for (int i = 0; i < size; i++) {
            value = value << 8 | *at_++;
        }
        return value;
    }

    uint64_t head(uint8_t short_form, uint8_t long_form) {
        const uint64_t first = take(1);
        if (is_good_ && first >= short_form && first <= short_form + 15U) {
            return first - short_form;
        }
        is_good_ = is_good_ && (first == long_form || first == long_form + 1U);
        return take(first == long_form ? 2 : 4);
    }

    int64_t number() {
        const uint64_t first = take(1);
        if (first < 0x80) {
            return static_cast<int64_t>(first);
        }
        if (first >= 0xE0) {
            return static_cast<int8_t>(first);
        }
        is_good_ = is_good_ && first >= 0xCC && first <= 0xD3;
        const int size = 1 << ((first - 0xCC) & 3);
        const uint64_t value = take(size);
        if (first < 0xD0) {
            is_good_ = is_good_ && value <= INT64_MAX;
            return static_cast<int64_t>(value);
        }
        const int unused = 64 - 8 * size;
        return static_cast<int64_t>(value << unused) >> unused;
    }

    const uint8_t* at_;
    const uint8_t* end_;
    bool is_good_ = true;
    uint64_t left_;
    uint64_t num_missing_ = 0;
};

}  // namespace ems
