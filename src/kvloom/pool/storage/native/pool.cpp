#include "pool.hpp"

namespace pool {

namespace {
constexpr size_t kMaxRemembered = 65536;  // keys whose loss can still be explained
constexpr int kMaxEvictions = 4096;       // to make room for one block
constexpr size_t kForgottenAtOnce = 2048;  // of a segment that is given back, between two turns of others
constexpr int64_t kEvictedAtOnce = 8 << 20;  // bytes of one chain, likewise
constexpr int64_t kAheadBlocks = 16;      // blocks evicted at a time, while other requests wait
}  // namespace

// A use.
void Pool::pin(Id id) {
    Entry& entry = entries[id];
    entry.pins++;
    orders_.of(entry).touch(entries, id);
    memory.touch(id);
}

void Pool::unpin(Id id) {
    Entry& entry = entries[id];
    if (--entry.pins == 0 && !entry.is_live) {
        release(id);
    }
}

// The memory of a block that has neither key nor pins can have another.
void Pool::release(Id id) {
    const Entry& entry = entries[id];
    if (entry.is_spoiled) {
        memory.spoil(entry.offset);
    } else {
        memory.free(entry.offset);
    }
    entries.give_back(id);
}

// A reader did not find a key, nor `count` - 1 behind it: why.
uint8_t Pool::missed(const Key& key, int64_t count) {
    const uint64_t hash = hash_of(key, seed_);
    orders_.missed(hash, count);
    return lost_.get(hash, kCold);
}

void Pool::remember(uint64_t key_hash, uint8_t cause) {
    lost_.put(key_hash, cause);
    lost_.shrink_to(kMaxRemembered);
}

// All blocks, oldest first.
std::vector<Id> Pool::by_birth() const {
    std::vector<Id> ids;
    for (int64_t segment = 0; segment * (memory.segment_bytes / memory.slab_bytes) < memory.num_slabs(); segment++) {
        for (Id id : memory.blocks_of(segment)) {
            ids.push_back(id);
        }
    }
    std::sort(ids.begin(), ids.end(), [&](Id a, Id b) { return entries[a].born < entries[b].born; });
    return ids;
}

Id Pool::new_entry(const Written& written) {
    const Id id = entries.take();
    Entry& entry = entries[id];
    entry = Entry{};
    entry.key = written.key;
    entry.sum = written.sum;
    entry.key_hash = hash_of(written.key, seed_);
    entry.offset = written.offset;
    entry.born = ++num_born_;
    entry.length = written.length;
    entry.slot = written.slot;
    entry.pins = 1;
    entry.parent = entry.first_child = entry.prev_sibling = entry.next_sibling = kNone;
    entry.is_rcache = written.is_rcache;
    return id;
}

// A block of a key that is not in; pinned once.
Id Pool::add(const Written& written) {
    Id parent = written.parent != nullptr ? find(*written.parent) : kNone;
    if (parent != kNone && entries[parent].is_rcache != written.is_rcache) {
        parent = kNone;
    }
    const Id id = new_entry(written);
    Entry& entry = entries[id];
    entry.is_live = true;
    if (parent != kNone) {
        adopt(parent, id);
    }
    index_.add(id);
    orders_.of(entry).add(entries, id);
    memory.add(id);
    rcache_bytes += written.is_rcache ? written.slot : 0;
    lost_.remove(entry.key_hash);
    return id;
}

// Children are a list in the order in which they came; the first one knows the last.
void Pool::adopt(Id parent, Id child) {
    Entry& above = entries[parent];
    Entry& entry = entries[child];
    entry.parent = parent;
    if (above.first_child == kNone) {
        above.first_child = entry.prev_sibling = child;
    } else {
        Entry& first = entries[above.first_child];
        entry.prev_sibling = first.prev_sibling;
        entries[first.prev_sibling].next_sibling = child;
        first.prev_sibling = child;
    }
}

void Pool::orphan(Id child) {
    Entry& entry = entries[child];
    Entry& above = entries[entry.parent];
    const Id next = entry.next_sibling;
    if (above.first_child == child) {
        above.first_child = next;
    } else {
        entries[entry.prev_sibling].next_sibling = next;
    }
    if (next != kNone) {
        entries[next].prev_sibling = entry.prev_sibling;
    } else if (above.first_child != kNone) {
        entries[above.first_child].prev_sibling = entry.prev_sibling;
    }
    entry.parent = entry.prev_sibling = entry.next_sibling = kNone;
}

// Removes a block. The caller owns its memory if no reader pins it, otherwise its last reader does.
void Pool::forget(Id id, uint8_t cause) {
    Entry& entry = entries[id];
    index_.remove(id);
    orders_.of(entry).remove(entries, id);
    memory.discard(id);
    if (entry.parent != kNone) {
        orphan(id);
    }
    for (Id child = entry.first_child; child != kNone;) {
        Entry& below = entries[child];
        child = below.next_sibling;
        below.parent = below.prev_sibling = below.next_sibling = kNone;
    }
    entry.first_child = kNone;
    entry.is_live = false;
    rcache_bytes -= entry.is_rcache ? entry.slot : 0;
    remember(entry.key_hash, cause);
}

Published Pool::publish(const Written& written) {
    const Id found = find(written.key);
    if (found != kNone) {
        memory.free(written.offset);
        Entry& entry = entries[found];
        entry.pins++;
        return {entry.length == written.length && entry.sum == written.sum ? kDuplicate : kConflict, found};
    }
    if (memory.is_leaving(written.offset)) {
        return {kLeft, new_entry(written)};
    }
    return {kStored, add(written)};
}

// Removes a pinned block whose bytes are damaged; its memory is never used again.
void Pool::spoil(Id id) {
    forget(id, kCorrupt);
    entries[id].is_spoiled = true;
}

Id Pool::victim_of(const std::vector<Order*>& orders) {
    for (Order* order : orders) {
        const Id id = order->victim(entries);
        if (id != kNone) {
            return id;
        }
    }
    return kNone;
}

// The end of an unpinned chain below a block: a prefix is worth more than what follows it.
Id Pool::leaf_below(Id id) const {
    if (hint_ != kNone && hint_victim_ == entries[id].key) {
        const Entry& hint = entries[hint_];
        if (hint.born == hint_born_ && hint.is_live && hint.pins == 0) {
            id = hint_;
        }
    }
    while (true) {
        Id child = entries[id].first_child;
        while (child != kNone && entries[child].pins > 0) {
            child = entries[child].next_sibling;
        }
        if (child == kNone) {
            return id;
        }
        id = child;
    }
}

// Forgets the least useful block of the first order that has one, and its chain's blocks from the end to it. Stops at
// `wanted` bytes. What it returns is the caller's, to use its memory or to free it.
std::vector<Id> Pool::evict_from(const std::vector<Order*>& orders, int64_t wanted) {
    std::vector<Id> gone;
    const Id victim = victim_of(orders);
    if (victim == kNone) {
        return gone;
    }
    const Key key = entries[victim].key;
    Id leaf = leaf_below(victim);
    while (leaf != kNone && wanted > 0) {
        const Id above = leaf != victim ? entries[leaf].parent : kNone;
        if (above != kNone) {
            expect_gone(above);
        }
        forget(leaf, kEvicted);
        gone.push_back(leaf);
        wanted -= entries[leaf].slot;
        hint_ = above;
        hint_victim_ = key;
        hint_born_ = above != kNone ? entries[above].born : 0;
        const bool goes_on = above != kNone && entries[above].pins == 0 && entries[above].first_child == kNone;
        leaf = goes_on ? above : kNone;
    }
    num_evicted += gone.size();
    return gone;
}

// The memory of blocks that lost their key and are not pinned can have another. How many bytes.
int64_t Pool::free_all(const std::vector<Id>& gone) {
    int64_t freed = 0;
    for (Id id : gone) {
        freed += entries[id].slot;
        memory.free(entries[id].offset);
        entries.give_back(id);
    }
    return freed;
}

// Empties the slab of another class that is of less use than this class's; is_forced: of the least use.
bool Pool::clear_slab(uint32_t slot, bool is_forced) {
    const std::vector<Id> gone = memory.slab_to_clear(slot, is_forced);
    for (Id id : gone) {
        forget(id, kEvicted);
    }
    num_evicted += gone.size();
    free_all(gone);
    return !gone.empty();
}

// Offsets of slots of that size into `offsets`, one at least; none when only pinned blocks are in the way.
Outcome Pool::make_room(const Wish& wish, std::vector<uint64_t>& offsets) {
    auto has_many_copies = [&] { return static_cast<double>(rcache_bytes + wish.slot) > wish.copies_limit; };
    for (int n = 0; n < kMaxEvictions; n++) {
        std::vector<Id> gone;
        if (wish.is_rcache && has_many_copies()) {
            gone = evict_from(orders_.copies(), wish.bytes);
            if (gone.empty()) {  // all copies are being read: another one only fits into unused memory
                offsets = memory.allocate(wish.slot, 1);
                return offsets.empty() && wish.may_grow ? kNeedsMemory : kDone;
            }
        } else {
            offsets = memory.allocate(wish.slot, wish.is_rcache ? 1 : std::max<int64_t>(1, wish.bytes / wish.slot));
            if (!offsets.empty()) {
                return kDone;
            }
            if (wish.may_grow) {
                return kNeedsMemory;
            }
            if (clear_slab(wish.slot, false)) {
                continue;
            }
            gone = evict_from(orders_.of_slot(wish.slot), wish.bytes);
            if (gone.empty() && !clear_slab(wish.slot, true)) {
                return kDone;
            }
        }
        const bool is_within = !wish.is_rcache || !has_many_copies();
        std::vector<Id> others;
        for (Id id : gone) {
            if (is_within && entries[id].slot == wish.slot) {
                offsets.push_back(entries[id].offset);
                entries.give_back(id);
            } else {
                others.push_back(id);
            }
        }
        free_all(others);
        if (!offsets.empty()) {
            return kDone;
        }
    }
    return kDone;
}

// Evicts some of what a batch of `count` blocks would evict, before it comes; share: bytes that are kept free at most.
Outcome Pool::make_room_ahead(uint32_t slot, int64_t count, int64_t share, bool may_grow) {
    const int64_t lacking = std::min(count, share / slot) * slot - memory.room(slot);
    if (lacking <= 0) {
        return kDone;
    }
    if (may_grow) {
        return kNeedsMemory;
    }
    if (memory.wants_slab(slot)) {
        return kDone;  // a whole slab lasts long and takes time: only when it is needed
    }
    const std::vector<Id> gone = evict_from(orders_.of_slot(slot), std::min<int64_t>(lacking, kAheadBlocks * slot));
    free_all(gone);
    return gone.empty() ? kDone : kMore;
}

// Drops some of what an order says: first blocks of the segments of least use, which go back to the node, then single
// blocks, until all that are not pinned are gone. Whether there is more to do.
Outcome Pool::evict_some(Eviction& order) {
    if (order.segment >= 0) {
        if (!empty_some(order.segment)) {
            order.closed_bytes += memory.give_back(order.segment);
            order.segment = -1;
        }
        return kMore;
    }
    if (order.has_segments != 0) {
        order.segment = memory.coldest_segment(true);
        int64_t held = 0;
        if (order.segment >= 0) {
            for (Id id : memory.blocks_of(order.segment)) {
                held += entries[id].slot;
            }
        }
        if (order.segment < 0 || held > order.size - order.freed) {
            order.segment = -1;
            order.has_segments = 0;
        } else {
            order.freed += held;
        }
        return kMore;
    }
    for (size_t count = 0; order.freed < order.size && count < kForgottenAtOnce;) {
        const int64_t wanted = std::min(order.size - order.freed, kEvictedAtOnce);
        const std::vector<Id> gone = evict_from(orders_.every(), wanted);
        if (gone.empty()) {
            return kDone;
        }
        count += gone.size();
        order.freed += free_all(gone);
    }
    return order.freed < order.size ? kMore : kDone;
}

// Forgets some blocks of a segment; those that are being read stay readable until then. Whether there are more.
bool Pool::empty_some(int64_t segment) {
    std::vector<Id> blocks = memory.blocks_of(segment), unpinned;
    const bool has_more = blocks.size() > kForgottenAtOnce;
    blocks.resize(std::min(blocks.size(), kForgottenAtOnce));
    for (Id id : blocks) {
        forget(id, kEvicted);
        num_evicted++;
        if (entries[id].pins == 0) {
            unpinned.push_back(id);
        }
    }
    free_all(unpinned);
    return has_more;
}

// States the invariants; what does not hold, or null.
const char* Pool::check() {
    size_t in_orders = 0;
    for (Order* order : orders_.every()) {
        in_orders += order->size();
    }
    if (in_orders != size()) {
        return "orders list other blocks than the index";
    }
    int64_t copies = 0;
    for (Id id : by_birth()) {
        const Entry& entry = entries[id];
        copies += entry.is_rcache ? entry.slot : 0;
        if (!entry.is_live || find(entry.key) != id) {
            return "a dead block in the index";
        }
        if (entry.parent != kNone) {
            Id child = entries[entry.parent].first_child;
            while (child != kNone && child != id) {
                child = entries[child].next_sibling;
            }
            if (child != id || !entries[entry.parent].is_live || entries[entry.parent].is_rcache != entry.is_rcache) {
                return "a chain is not linked both ways, or not within its kind";
            }
        }
    }
    return copies == rcache_bytes ? memory.check(size()) : "copies are miscounted";
}

}  // namespace pool
