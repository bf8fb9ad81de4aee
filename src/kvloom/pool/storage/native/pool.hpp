// Pool: the index of one tenant's blocks on one node, their chains, pins and eviction. store.py and index.py say why, and
// are what this is compared with. What needs the node or the system (budget, segments, counters) stays in Python:
// a call that lacks memory stops with `kNeedsMemory` and is called again when Python has asked for it.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "entries.hpp"
#include "memory.hpp"
#include "orders.hpp"

namespace pool {

// Of ems.wire.messages; kLeft: its memory is being given back meanwhile, so that it is not kept.
enum Status : uint8_t { kStored = 0, kDuplicate = 1, kConflict = 2, kNoRoom = 3, kLeft = 255 };
enum Cause : uint8_t { kCold = 1, kEvicted = 2, kCorrupt = 3 };
enum Outcome : int { kDone = 0, kMore = 1, kNeedsMemory = 2 };

// What a key meets that is to be written: memory of its own, the block that is there, pinned, or no room.
struct Begun {
    Status status;  // kStored: memory at `offset`; kDuplicate: the block `id`; kNoRoom
    Id id;
    uint64_t offset;
    uint8_t* memory;  // where `offset` is; stays there until it is freed
};

// Where a block's memory is wanted. may_grow: Python was not asked for memory yet, or gave some.
struct Wish {
    uint32_t slot;
    bool is_rcache;
    int64_t bytes;        // that are worth emptying at once
    double copies_limit;  // bytes of copies that there may be
    bool may_grow;
};

// A block whose bytes are written.
struct Written {
    Key key;
    uint64_t offset;
    uint32_t length;
    uint32_t slot;
    bool is_rcache;
    Sum sum;
    const Key* parent;  // null = none
};

struct Published {
    Status status;
    Id id;  // pinned
};

// All methods but those of `lock` are called under it.
class Pool {
  public:
    Pool(int64_t segment_bytes, int64_t slab_bytes, bool is_lru, uint64_t seed)
        : memory(entries, segment_bytes, slab_bytes), seed_(seed), index_(entries), orders_(is_lru) {}

    std::mutex lock;
    Entries entries;
    Memory memory;
    uint64_t num_evicted = 0;
    int64_t rcache_bytes = 0;

    size_t size() const { return index_.size(); }

    // Reading
    Id find(const Key& key) const;
    void pin(Id id);
    void unpin(Id id);
    uint8_t why_missing(const Key& key) const { return lost_.get(hash_of(key, seed_), kCold); }
    void remember(uint64_t key_hash, uint8_t cause);
    void remember(const Key& key, uint8_t cause) { remember(hash_of(key, seed_), cause); }
    std::vector<Id> by_birth() const;

    // Writing
    Outcome make_room(const Wish& wish, std::vector<uint64_t>& offsets);
    Published publish(const Written& written);
    void spoil(Id id);

    // Room
    Outcome make_room_ahead(uint32_t slot, int64_t count, int64_t share, bool may_grow);
    int64_t evict(int64_t size, int64_t& closed_bytes);
    bool empty_some(int64_t segment);
    int64_t give_back(int64_t segment);

    const char* check();

  private:
    Id victim_of(const std::vector<Order*>& orders);
    std::vector<Id> evict_from(const std::vector<Order*>& orders, int64_t wanted);
    Id leaf_below(Id id) const;
    void forget(Id id, uint8_t cause);
    void release(Id id);
    int64_t free_all(const std::vector<Id>& gone);
    bool clear_slab(uint32_t slot, bool is_forced);
    Id add(const Written& written);
    Id new_entry(const Written& written);
    void adopt(Id parent, Id child);
    void orphan(Id child);

    uint64_t seed_;
    HashIndex<Entry> index_;
    Orders orders_;
    Remembered lost_;
    uint64_t num_born_ = 0;
    // Where the last eviction stopped in a chain: below this victim, at this block, if it is still the same one.
    Key hint_victim_{};
    Id hint_ = kNone;
    uint64_t hint_born_ = 0;
};

}  // namespace pool
