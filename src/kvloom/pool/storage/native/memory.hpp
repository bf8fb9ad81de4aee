// The memory of one tenant: assigns slots to blocks, measures the use of slabs and classes, and chooses segments to
// give back. The reference implementations, with the reasons, are allocator.py and memory.py; tests compare both.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <vector>

#include "entries.hpp"

namespace pool {

constexpr uint32_t kMinSlot = 4096;

// The size class of a block, in bytes: its length rounded up to one of eight steps per doubling, at least 4 KiB.
inline uint32_t slot_bytes(uint32_t length) {
    if (length <= kMinSlot) {
        return kMinSlot;
    }
    const int bits = 32 - __builtin_clz(length - 1);
    const uint32_t step = std::max<uint32_t>(512, 1u << std::max(0, bits - 4));
    return (length + step - 1) / step * step;
}

// Use of a slab or a size class: the bytes of its blocks, and the sum over blocks of bytes * time of last use. Time is
// measured in bytes saved by the tenant.
struct Use {
    int64_t bytes = 0;
    __int128 stamps = 0;

    void add(int64_t size, uint64_t used_at) {
        bytes += size;
        stamps += static_cast<__int128>(size) * used_at;
    }

    // Its bytes, weighted by their mean age: the weight is 1/2 at an age of `capacity`.
    double worth(uint64_t now, int64_t capacity) const {
        if (bytes == 0) {
            return 0;
        }
        const double age = static_cast<double>(now) - static_cast<double>(stamps) / static_cast<double>(bytes);
        return static_cast<double>(bytes) * static_cast<double>(capacity) / (static_cast<double>(capacity) + age);
    }
};

struct Slab {
    int64_t size = 0;   // bytes that slots may occupy
    uint32_t slot = 0;  // size class, 0 = the slab is free
    int64_t used = 0;   // allocated slots
    int64_t next = 0;   // slots from this one on have never been allocated
    bool is_closed = false;
    std::vector<uint32_t> free;  // freed slots
    Shelf shelf;                 // its published blocks
    Use use;

    // Number of slots that can be allocated.
    int64_t room() const {
        return slot == 0 ? 0 : static_cast<int64_t>(free.size()) + size / slot - next;
    }
};

class Memory {
  public:
    Memory(Entries& entries, int64_t segment_bytes, int64_t slab_bytes)
        : segment_bytes(segment_bytes), slab_bytes(slab_bytes), entries_(entries) {}

    const int64_t segment_bytes;
    const int64_t slab_bytes;

    int64_t used_bytes() const { return used_bytes_; }
    int64_t capacity() const { return capacity_; }
    uint64_t num_given_back() const { return num_given_back_; }
    int64_t num_slabs() const { return static_cast<int64_t>(slabs_.size()); }
    std::vector<uint32_t>& left() { return left_; }
    uint8_t* at(uint64_t offset) const { return segments_[offset / segment_bytes] + offset % segment_bytes; }

    // Slots
    std::vector<uint64_t> allocate(uint32_t slot, int64_t count);
    void free(uint64_t offset);
    void spoil(uint64_t offset);
    int64_t room(uint32_t slot) const;
    bool is_leaving(uint64_t offset) const { return slabs_[offset / slab_bytes].is_closed; }

    // Use
    void add(Id id);
    void touch(Id id);
    void discard(Id id);

    // Slabs
    int64_t num_missing() const;
    void grow(int64_t size, uint8_t* segment);
    bool wants_slab(uint32_t slot) const { return !lesser(slot).empty(); }
    std::vector<Id> slab_to_clear(uint32_t slot, bool is_forced) const;

    // Giving back
    int64_t coldest_segment(bool is_idle) const;
    std::vector<Id> blocks_of(int64_t segment) const;
    int64_t give_back(int64_t segment);

    const char* check(uint64_t num_blocks) const;

  private:
    int64_t slab_for(uint32_t slot);
    int64_t close(Slab& slab, uint32_t index);
    std::set<uint32_t> lesser(uint32_t slot) const;
    bool is_unpinned(const Shelf& shelf) const;
    bool is_idle(int64_t segment) const;
    int64_t num_used(int64_t segment) const;
    void let_go(int64_t segment);
    int64_t slabs_a_segment() const { return segment_bytes / slab_bytes; }
    int64_t end_of(int64_t segment) const { return std::min(num_slabs(), (segment + 1) * slabs_a_segment()); }

    Entries& entries_;
    std::vector<Slab> slabs_;
    std::vector<uint32_t> free_slabs_;
    std::map<uint32_t, std::vector<uint32_t>> open_;  // class -> slabs with a free slot; may be stale, checked on use
    std::map<uint32_t, int64_t> room_;                // class -> free slots in its slabs
    std::map<uint32_t, int64_t> class_bytes_;
    std::map<uint32_t, Use> of_class_;
    std::vector<uint8_t*> segments_;  // null = given back
    std::set<int64_t> leaving_;       // segments that are given back once all their slots are freed
    std::map<int64_t, int64_t> spoiled_;
    std::vector<uint32_t> left_;  // given-back segments that Python has not closed yet
    int64_t used_bytes_ = 0;
    int64_t capacity_ = 0;
    uint64_t clock_ = 0;  // time: bytes saved so far
    uint64_t num_given_back_ = 0;
};

}  // namespace pool
