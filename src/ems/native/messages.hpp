// Messages, from their rows in ems/wire/messages.py; `make golden` writes this file. Bytes are not copied: they lie in
// the frame that was read, or where the writer has them. Each is as Python has it, but not checked.
#pragma once

#include "wire.hpp"

namespace ems {

constexpr int64_t kMaxKeys = 4096;  // per frame
constexpr int64_t kMaxBlockBytes = 268435456;

struct Done {
    static constexpr uint8_t kOp = 8, kNumValues = 0, kNumRequired = 0;
    void read(BodyReader&) {}
    void write(FrameWriter&) const {}
};

struct Saved {
    static constexpr uint8_t kOp = 10, kNumValues = 1, kNumRequired = 1;
    Bytes statuses;
    void read(BodyReader& body) {
        body.bytes(statuses);
    }
    void write(FrameWriter& frame) const {
        frame.bytes(statuses);
    }
};

struct Reserved {
    static constexpr uint8_t kOp = 12, kNumValues = 4, kNumRequired = 3;
    Bytes statuses;
    std::vector<int64_t> segments;
    std::vector<int64_t> offsets;
    int64_t num_given_back = 0;
    void read(BodyReader& body) {
        body.bytes(statuses);
        body.integers(segments);
        body.integers(offsets);
        body.integer(num_given_back);
    }
    void write(FrameWriter& frame) const {
        frame.bytes(statuses);
        frame.integers(segments);
        frame.integers(offsets);
        frame.integer(num_given_back);
    }
};

struct Found {
    static constexpr uint8_t kOp = 15, kNumValues = 7, kNumRequired = 6;
    int64_t lease = 0;
    std::vector<int64_t> segments;
    std::vector<int64_t> offsets;
    std::vector<int64_t> lengths;
    Bytes sums;
    int64_t cause = 0;
    int64_t num_given_back = 0;
    void read(BodyReader& body) {
        body.integer(lease);
        body.integers(segments);
        body.integers(offsets);
        body.integers(lengths);
        body.bytes(sums);
        body.integer(cause);
        body.integer(num_given_back);
    }
    void write(FrameWriter& frame) const {
        frame.integer(lease);
        frame.integers(segments);
        frame.integers(offsets);
        frame.integers(lengths);
        frame.bytes(sums);
        frame.integer(cause);
        frame.integer(num_given_back);
    }
};

struct Count {
    static constexpr uint8_t kOp = 18, kNumValues = 1, kNumRequired = 1;
    int64_t count = 0;
    void read(BodyReader& body) {
        body.integer(count);
    }
    void write(FrameWriter& frame) const {
        frame.integer(count);
    }
};

struct Present {
    static constexpr uint8_t kOp = 25, kNumValues = 1, kNumRequired = 1;
    Bytes found;
    void read(BodyReader& body) {
        body.bytes(found);
    }
    void write(FrameWriter& frame) const {
        frame.bytes(found);
    }
};

struct Save {
    static constexpr uint8_t kOp = 9, kNumValues = 7, kNumRequired = 3;
    using Answer = Saved;
    Bytes keys;
    std::vector<int64_t> offsets;
    std::vector<int64_t> lengths;
    Bytes parent;
    bool write_rcache = true;
    bool is_last = true;
    bool is_chain = true;
    void read(BodyReader& body) {
        body.bytes(keys);
        body.integers(offsets);
        body.integers(lengths);
        body.bytes(parent);
        body.boolean(write_rcache, true);
        body.boolean(is_last, true);
        body.boolean(is_chain, true);
    }
    void write(FrameWriter& frame) const {
        frame.bytes(keys);
        frame.integers(offsets);
        frame.integers(lengths);
        frame.bytes(parent);
        frame.boolean(write_rcache);
        frame.boolean(is_last);
        frame.boolean(is_chain);
    }
};

struct Reserve {
    static constexpr uint8_t kOp = 11, kNumValues = 3, kNumRequired = 2;
    using Answer = Reserved;
    Bytes keys;
    std::vector<int64_t> lengths;
    Bytes parent;
    void read(BodyReader& body) {
        body.bytes(keys);
        body.integers(lengths);
        body.bytes(parent);
    }
    void write(FrameWriter& frame) const {
        frame.bytes(keys);
        frame.integers(lengths);
        frame.bytes(parent);
    }
};

struct Commit {
    static constexpr uint8_t kOp = 13, kNumValues = 1, kNumRequired = 1;
    using Answer = Saved;
    Bytes sums;
    void read(BodyReader& body) {
        body.bytes(sums);
    }
    void write(FrameWriter& frame) const {
        frame.bytes(sums);
    }
};

struct Load {
    static constexpr uint8_t kOp = 14, kNumValues = 2, kNumRequired = 1;
    using Answer = Found;
    Bytes keys;
    bool read_local_only = false;
    void read(BodyReader& body) {
        body.bytes(keys);
        body.boolean(read_local_only);
    }
    void write(FrameWriter& frame) const {
        frame.bytes(keys);
        frame.boolean(read_local_only);
    }
};

struct Release {
    static constexpr uint8_t kOp = 16, kNumValues = 2, kNumRequired = 1;
    int64_t lease = 0;
    int64_t corrupt = -1;
    void read(BodyReader& body) {
        body.integer(lease);
        body.integer(corrupt, -1);
    }
    void write(FrameWriter& frame) const {
        frame.integer(lease);
        frame.integer(corrupt);
    }
};

struct Exists {
    static constexpr uint8_t kOp = 17, kNumValues = 2, kNumRequired = 1;
    using Answer = Count;
    Bytes keys;
    bool read_local_only = false;
    void read(BodyReader& body) {
        body.bytes(keys);
        body.boolean(read_local_only);
    }
    void write(FrameWriter& frame) const {
        frame.bytes(keys);
        frame.boolean(read_local_only);
    }
};

struct Ping {
    static constexpr uint8_t kOp = 19, kNumValues = 0, kNumRequired = 0;
    using Answer = Done;
    void read(BodyReader&) {}
    void write(FrameWriter&) const {}
};

struct Pick {
    static constexpr uint8_t kOp = 23, kNumValues = 2, kNumRequired = 1;
    using Answer = Found;
    Bytes keys;
    bool read_local_only = false;
    void read(BodyReader& body) {
        body.bytes(keys);
        body.boolean(read_local_only);
    }
    void write(FrameWriter& frame) const {
        frame.bytes(keys);
        frame.boolean(read_local_only);
    }
};

struct Has {
    static constexpr uint8_t kOp = 24, kNumValues = 2, kNumRequired = 1;
    using Answer = Present;
    Bytes keys;
    bool read_local_only = false;
    void read(BodyReader& body) {
        body.bytes(keys);
        body.boolean(read_local_only);
    }
    void write(FrameWriter& frame) const {
        frame.bytes(keys);
        frame.boolean(read_local_only);
    }
};

// The requests that the agent answers in C++.
#define EMS_NATIVE_REQUESTS(each) \
    each(Save) each(Reserve) each(Commit) each(Load) each(Release) each(Exists) each(Ping) each(Pick) each(Has)

}  // namespace ems
