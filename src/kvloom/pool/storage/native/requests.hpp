// Decodes a session's requests from frames. Invalid requests (is_good = false) are left to Python.
#pragma once

#include <numeric>

#include "stream.hpp"
#include "entries.hpp"

namespace pool {

// The keys of a request, and whether it concerns this node only. Points into the frame.
struct Asked {
    const Key* keys = nullptr;
    int64_t num = 0;
    bool is_local = false;
    bool is_good = false;

    explicit Asked(const ems::Frame& frame) {
        ems::BodyReader body = frame.body();
        size_t size;
        keys = reinterpret_cast<const Key*>(body.bytes(size));
        is_local = body.boolean();
        num = static_cast<int64_t>(size / sizeof(Key));
        is_good = body.is_good(1) && size % sizeof(Key) == 0 && num <= ems::kMaxKeys;
    }
};

// A request to save blocks: their keys, and offsets and lengths in the staging area. Points into the frame.
struct ToSave {
    const Key* keys = nullptr;
    const Key* parent = nullptr;  // the key before the first, or null
    std::vector<int64_t> offsets;
    std::vector<int64_t> lengths;
    bool is_last = true;
    bool is_chain = true;
    bool is_good = false;

    explicit ToSave(const ems::Frame& frame) {
        ems::BodyReader body = frame.body();
        size_t num_keys, num_parent;
        keys = reinterpret_cast<const Key*>(body.bytes(num_keys));
        body.integers(offsets);
        body.integers(lengths);
        const uint8_t* before = body.bytes(num_parent);
        parent = num_parent > 0 ? reinterpret_cast<const Key*>(before) : nullptr;
        body.boolean();  // whether a copy is kept on this node; without other nodes it always is
        is_last = body.boolean(true);
        is_chain = body.boolean(true);
        const size_t num = num_keys / sizeof(Key);
        is_good = body.is_good(4) && num_keys % sizeof(Key) == 0 && num <= ems::kMaxKeys && offsets.size() == num &&
                  lengths.size() == num && (num_parent == 0 || num_parent == sizeof(Key));
    }

    int64_t bytes() const { return std::accumulate(lengths.begin(), lengths.end(), int64_t{0}); }

    bool is_within(int64_t arena_bytes) const {
        for (size_t i = 0; i < lengths.size(); i++) {
            if (lengths[i] <= 0 || lengths[i] > ems::kMaxBlockBytes || offsets[i] < 0 ||
                offsets[i] > arena_bytes - lengths[i]) {
                return false;
            }
        }
        return true;
    }
};

// Whether the next request has arrived and is the last save of a batch: its client then waits for all answers.
inline bool ends_batch(const ems::FrameStream& stream) {
    ems::Frame next{};
    if (!stream.peek(next) || next.header.op != ems::kSave) {
        return false;
    }
    const ToSave wanted(next);
    return wanted.is_good && wanted.is_last;
}

}  // namespace pool
