#include "memory.hpp"

namespace pool {

namespace {
constexpr double kMargin = 15.0 / 16;  // a class takes another's slab if that is worth less than this part of its own
}

// Allocates up to `count` slots of a class, all in one slab; returns their offsets. Empty = no room.
std::vector<uint64_t> Memory::allocate(uint32_t slot, int64_t count) {
    std::vector<uint64_t> offsets;
    const int64_t index = slot <= slab_bytes ? slab_for(slot) : -1;
    if (index < 0) {
        return offsets;
    }
    Slab& slab = slabs_[index];
    const uint64_t start = index * slab_bytes;
    while (count > 0 && slab.room() > 0) {
        uint64_t position = slab.next;
        if (slab.free.empty()) {
            slab.next++;
        } else {
            position = slab.free.back();
            slab.free.pop_back();
        }
        offsets.push_back(start + position * slot);
        count--;
    }
    const int64_t taken = static_cast<int64_t>(offsets.size());
    slab.used += taken;
    room_[slot] -= taken;
    used_bytes_ += taken * slot;
    return offsets;
}

int64_t Memory::slab_for(uint32_t slot) {
    std::vector<uint32_t>& open = open_[slot];
    while (!open.empty()) {
        const Slab& slab = slabs_[open.back()];
        if (slab.slot == slot && slab.room() > 0 && !slab.is_closed) {
            return open.back();
        }
        open.pop_back();
    }
    auto fits = [&](uint32_t index) { return slabs_[index].size >= slot; };
    auto found = std::find_if(free_slabs_.rbegin(), free_slabs_.rend(), fits);
    if (found == free_slabs_.rend()) {
        return -1;
    }
    const uint32_t index = *found;
    free_slabs_.erase(std::next(found).base());
    Slab& slab = slabs_[index];
    slab.slot = slot;
    class_bytes_[slot] += slab.size;
    room_[slot] += slab.room();
    open.push_back(index);
    return index;
}

// Frees a slot. If its segment is being given back and this was its last slot in use, the segment is released.
void Memory::free(uint64_t offset) {
    const uint32_t index = static_cast<uint32_t>(offset / slab_bytes);
    Slab& slab = slabs_[index];
    slab.used--;
    slab.free.push_back(static_cast<uint32_t>(offset % slab_bytes / slab.slot));
    if (!slab.is_closed) {
        used_bytes_ -= slab.slot;
        room_[slab.slot]++;
        if (slab.used == 0) {
            room_[slab.slot] -= slab.room();
            class_bytes_[slab.slot] -= slab.size;
            slab.slot = 0;
            slab.next = 0;
            slab.free.clear();
            free_slabs_.push_back(index);
        } else if (slab.room() == 1) {
            open_[slab.slot].push_back(index);
        }
    }
    if (!leaving_.empty()) {
        let_go(static_cast<int64_t>(offset) / segment_bytes);
    }
}

// Retires a slot: it is never allocated again.
void Memory::spoil(uint64_t offset) {
    const int64_t segment = static_cast<int64_t>(offset) / segment_bytes;
    spoiled_[segment]++;
    let_go(segment);
}

// Bytes that blocks of a class can occupy before any memory must be freed.
int64_t Memory::room(uint32_t slot) const {
    int64_t free = static_cast<int64_t>(free_slabs_.size()) * (slab_bytes / slot);
    if (num_missing() > 0 && slabs_.back().slot == 0) {
        free += slabs_.back().size / slot - slab_bytes / slot;
    }
    const auto found = room_.find(slot);
    return ((found == room_.end() ? 0 : found->second) + free) * slot;
}

// Records that a block was published.
void Memory::add(Id id) {
    Entry& entry = entries_[id];
    clock_ += entry.slot;
    entry.used_at = clock_;
    Slab& slab = slabs_[entry.offset / slab_bytes];
    slab.shelf.push_back(entries_, id);
    slab.use.add(entry.slot, clock_);
    of_class_[entry.slot].add(entry.slot, clock_);
}

// Records a use of a block.
void Memory::touch(Id id) {
    Entry& entry = entries_[id];
    const __int128 passed = static_cast<__int128>(clock_ - entry.used_at) * entry.slot;
    entry.used_at = clock_;
    slabs_[entry.offset / slab_bytes].use.stamps += passed;
    of_class_[entry.slot].stamps += passed;
}

// Records that a block was removed from the index.
void Memory::discard(Id id) {
    const Entry& entry = entries_[id];
    Slab& slab = slabs_[entry.offset / slab_bytes];
    slab.shelf.remove(entries_, id);
    slab.use.add(-int64_t{entry.slot}, entry.used_at);
    of_class_[entry.slot].add(-int64_t{entry.slot}, entry.used_at);
}

// Bytes that the last slab lacks to its full size; 0 if it is complete or closed.
int64_t Memory::num_missing() const {
    return slabs_.empty() || slabs_.back().is_closed ? 0 : slab_bytes - slabs_.back().size;
}

// Adds `size` bytes: to the last slab if it is incomplete, else as a new slab. segment: address of the new segment if
// the slab is the first of one.
void Memory::grow(int64_t size, uint8_t* segment) {
    if (num_missing() > 0) {
        Slab& slab = slabs_.back();
        const int64_t before = slab.room();
        slab.size += size;
        if (slab.slot != 0) {
            class_bytes_[slab.slot] += size;
            room_[slab.slot] += slab.room() - before;
            if (slab.room() > 0 && before == 0) {
                open_[slab.slot].push_back(static_cast<uint32_t>(slabs_.size() - 1));
            }
        }
    } else {
        if (segment != nullptr) {
            segments_.push_back(segment);
        }
        slabs_.emplace_back();
        slabs_.back().size = size;
        free_slabs_.push_back(static_cast<uint32_t>(slabs_.size() - 1));
    }
    capacity_ += size;
}

// The blocks of the slab that a class should take from another class; empty = it should evict its own blocks.
// is_forced: the class has no block that could be evicted. Slabs with blocks that are being read or written are no
// candidates.
std::vector<Id> Memory::slab_to_clear(uint32_t slot, bool is_forced) const {
    const std::set<uint32_t> less = lesser(slot);
    const Slab* found = nullptr;
    double least = 0;
    for (const Slab& slab : slabs_) {
        if (slab.slot == 0 || slab.slot == slot || slab.is_closed || (!is_forced && less.count(slab.slot) == 0)) {
            continue;
        }
        const double worth = slab.use.worth(clock_, capacity_);
        const bool is_whole = static_cast<int64_t>(slab.shelf.size()) == slab.used && slab.size >= slot;
        if ((found == nullptr || worth < least) && is_whole && is_unpinned(slab.shelf)) {
            found = &slab;
            least = worth;
        }
    }
    std::vector<Id> blocks;
    for (Id id = found ? found->shelf.first() : kNone; id != kNone; id = entries_[id].next_on_shelf) {
        blocks.push_back(id);
    }
    return blocks;
}

bool Memory::is_unpinned(const Shelf& shelf) const {
    Id id = shelf.first();
    while (id != kNone && entries_[id].pins == 0) {
        id = entries_[id].next_on_shelf;
    }
    return id == kNone;
}

// The classes whose memory is worth clearly less (kMargin) than that of this one.
std::set<uint32_t> Memory::lesser(uint32_t slot) const {
    std::map<uint32_t, double> worth;
    for (const auto& [each, use] : of_class_) {
        const auto memory = class_bytes_.find(each);
        if (memory != class_bytes_.end() && memory->second > 0) {
            worth[each] = use.worth(clock_, capacity_) / static_cast<double>(memory->second);
        }
    }
    const auto own = worth.find(slot);
    const double limit = own != worth.end() ? own->second * kMargin : std::numeric_limits<double>::infinity();
    std::set<uint32_t> found;
    for (const auto& [each, value] : worth) {
        if (value < limit && each != slot) {
            found.insert(each);
        }
    }
    return found;
}

// The segment whose blocks are worth least; is_idle_only: of those without readers and writers. -1 = none.
int64_t Memory::coldest_segment(bool is_idle_only) const {
    int64_t found = -1;
    double least = 0;
    for (int64_t segment = 0; segment < static_cast<int64_t>(segments_.size()); segment++) {
        if (segments_[segment] == nullptr || leaving_.count(segment) > 0 || (is_idle_only && !is_idle(segment))) {
            continue;
        }
        double worth = 0;
        for (int64_t index = segment * slabs_a_segment(); index < end_of(segment); index++) {
            worth += slabs_[index].use.worth(clock_, capacity_);
        }
        if (found < 0 || worth < least) {
            found = segment;
            least = worth;
        }
    }
    return found;
}

bool Memory::is_idle(int64_t segment) const {
    int64_t num_blocks = 0;
    for (int64_t index = segment * slabs_a_segment(); index < end_of(segment); index++) {
        num_blocks += static_cast<int64_t>(slabs_[index].shelf.size());
        if (!is_unpinned(slabs_[index].shelf)) {
            return false;
        }
    }
    return num_blocks == num_used(segment);
}

int64_t Memory::num_used(int64_t segment) const {
    const auto spoiled = spoiled_.find(segment);
    int64_t count = spoiled == spoiled_.end() ? 0 : -spoiled->second;
    for (int64_t index = segment * slabs_a_segment(); index < end_of(segment); index++) {
        count += slabs_[index].used;
    }
    return count;
}

// The published blocks of a segment.
std::vector<Id> Memory::blocks_of(int64_t segment) const {
    std::vector<Id> blocks;
    for (int64_t index = segment * slabs_a_segment(); index < end_of(segment); index++) {
        for (Id id = slabs_[index].shelf.first(); id != kNone; id = entries_[id].next_on_shelf) {
            blocks.push_back(id);
        }
    }
    return blocks;
}

// Takes a segment out of use; it is released once it has no readers and writers. Its blocks must have been removed from
// the index. Returns the bytes that leave this tenant's capacity now.
int64_t Memory::give_back(int64_t segment) {
    while (num_slabs() < (segment + 1) * slabs_a_segment()) {  // slabs that were never added
        slabs_.emplace_back();
        slabs_.back().is_closed = true;
    }
    int64_t size = 0;
    for (int64_t index = segment * slabs_a_segment(); index < end_of(segment); index++) {
        size += close(slabs_[index], static_cast<uint32_t>(index));
    }
    leaving_.insert(segment);
    let_go(segment);
    return size;
}

// Takes a slab out of use permanently; allocated slots stay valid until freed. Returns its bytes.
int64_t Memory::close(Slab& slab, uint32_t index) {
    if (slab.is_closed) {
        return 0;
    }
    slab.is_closed = true;
    if (slab.slot != 0) {
        room_[slab.slot] -= slab.room();
        class_bytes_[slab.slot] -= slab.size;
    } else {
        free_slabs_.erase(std::find(free_slabs_.begin(), free_slabs_.end(), index));
    }
    used_bytes_ -= slab.used * slab.slot;
    capacity_ -= slab.size;
    return slab.size;
}

void Memory::let_go(int64_t segment) {
    if (leaving_.count(segment) > 0 && num_used(segment) == 0) {
        leaving_.erase(segment);
        segments_[segment] = nullptr;
        num_given_back_++;
        left_.push_back(static_cast<uint32_t>(segment));
    }
}

// Checks the invariants. Returns a description of the first violation, null = none.
const char* Memory::check(uint64_t num_blocks) const {
    int64_t used = 0, capacity = 0;
    uint64_t blocks = 0;
    std::map<uint32_t, int64_t> room, bytes;
    for (const Slab& slab : slabs_) {
        Use use;
        for (Id id = slab.shelf.first(); id != kNone; id = entries_[id].next_on_shelf) {
            use.add(entries_[id].slot, entries_[id].used_at);
            if (entries_[id].slot != slab.slot || slab.is_closed) {
                return "a block lies in a slab of another class";
            }
        }
        if (use.bytes != slab.use.bytes || use.stamps != slab.use.stamps) {
            return "a slab's use is not that of its blocks";
        }
        if (slab.used != slab.next - static_cast<int64_t>(slab.free.size())) {
            return "a slab's slots are miscounted";
        }
        blocks += slab.shelf.size();
        if (!slab.is_closed) {
            used += slab.used * slab.slot;
            capacity += slab.size;
            room[slab.slot] += slab.room();
            bytes[slab.slot] += slab.size;
        }
    }
    for (const auto& [slot, count] : room_) {
        if (room[slot] != count) {
            return "a class's room is miscounted";
        }
    }
    for (const auto& [slot, size] : class_bytes_) {
        if (bytes[slot] != size) {
            return "a class's bytes are miscounted";
        }
    }
    return used == used_bytes_ && capacity == capacity_ && blocks == num_blocks ? nullptr : "bytes are miscounted";
}

}  // namespace pool
