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
    int64_t num_new = 0;         // keys to come that want memory, about
    bool is_counted = false;     // whether `num_new` is known
};

// A batch of blocks to write, as in Python. Arrays have `num` elements.
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
    int64_t num_done;     // of the arrays above, what is filled: up to the first key without room, unless it `goes_on`
    double copies_limit;  // bytes of copies that there may be
    int64_t may_grow;
    int64_t is_chain;  // each block follows the one before it
    int64_t goes_on;   // a key without room does not keep out those behind it
    Batch* batch;
};

// Of the blocks from `start` on.
inline bool is_alike(const Save& save, int64_t start) {
    for (int64_t i = start; i < save.num; i++) {
        if (save.lengths[i] != save.lengths[start] || save.is_rcache[i] != 0) {
            return false;
        }
    }
    return true;
}

inline int64_t count_missing(const Pool& pool, const Save& save, int64_t start) {
    int64_t count = 0;
    for (int64_t i = start; i < save.num; i++) {
        count += pool.find_next(save.keys + start, i - start, save.num - start) == kNone;
    }
    return count;
}

// Memory for each key in order, or the existing block, pinned; stops after the first key without room, or goes on.
inline Outcome begin(Pool& pool, const Save& save, Batch& batch) {
    while (static_cast<int64_t>(batch.begun.size()) < save.num) {
        const int64_t i = static_cast<int64_t>(batch.begun.size());
        if (!batch.is_counted) {
            batch.num_new = is_alike(save, i) ? count_missing(pool, save, i) : 1;
            batch.is_counted = true;
        }
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
            if (save.goes_on == 0) {
                break;
            }
            batch.is_counted = false;
            continue;
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
    if (save.num > 0) {
        handle->pool.expect_new(save.keys, save.num, slot_bytes(static_cast<uint32_t>(save.lengths[0])));
    }
    for (size_t i = 0; i < sums.size(); i++) {
        const Published done = settle(handle->pool, save, static_cast<int64_t>(i), save.batch->begun[i], sums[i]);
        save.statuses[i] = done.status;
        save.ids[i] = done.id;
    }
    end(save);
    return kDone;
}

// Blocks that another node announced and sent, after memory was reserved for them; as held.py has it. [num] each.
struct Arrival {
    const Key* keys;
    int64_t* lengths;  // announced; then of the blocks that are here
    const Sum* announced;
    const Key* parents;  // before each in its chain, or null
    const Sum* found;    // of the bytes that came; null = they did not all come
    const uint64_t* offsets;
    uint8_t* statuses;  // of the reservation: kStored where there is memory; then the final ones
    Id* ids;            // pinned
    int64_t num;
    int64_t is_rcache;  // their home is the node that sent them
};

// Publishes those that came as they were announced; the memory of the others is free again.
inline void settle(Pool& pool, const Arrival& arrival) {
    std::vector<uint64_t> unsound;
    for (int64_t i = 0; i < arrival.num; i++) {
        uint8_t& status = arrival.statuses[i];
        Id& id = arrival.ids[i];
        const uint32_t length = static_cast<uint32_t>(arrival.lengths[i]);
        if (status == kStored && arrival.found[i] != arrival.announced[i]) {
            unsound.push_back(arrival.offsets[i]);
            status = kUnsound;
        } else if (status == kStored) {
            const Key* parent = arrival.parents != nullptr ? arrival.parents + i : nullptr;
            const Published done = pool.publish({arrival.keys[i], arrival.offsets[i], length, slot_bytes(length),
                                                 arrival.is_rcache != 0, arrival.announced[i], parent});
            status = done.status;
            id = done.id;
        } else if (status == kDuplicate) {
            const Entry& entry = pool.entries[id];
            status = entry.length == length && entry.sum == arrival.announced[i] ? kDuplicate : kConflict;
        }
        if (id != kNone) {
            Entry& entry = pool.entries[id];
            entry.is_home |= arrival.is_rcache != 0;
            arrival.lengths[i] = entry.length;
        }
    }
    for (uint64_t offset : unsound) {
        pool.memory.free(offset);
    }
}

// Keeps nothing of blocks that did not all come.
inline void give_up(Pool& pool, const Arrival& arrival) {
    for (int64_t i = 0; i < arrival.num; i++) {
        if (arrival.statuses[i] == kStored) {
            pool.memory.free(arrival.offsets[i]);
        } else if (arrival.statuses[i] == kDuplicate) {
            pool.unpin(arrival.ids[i]);
        }
    }
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
