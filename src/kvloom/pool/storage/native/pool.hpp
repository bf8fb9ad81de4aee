// Pool: the index of one tenant's blocks on one node, with their chains, pins and eviction. The reference
// implementations, with the reasons, are store.py and index.py; tests compare both. What concerns the node or the
// system (budget, segments, counters) stays in Python: a call that lacks memory returns kNeedsMemory; Python asks for
// memory and calls it again.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "entries.hpp"
#include "memory.hpp"
#include "orders.hpp"

namespace pool {

// As Status in ems.wire.messages, and two more. kUnsound: the received bytes are not the announced ones. kLeft: the
// block's memory is being given back, so it was not kept.
enum Status : uint8_t { kStored = 0, kDuplicate = 1, kConflict = 2, kNoRoom = 3, kLimited = 5, kLocal = 6, kUnsound = 254, kLeft = 255 };
inline bool is_success(uint8_t status) { return status <= kConflict || status == kLocal; }
enum Cause : uint8_t { kCold = 1, kEvicted = 2, kCorrupt = 3 };
enum Outcome : int { kDone = 0, kMore = 1, kNeedsMemory = 2 };

// Result of reserving memory for a key: new memory, the existing block (pinned), or no room.
struct Begun {
    Status status;  // kStored: memory at `offset`; kDuplicate: the block `id`; kNoRoom
    Id id;
    uint64_t offset;
    uint8_t* memory;  // address of `offset`; valid until it is freed
};

// A request for a block's memory. may_grow: kNeedsMemory may be returned, because Python has not yet refused memory.
struct Wish {
    uint32_t slot;
    bool is_rcache;
    int64_t bytes;        // bytes to free at once if blocks must be evicted
    double copies_limit;  // most bytes of copies of other nodes' blocks
    bool may_grow;
};

// A block whose bytes have been written to its memory.
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

// An order to evict `size` bytes, carried out in parts, between which other calls can run; mirrored in library.py.
struct Eviction {
    int64_t size;
    int64_t freed;         // bytes freed so far
    int64_t closed_bytes;  // bytes of the segments given back so far
    int64_t segment;       // the segment that is being emptied, -1 = none
    int64_t has_segments;  // whether there may be more segments to give back
};

// The caller of any method must hold `lock` (see Held).
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
    Id find_next(const Key* keys, int64_t i, int64_t num) const;
    Id find(const Key& key) const;
    void pin(Id id);
    void unpin(Id id);
    uint8_t missed(const Key& key, int64_t count);
    void remember(uint64_t key_hash, uint8_t cause);
    void remember(const Key& key, uint8_t cause) { remember(hash_of(key, seed_), cause); }
    std::vector<Id> by_birth() const;

    // Writing
    void expect_new(const Key* keys, int64_t num, uint32_t slot);
    Outcome make_room(const Wish& wish, std::vector<uint64_t>& offsets);
    Published publish(const Written& written);
    void spoil(Id id);

    // Room
    Outcome make_room_ahead(uint32_t slot, int64_t count, int64_t share, bool may_grow);
    Outcome evict_some(Eviction& order);
    bool empty_some(int64_t segment);

    const char* check();

  private:
    void expect(const Key* keys, int64_t num) const;
    void expect_gone(Id id);
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
    // Where the last eviction stopped in a chain: at block hint_, below the victim with this key. Valid only if hint_
    // still is the block with hint_born_.
    Key hint_victim_{};
    Id hint_ = kNone;
    uint64_t hint_born_ = 0;
};

constexpr int64_t kExpected = 64;  // keys prefetched at once: their data fits the core's own caches

// Prefetches what looking up at most kExpected keys will read. It is not cached: the bytes of batches displace it.
inline void Pool::expect(const Key* keys, int64_t num) const {
    std::array<uint64_t, kExpected> hashes;
    for (int64_t i = 0; i < num; i++) {
        hashes[i] = hash_of(keys[i], seed_);
        index_.expect(hashes[i]);
    }
    for (int64_t i = 0; i < num; i++) {
        index_.expect_first(hashes[i]);
    }
}

