// The C interface of the pool, which Python calls through ctypes (library.py), so the interpreter lock is released
// during each call. Each function holds the pool's lock while it reads or changes the index, but not while it copies
// bytes or computes checksums. Memory passed in belongs to the caller.
#include "serving.hpp"

using ems::Sum;
using ems::Xxh3;
using pool::Begun;
using pool::Entry;
using pool::Glance;
using pool::Held;
using pool::Id;
using pool::Key;
using pool::kNone;
using pool::Published;
using pool::Save;

extern "C" {

struct Described {
    Key key;
    Sum sum;
    Key parent;
    uint64_t offset;
    uint64_t born;
    uint32_t length;
    uint32_t slot;
    uint32_t pins;
    uint8_t is_rcache;
    uint8_t is_home;
    uint8_t is_live;
    uint8_t has_parent;
};

// A block's memory in this process; the same structure as Piece of cluster/native/stream.cpp.
struct Span {
    uint8_t* data;
    uint64_t size;
};

struct Usage {
    int64_t num_blocks;
    int64_t used_bytes;
    int64_t capacity;
    int64_t rcache_bytes;
    int64_t num_missing;
    int64_t num_slabs;
};

PoolHandle* pool_open(int64_t segment_bytes, int64_t slab_bytes, int is_lru, uint64_t seed) {
    return new PoolHandle{{segment_bytes, slab_bytes, is_lru != 0, seed}, {}};
}

void pool_close(PoolHandle* handle) { delete handle; }

Glance* pool_glance(PoolHandle* handle) { return &handle->glance; }

// Saves a batch: looks up the keys, reserves memory, copies and checksums the bytes, publishes and pins the blocks.
// Returns kDone; or kNeedsMemory, after which the caller must call it again, or pool_abandon_batch.
int pool_save(PoolHandle* handle, const Xxh3* xxh3, Save* save) { return pool::write(handle, *xxh3, *save); }

// The first half of a save, for callers that write the bytes themselves: finds or reserves memory. Fills statuses, ids
// and offsets (valid where the status is kStored). spans: null, or [num], the reserved memory; its address is null for
// keys without a reservation. Returns as pool_save.
int pool_begin(PoolHandle* handle, Save* save, Span* spans) {
    if (pool::begin_or_stop(handle, *save) == pool::kNeedsMemory) {
        return pool::kNeedsMemory;
    }
    for (size_t i = 0; i < save->batch->begun.size(); i++) {
        const Begun& begun = save->batch->begun[i];
        save->statuses[i] = begun.status;
        save->ids[i] = begun.id;
        save->offsets[i] = begun.offset;
        if (spans != nullptr) {
            spans[i] = {begun.memory, static_cast<uint64_t>(save->lengths[i])};
        }
    }
    pool::end(*save);
    return pool::kDone;
}

// Gives up a batch for which kNeedsMemory was returned.
void pool_abandon_batch(PoolHandle* handle, Save* save) { pool::abandon(handle, *save); }

// The second half of a save whose bytes another node has sent; if found is null, releases the reservations.
void pool_settle(PoolHandle* handle, const pool::Arrival* arrival) {
    const Held held(handle);
    arrival->found != nullptr ? pool::settle(handle->pool, *arrival) : pool::give_up(handle->pool, *arrival);
}

// Publishes a block whose bytes were written to reserved memory. Returns its status; *id = the block of the key,
// pinned.
int pool_publish(PoolHandle* handle, const Described* block, const Key* parent, Id* id) {
    const Held held(handle);
    const Published done = handle->pool.publish({block->key, block->offset, block->length, block->slot,
                                                 block->is_rcache != 0, block->sum, parent});
    *id = done.id;
    return done.status;
}

// Frees reserved memory that is not published.
void pool_abandon(PoolHandle* handle, uint64_t offset) {
    const Held held(handle);
    handle->pool.memory.free(offset);
}

// Pins the blocks of the longest prefix of `keys` that is in the pool; returns their number. ids, offsets, lengths,
// sums: [num] each, filled for these blocks.
int64_t pool_pin_prefix(PoolHandle* handle, const Key* keys, int64_t num, Id* ids, int64_t* offsets, int64_t* lengths,
                        Sum* sums) {
    const Held held(handle);
    for (int64_t i = 0; i < num; i++) {
        ids[i] = handle->pool.find(keys[i]);
        if (ids[i] == kNone) {
            return i;
        }
        handle->pool.pin(ids[i]);
        const Entry& entry = handle->pool.entries[ids[i]];
        offsets[i] = static_cast<int64_t>(entry.offset);
        lengths[i] = entry.length;
        sums[i] = entry.sum;
    }
    return num;
}

// Pins every block that is in the pool. ids: [num], kNone for the others. spans, sums: null, or [num] each, filled for
// the pinned ones.
void pool_pin_each(PoolHandle* handle, const Key* keys, int64_t num, Id* ids, Span* spans, Sum* sums) {
    const Held held(handle);
    for (int64_t i = 0; i < num; i++) {
        ids[i] = handle->pool.find(keys[i]);
        if (ids[i] == kNone) {
            continue;
        }
        handle->pool.pin(ids[i]);
        if (spans != nullptr) {
            const Entry& entry = handle->pool.entries[ids[i]];
            spans[i] = {handle->pool.memory.at(entry.offset), entry.length};
            sums[i] = entry.sum;
        }
    }
}

// Adds a pin to a pinned block; does not count as a use.
void pool_pin_again(PoolHandle* handle, Id id) {
    const Held held(handle);
    handle->pool.entries[id].pins++;
}

void pool_unpin(PoolHandle* handle, const Id* ids, int64_t num) {
    const Held held(handle);
    for (int64_t i = 0; i < num; i++) {
        handle->pool.unpin(ids[i]);
    }
}

// has: [num], whether each key is in the pool.
void pool_has(PoolHandle* handle, const Key* keys, int64_t num, uint8_t* has) {
    const Held held(handle);
    for (int64_t i = 0; i < num; i++) {
        has[i] = handle->pool.find(keys[i]) != kNone;
    }
}

// Returns the length of the longest prefix of `keys` that is in the pool.
int64_t pool_count_prefix(PoolHandle* handle, const Key* keys, int64_t num) {
    const Held held(handle);
    int64_t count = 0;
    while (count < num && handle->pool.find(keys[count]) != kNone) {
        count++;
    }
    return count;
}

int pool_missed(PoolHandle* handle, const Key* key, int64_t count) {
    const Held held(handle);
    return handle->pool.missed(*key, count);
}

void pool_remember(PoolHandle* handle, const Key* key, int cause) {
    const Held held(handle);
    handle->pool.remember(*key, static_cast<uint8_t>(cause));
}

// Reads the current state of a pinned block.
void pool_describe(PoolHandle* handle, Id id, Described* out) {
    const Held held(handle);
    const Entry& entry = handle->pool.entries[id];
    *out = {entry.key,  entry.sum,       {},
            entry.offset, entry.born,    entry.length,
            entry.slot, entry.pins,      static_cast<uint8_t>(entry.is_rcache),
            static_cast<uint8_t>(entry.is_home), static_cast<uint8_t>(entry.is_live), entry.parent != kNone};
    if (entry.parent != kNone) {
        out->parent = handle->pool.entries[entry.parent].key;
    }
}

// Sets whether a block's home holds it too. Does nothing if `id` now belongs to another block (other `born`).
void pool_set_home(PoolHandle* handle, Id id, uint64_t born, int is_home) {
    const Held held(handle);
    Entry& entry = handle->pool.entries[id];
    if (entry.born == born) {
        entry.is_home = is_home != 0;
    }
}

// Removes a pinned block whose bytes have changed. Returns 0 if it was removed before, else 1.
int pool_spoil(PoolHandle* handle, Id id) {
    const Held held(handle);
    if (!handle->pool.entries[id].is_live) {
        return 0;
    }
    handle->pool.spoil(id);
    return 1;
}

int pool_make_room_ahead(PoolHandle* handle, uint32_t slot, int64_t count, int64_t share, int may_grow) {
    const Held held(handle);
    return handle->pool.make_room_ahead(slot, count, share, may_grow != 0);
}

void pool_grow(PoolHandle* handle, int64_t size, uint8_t* segment) {
    const Held held(handle);
    handle->pool.memory.grow(size, segment);
}

// Carries out a part of an eviction order. Returns kMore if it must be called again.
int pool_evict(PoolHandle* handle, pool::Eviction* order) {
    const Held held(handle);
    return handle->pool.evict_some(*order);
}

// Gives the least useful segment back. The caller sets *segment to -1 at first; the function stores the segment there.
// Returns its bytes; -1 = there is no segment; -2 = only some of its blocks are removed: call again with the same
// *segment.
int64_t pool_shrink(PoolHandle* handle, int64_t* segment) {
    const Held held(handle);
    if (*segment < 0) {
        *segment = handle->pool.memory.coldest_segment(false);
    }
    if (*segment < 0) {
        return -1;
    }
    return handle->pool.empty_some(*segment) ? -2 : handle->pool.memory.give_back(*segment);
}

// Returns the next given-back segment that Python must close, each segment once; -1 = none.
int64_t pool_take_left(PoolHandle* handle) {
    const Held held(handle);
    std::vector<uint32_t>& left = handle->pool.memory.left();
    if (left.empty()) {
        return -1;
    }
    const int64_t segment = left.back();
    left.pop_back();
    return segment;
}

void pool_usage(PoolHandle* handle, Usage* out) {
    const Held held(handle);
    const pool::Memory& memory = handle->pool.memory;
    *out = {static_cast<int64_t>(handle->pool.size()), memory.used_bytes(), memory.capacity(),
            handle->pool.rcache_bytes, memory.num_missing(), memory.num_slabs()};
}

// Writes the keys of all blocks, oldest first, at most `most`; returns their number.
int64_t pool_keys(PoolHandle* handle, Key* keys, int64_t most) {
    const Held held(handle);
    int64_t count = 0;
    for (Id id : handle->pool.by_birth()) {
        if (count < most) {
            keys[count++] = handle->pool.entries[id].key;
        }
    }
    return count;
}

const char* pool_check(PoolHandle* handle) {
    const Held held(handle);
    return handle->pool.check();
}

pool::Serving* serving_open(PoolHandle* handle, int fd, const ems::Xxh3* xxh3, const pool::Callbacks* callbacks,
                            const pool::Terms* terms) {
    return new pool::Serving(handle, fd, *xxh3, *callbacks, *terms);
}

// Adds bytes that the caller has already received: requests that arrived together with the handshake.
void serving_feed(pool::Serving* serving, const uint8_t* data, int64_t size) {
    serving->feed(data, static_cast<size_t>(size));
}

// Sets the session's staging area; null = none. It must stay mapped until it is replaced or the session is closed.
void serving_use_arena(pool::Serving* serving, const uint8_t* arena, int64_t size) { serving->use_arena(arena, size); }

// Answers requests until one must be handled by Python; *frame is valid until the next call. Returns 0, an errno or kUnchecked.
int serving_next(pool::Serving* serving, uint64_t valid_at, const uint8_t** frame, int64_t* size) {
    ems::Frame found{};
    const int problem = serving->next(valid_at, found);
    *frame = found.bytes;
    *size = static_cast<int64_t>(found.size);
    return problem;
}

int serving_has_frame(pool::Serving* serving) { return serving->has_frame(); }

// Ends the session: releases its leases and pins, and frees it.
void serving_close(pool::Serving* serving) { delete serving; }

}  // extern "C"
