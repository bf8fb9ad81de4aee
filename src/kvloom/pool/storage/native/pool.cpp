#include "pool.hpp"

namespace pool {

namespace {
constexpr size_t kMaxRemembered = 65536;  // removed keys whose cause of removal is remembered
constexpr int kMaxEvictions = 4096;       // most attempts to make room for one block
constexpr size_t kForgottenAtOnce = 2048;  // most blocks of a segment removed per call: other calls wait meanwhile
constexpr int64_t kEvictedAtOnce = 8 << 20;  // most bytes of a chain evicted per call, for the same reason
constexpr int64_t kAheadBlocks = 16;      // most blocks evicted ahead per call, for the same reason
}  // namespace

// Pins a block; counts as a use.
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

// Frees the memory (retires it if spoiled) and the entry of a removed block without pins.
void Pool::release(Id id) {
    const Entry& entry = entries[id];
    if (entry.is_spoiled) {
        memory.spoil(entry.offset);
    } else {
        memory.free(entry.offset);
    }
    entries.give_back(id);
}

// Records that a reader missed a key and the count - 1 after it. Returns the cause of the first miss.
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

// Adds a block whose key is not in the index; pinned once.
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

// Appends a child to its parent's list of children; prev_sibling of the first child is the last one.
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

// Removes a block from the index. Unpinned: the caller must reuse or free its memory. Pinned: the last unpin frees it.
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

// Removes a pinned block whose bytes are corrupt; its memory is retired once unpinned.
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

// The last block of the unpinned chain below a block. It is evicted first, as a prefix is worth more than what follows.
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

// Removes blocks from the end of a chain up to the victim, the least useful block of the first order that has one,
// until `wanted` bytes are reached. Returns the removed blocks, whose memory the caller must reuse or free.
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

// Frees the memory and entries of removed blocks without pins; returns the bytes.
int64_t Pool::free_all(const std::vector<Id>& gone) {
    int64_t freed = 0;
    for (Id id : gone) {
        freed += entries[id].slot;
        memory.free(entries[id].offset);
        entries.give_back(id);
    }
    return freed;
}

// Empties a slab of another class that is worth less than this class's slabs; is_forced: the slab that is worth least.
bool Pool::clear_slab(uint32_t slot, bool is_forced) {
    const std::vector<Id> gone = memory.slab_to_clear(slot, is_forced);
    for (Id id : gone) {
        forget(id, kEvicted);
    }
    num_evicted += gone.size();
    free_all(gone);
    return !gone.empty();
}

// Reserves at least one slot of the wished class, evicting if needed. `offsets` stays empty if only pinned blocks are
// left.
Outcome Pool::make_room(const Wish& wish, std::vector<uint64_t>& offsets) {
    auto has_many_copies = [&] { return static_cast<double>(rcache_bytes + wish.slot) > wish.copies_limit; };
    for (int n = 0; n < kMaxEvictions; n++) {
        std::vector<Id> gone;
        if (wish.is_rcache && has_many_copies()) {
            gone = evict_from(orders_.copies(), wish.bytes);
            if (gone.empty()) {  // all copies are being read: only unused memory can hold another one
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

// Evicts, in advance, some of the blocks that a batch of `count` blocks would evict; share: most bytes to keep free.
Outcome Pool::make_room_ahead(uint32_t slot, int64_t count, int64_t share, bool may_grow) {
    const int64_t lacking = std::min(count, share / slot) * slot - memory.room(slot);
    if (lacking <= 0) {
        return kDone;
    }
    if (may_grow) {
        return kNeedsMemory;
    }
    if (memory.wants_slab(slot)) {
        return kDone;  // emptying a whole slab takes long: not in advance
    }
    const std::vector<Id> gone = evict_from(orders_.of_slot(slot), std::min<int64_t>(lacking, kAheadBlocks * slot));
    free_all(gone);
    return gone.empty() ? kDone : kMore;
}

// Carries out a part of an eviction order: first empties the least useful segments, which go back to the node, then
// evicts single blocks until all that are not pinned are gone. Returns kMore if there is more to do.
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

// Removes some blocks of a segment; pinned ones stay readable until they are unpinned. Returns whether there are more.
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

// Checks the invariants. Returns a description of the first violation, null = none.
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
