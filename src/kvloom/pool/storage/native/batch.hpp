// A batch of blocks on its way into the pool: reserved under the lock, copied and summed without it, then published.
#pragma once

#include <algorithm>
#include <vector>

#include "pool.hpp"

namespace pool {

using ems::SummedCopy;
using ems::Xxh3;

// The state of a batch between two calls.
struct Batch {
    std::vector<Begun> begun;
    std::vector<uint64_t> free;  // offsets that were emptied together, for the keys to come
    int64_t num_new = -1;
};

// A batch of blocks to write, as native.py has it. Arrays have `num` elements.
struct Save {
    const Key* keys;
    const int64_t* lengths;
    const uint8_t* is_rcache;
    const uint8_t* const* areas;  // where the bytes are
    const Key* parent;            // before the first key in its chain, or null
    uint8_t* statuses;
    Id* ids;            // of the blocks, pinned; kNone where there is none
    uint64_t* offsets;  // of the memory that was reserved
    int64_t num;
    int64_t num_done;     // of the arrays above, what is filled: up to the first key without room
    double copies_limit;  // bytes of copies that there may be
    int64_t may_grow;
    int64_t is_chain;  // each block follows the one before it
    Batch* batch;
};

inline bool is_alike(const Save& save) {
    for (int64_t i = 0; i < save.num; i++) {
        if (save.lengths[i] != save.lengths[0] || save.is_rcache[i] != 0) {
            return false;
        }
    }
    return true;
}

inline int64_t count_missing(const Pool& pool, const Save& save) {
    int64_t count = 0;
    for (int64_t i = 0; i < save.num; i++) {
        count += pool.find(save.keys[i]) == kNone;
    }
    return count;
}

// Memory for each key in order, or the block that is there, pinned; ends after the first that finds no room.
inline Outcome begin(Pool& pool, const Save& save, Batch& batch) {
    if (batch.num_new < 0) {
        batch.num_new = is_alike(save) ? count_missing(pool, save) : 1;
    }
    while (static_cast<int64_t>(batch.begun.size()) < save.num) {
        const int64_t i = static_cast<int64_t>(batch.begun.size());
        const Id found = pool.find(save.keys[i]);
        if (found != kNone) {
            pool.entries[found].pins++;
            batch.begun.push_back({kDuplicate, found, 0, nullptr});
            continue;
        }
        const uint32_t slot = slot_bytes(static_cast<uint32_t>(save.lengths[i]));
        if (batch.free.empty() && slot <= pool.memory.slab_bytes) {
            const int64_t wanted = std::max<int64_t>(1, batch.num_new) * slot;
            const Wish wish{slot, save.is_rcache[i] != 0, wanted, save.copies_limit, save.may_grow != 0};
            if (pool.make_room(wish, batch.free) == kNeedsMemory) {
                return kNeedsMemory;
            }
            std::reverse(batch.free.begin(), batch.free.end());
        }
        if (batch.free.empty()) {
            batch.begun.push_back({kNoRoom, kNone, 0, nullptr});
            break;
        }
        const uint64_t offset = batch.free.back();
        batch.begun.push_back({kStored, kNone, offset, pool.memory.at(offset)});
        batch.free.pop_back();
        batch.num_new--;
    }
    for (uint64_t offset : batch.free) {
        pool.memory.free(offset);
    }
    batch.free.clear();
    return kDone;
}

// Sums of the batch's bytes: of those copied to memory of their own, and of those whose key is there already.
inline std::vector<Sum> fill(const Xxh3& xxh3, const Save& save, const Batch& batch) {
    SummedCopy copy(xxh3);
    std::vector<Sum> sums(batch.begun.size());
    for (size_t i = 0; i < batch.begun.size(); i++) {
        const size_t length = static_cast<size_t>(save.lengths[i]);
        if (batch.begun[i].status == kStored) {
            sums[i] = copy(batch.begun[i].memory, save.areas[i], length);
        } else if (batch.begun[i].status == kDuplicate) {
            sums[i] = ems::sum_of(xxh3, save.areas[i], length);
        }
    }
    return sums;
}

inline Published settle(Pool& pool, const Save& save, int64_t i, const Begun& begun, const Sum& sum) {
    if (begun.status == kNoRoom) {
        return {kNoRoom, kNone};
    }
    const uint32_t length = static_cast<uint32_t>(save.lengths[i]);
    if (begun.status == kDuplicate) {
        const Entry& entry = pool.entries[begun.id];
        return {entry.length == length && entry.sum == sum ? kDuplicate : kConflict, begun.id};
    }
    const Key* parent = i > 0 && save.is_chain != 0 ? &save.keys[i - 1] : save.parent;
    const uint32_t slot = slot_bytes(length);
    return pool.publish({save.keys[i], begun.offset, length, slot, save.is_rcache[i] != 0, sum, parent});
}

inline Outcome begin_or_stop(PoolHandle* handle, Save& save) {
    const Held held(handle);
    if (save.batch == nullptr) {
        save.batch = new Batch;
    }
    return begin(handle->pool, save, *save.batch);
}

inline void end(Save& save) {
    save.num_done = static_cast<int64_t>(save.batch->begun.size());
    delete save.batch;
    save.batch = nullptr;
}

// Looks up, places, copies, sums, publishes and pins a batch. kNeedsMemory: to be called again.
inline Outcome write(PoolHandle* handle, const Xxh3& xxh3, Save& save) {
    if (begin_or_stop(handle, save) == kNeedsMemory) {
        return kNeedsMemory;
    }
    const std::vector<Sum> sums = fill(xxh3, save, *save.batch);
    const Held held(handle);
    for (size_t i = 0; i < sums.size(); i++) {
        const Published done = settle(handle->pool, save, static_cast<int64_t>(i), save.batch->begun[i], sums[i]);
        save.statuses[i] = done.status;
        save.ids[i] = done.id;
    }
    end(save);
    return kDone;
}

// Gives up a batch that was told to come again.
inline void abandon(PoolHandle* handle, Save& save) {
    const Held held(handle);
    for (const Begun& begun : save.batch->begun) {
        if (begun.status == kStored) {
            handle->pool.memory.free(begun.offset);
        } else if (begun.status == kDuplicate) {
            handle->pool.unpin(begun.id);
        }
    }
    end(save);
}

}  // namespace pool
