// Saves of a client that writes into the pool's memory itself: it reserves memory, writes there, and commits with the
// checksums of what it wrote. Its reservation ends with the commit, the next reservation or the session.
#include "serving.hpp"

namespace pool {

// Answers one status per key, in order, with the memory where it is kStored. Keys after the first one without room are
// not tried. Blocks that are here already are pinned until the batch ends.
bool Serving::answer(const ems::Frame& frame, const ems::Reserve& wanted) {
    const Keys keys(wanted.keys);
    const bool is_good = keys.are_good && keys.have(wanted.lengths) && is_parent(wanted.parent) &&
                         std::all_of(wanted.lengths.begin(), wanted.lengths.end(), is_block);
    if (!is_good || terms_.is_direct == 0) {
        return false;
    }
    if (has_ended_) {
        end_batch();
    }
    const size_t num = wanted.lengths.size();
    std::vector<uint8_t> statuses(num), is_rcache(num);
    std::vector<Id> ids(num, kNone);
    ems::Reserved told;
    told.segments.resize(num), told.offsets.resize(num);
    const int64_t segment_bytes = handle_->pool.memory.segment_bytes;
    size_t done = 0;
    if (!may_put(wanted.lengths.data(), keys.num) && num > 0) {
        statuses[done++] = kLimited;
        handle_->glance.counts.add_saved(statuses.data(), 1);
    }
    while (done < num && (done == 0 || is_success(statuses[done - 1]))) {
        Save part{};
        part.keys = keys.at + done;
        part.lengths = wanted.lengths.data() + done;
        part.is_rcache = is_rcache.data() + done;
        part.num = std::min<int64_t>(kKeysAtOnce, static_cast<int64_t>(num - done));
        with_memory(part, [&] { return begin_or_stop(handle_, part); });
        std::vector<Begun> begun = std::move(part.batch->begun);
        end(part);
        if (begun.back().status == kNoRoom && end_read()) {
            begun.pop_back();  // it is tried again
        }
        for (const Begun& each : begun) {
            statuses[done] = each.status;
            if (each.status == kStored) {
                const auto offset = static_cast<int64_t>(each.offset);
                told.segments[done] = offset / segment_bytes;
                told.offsets[done] = offset % segment_bytes;
                const Key* before = done > 0 ? keys.at + done - 1 : parent_in(wanted.parent);
                reserved_.push_back({keys.at[done], before != nullptr ? *before : Key{}, before != nullptr, each.offset,
                                     static_cast<uint32_t>(wanted.lengths[done])});
            } else if (each.status == kDuplicate) {
                batch_.push_back(each.id);
                handle_->glance.counts.add_saved(&statuses[done], 1);
            } else {
                const uint32_t slot = slot_bytes(static_cast<uint32_t>(wanted.lengths[done]));
                statuses[done] = static_cast<uint8_t>(callbacks_.refuse(&keys.at[done], slot));
                handle_->glance.counts.add_saved(&statuses[done], 1);
            }
            done++;
        }
    }
    if (done > 0) {
        std::fill(statuses.begin() + static_cast<int64_t>(done), statuses.end(), statuses[done - 1]);
    }
    has_reserved_ = is_in_batch_ = true;
    told.statuses = {statuses.data(), statuses.size()};
    told.num_given_back = static_cast<int64_t>(handle_->glance.num_given_back);
    say(frame, told);
    return true;
}

// Publishes the reserved blocks in order with the client's checksums; frees the memory of those that have none.
bool Serving::answer(const ems::Frame& frame, const ems::Commit& written) {
    const auto [sums, size] = written.sums;
    if (!has_reserved_ || size % sizeof(Sum) != 0) {
        return false;
    }
    const size_t num = std::min(size / sizeof(Sum), reserved_.size());
    std::vector<uint8_t> statuses(num);
    for (size_t start = 0; start < num; start += kKeysAtOnce) {
        const Held held(handle_);
        for (size_t i = start; i < std::min(num, start + kKeysAtOnce); i++) {
            const Reserved& block = reserved_[i];
            Sum sum;
            std::memcpy(sum.data(), sums + i * sizeof(Sum), sizeof(Sum));
            const Key* parent = block.has_parent ? &block.parent : nullptr;
            const Published done =
                handle_->pool.publish({block.key, block.offset, block.length, slot_bytes(block.length), false, sum, parent});
            statuses[i] = done.status;
            if (done.id != kNone) {
                batch_.push_back(done.id);
            }
        }
    }
    for (size_t i = 0; i < num; i++) {
        if (statuses[i] == kStored) {
            count_stored(reserved_[i].length);
        } else if (statuses[i] == kLeft) {
            statuses[i] = static_cast<uint8_t>(callbacks_.refuse(&reserved_[i].key, slot_bytes(reserved_[i].length)));
        }
    }
    reserved_.erase(reserved_.begin(), reserved_.begin() + static_cast<int64_t>(num));
    drop_reserved();
    handle_->glance.counts.add_saved(statuses.data(), num);
    has_ended_ = true;
    is_in_batch_ = false;
    say(frame, ems::Saved{{statuses.data(), num}});
    return true;
}

// Frees reserved memory that is not committed.
void Serving::drop_reserved() {
    if (!reserved_.empty()) {
        const Held held(handle_);
        for (const Reserved& block : reserved_) {
            handle_->pool.memory.free(block.offset);
        }
    }
    reserved_.clear();
    has_reserved_ = false;
    close_left();
}

}  // namespace pool
