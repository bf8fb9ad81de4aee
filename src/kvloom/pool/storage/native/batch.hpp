// Saving a batch of blocks: memory is reserved under the pool's lock, bytes are copied and checksummed without it, then
// the blocks are published under the lock again.
#pragma once

#include <algorithm>
#include <vector>

#include "pool.hpp"

namespace pool {

using ems::SummedCopy;
using ems::Xxh3;

// The state of a batch between two calls (after kNeedsMemory).
struct Batch {
    std::vector<Begun> begun;    // results for the first keys
    std::vector<uint64_t> free;  // offsets of slots that are free for the next keys
    int64_t num_new = 0;         // about how many of the next keys need memory
    bool is_counted = false;     // whether `num_new` is known
};

// A batch of blocks to save; mirrored in library.py. Arrays have `num` elements.
struct Save {
    const Key* keys;
    const int64_t* lengths;
    const uint8_t* is_rcache;
    const uint8_t* const* areas;  // addresses of the blocks' bytes
    const Key* parent;            // the key before the first one in its chain; null = none
    uint8_t* statuses;
    Id* ids;            // the pinned blocks; kNone = none
    uint64_t* offsets;  // reserved memory
    int64_t num;
    int64_t num_done;     // elements of the output arrays that are filled: up to the first key without room, or all
    double copies_limit;  // most bytes of copies of other nodes' blocks
    int64_t may_grow;
    int64_t is_chain;  // each block follows the one before it
    int64_t goes_on;   // continue after a key without room
    Batch* batch;
};

// Whether the blocks from `start` on have the same length and are no copies.
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

// Reserves memory for each key in order, or pins its existing block. Stops after the first key without room, unless
// save.goes_on. kNeedsMemory: call again when Python has added memory.
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

// Copies the bytes of new blocks to their memory, and returns the checksums of new and of existing blocks' bytes.
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

// See pool_save.
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

// Blocks that another node announced and then sent into reserved memory; mirrored in library.py. Arrays have `num`
// elements.
struct Arrival {
    const Key* keys;
    int64_t* lengths;  // input: announced lengths; output: lengths of the blocks in the pool
    const Sum* announced;
    const Key* parents;  // the key before each in its chain; null = none
    const Sum* found;    // checksums of the received bytes; null = the transfer failed
    const uint64_t* offsets;
    uint8_t* statuses;  // input: of the reservation, kStored = there is memory; output: final
    Id* ids;            // pinned blocks
    int64_t num;
    int64_t is_rcache;  // the blocks are copies: their home is the node that sent them
};

// Publishes the blocks whose checksums are the announced ones, and frees the memory of the others (kUnsound).
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

// Releases memory and pins of blocks whose transfer failed.
inline void give_up(Pool& pool, const Arrival& arrival) {
    for (int64_t i = 0; i < arrival.num; i++) {
        if (arrival.statuses[i] == kStored) {
            pool.memory.free(arrival.offsets[i]);
        } else if (arrival.statuses[i] == kDuplicate) {
            pool.unpin(arrival.ids[i]);
        }
    }
}

// See pool_abandon_batch.
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