// Prefetches what publishing new blocks of a class will read: the memories of removed keys, and free entries.
inline void Pool::expect_new(const Key* keys, int64_t num, uint32_t slot) {
    const Order& order = orders_.of(slot, false);
    std::array<uint64_t, kExpected> hashes;
    num = std::min(num, kExpected);
    for (int64_t i = 0; i < num; i++) {
        hashes[i] = hash_of(keys[i], seed_);
        lost_.expect(hashes[i]);
        order.expect(hashes[i]);
    }
    entries.expect_free(static_cast<size_t>(num));
    for (int64_t i = 0; i < num; i++) {
        lost_.expect_first(hashes[i]);
        order.expect_first(hashes[i]);
    }
}

// Prefetches what removing a block will read.
inline void Pool::expect_gone(Id id) {
    const Entry& entry = entries[id];
    index_.expect(entry.key_hash);
    lost_.expect(entry.key_hash);
    orders_.of(entry).expect(entry.key_hash);
    for (Id beside : {entry.parent, entry.prev_in_queue, entry.next_in_queue, entry.prev_on_shelf, entry.next_on_shelf}) {
        if (beside != kNone) {
            entries.expect(beside);
        }
    }
}

inline Id Pool::find(const Key& key) const {
    return index_.find(hash_of(key, seed_), [&](const Entry& entry) { return entry.key == key; });
}

// Looks up keys[i]. Must be called for i = 0, 1, ... in turn; prefetches for the next keys.
inline Id Pool::find_next(const Key* keys, int64_t i, int64_t num) const {
    if (i % kExpected == 0) {
        expect(keys + i, std::min(kExpected, num - i));
    }
    return find(keys[i]);
}

constexpr size_t kNumStatuses = 8;  // of messages.Status
constexpr size_t kNumCauses = 8;    // of messages.Cause

// Counters of sessions that are served by C++. Python adds them to its own. Updated without a lock.
struct Counts {
    std::atomic<uint64_t> num_calls{0};  // increases after any of the others may have changed
    std::atomic<uint64_t> saved[kNumStatuses] = {};
    std::atomic<uint64_t> missed[kNumCauses] = {};
    std::atomic<uint64_t> load_keys{0};
    std::atomic<uint64_t> load_hits{0};
    std::atomic<uint64_t> corrupt{0};
    std::atomic<uint64_t> denied_leases{0};  // batches found but not lent, because the session has too many leases

    void add_one(std::atomic<uint64_t>& count) {
        count++;
        num_calls++;
    }

    // Counts the results of a save's blocks.
    void add_saved(const uint8_t* statuses, size_t count) {
        for (size_t i = 0; i < count; i++) {
            saved[statuses[i] % kNumStatuses]++;
        }
        num_calls++;
    }

    // Counts a load of num_keys keys; cause: why the first key that was not found was missing.
    void add(uint64_t num_keys, uint64_t num_found, uint8_t cause) {
        load_keys += num_keys;
        load_hits += num_found;
        missed[cause % kNumCauses] += num_keys - num_found;
        num_calls++;
    }
};

// Figures that Python reads from shared memory, without a call.
struct Glance {
    std::atomic<uint64_t> num_evicted{0};
    std::atomic<uint64_t> num_given_back{0};  // segments
    std::atomic<uint64_t> num_left{0};        // of these, segments that Python has not closed yet
    Counts counts;
    // The tenant's budget, written by Python.
    std::atomic<int64_t> quota{0};
    std::atomic<int64_t> may_grow{0};
    std::atomic<uint64_t> looked_at{0};  // the budget's version (number of changes) when they were written
};

}  // namespace pool

extern "C" {

struct PoolHandle {
    pool::Pool pool;
    pool::Glance glance;
};

}  // extern "C"

namespace pool {

// Holds the pool's lock during its lifetime, and updates the Glance before it releases the lock.
class Held {
  public:
    explicit Held(PoolHandle* handle) : handle_(*handle), lock_(handle->pool.lock) {}
    ~Held() {
        handle_.glance.num_evicted = handle_.pool.num_evicted;
        handle_.glance.num_given_back = handle_.pool.memory.num_given_back();
        handle_.glance.num_left = handle_.pool.memory.left().size();
    }

  private:
    PoolHandle& handle_;
    std::lock_guard<std::mutex> lock_;
};

}  // namespace pool
