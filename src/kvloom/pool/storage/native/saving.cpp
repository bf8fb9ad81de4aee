// Saves of a client that has put its blocks into its staging area. Blocks whose home is another node are sent there by
// Python, which is also asked what the tenant's rate allows.
#include "serving.hpp"

#include <thread>

namespace pool {

namespace {

constexpr int64_t kHeldShare = 4;  // 1 / kHeldShare of the staging area may wait for held-back answers
constexpr int64_t kSendShare = 2;  // 1 / kSendShare of a batch's time may pass until its blocks can be sent home
constexpr std::chrono::milliseconds kPause{2};  // between two looks whether a block has reached its home

}  // namespace

// Answers one status per key, in order. The batch's keys after the first one without room are not tried.
bool Serving::answer(const ems::Frame& frame, const ems::Save& wanted) {
    const Keys keys(wanted.keys);
    const bool is_good =
        keys.are_good && keys.have(wanted.offsets) && keys.have(wanted.lengths) && is_parent(wanted.parent);
    if (!is_good || arena_ == nullptr || !is_within(wanted, arena_bytes_)) {
        return false;
    }
    if (has_ended_) {
        end_batch();
    }
    if (send_by_ns_ == 0) {
        send_by_ns_ = ems::now_ns() + int64_t{frame.header.deadline_ms} * 1000000 / kSendShare;
    }
    const int64_t num = keys.num;
    const int64_t most = terms_.node.route != nullptr && !wanted.write_rcache ? 1 : kKeysAtOnce;
    std::vector<uint8_t> statuses(static_cast<size_t>(num));
    int64_t done = 0, num_allowed = 0;
    while (done < num && is_success(last_status_)) {
        if (done == num_allowed) {
            num_allowed = std::min(num, done + most);
            if (!may_put(wanted.lengths.data() + done, num_allowed - done)) {
                statuses[done++] = last_status_ = kLimited;
                break;
            }
        }
        done += save_some(wanted, done, num_allowed, statuses.data() + done);
        if (done > 0) {
            last_status_ = statuses[done - 1];
        }
    }
    handle_->glance.counts.add_saved(statuses.data(), static_cast<size_t>(done));
    std::fill(statuses.begin() + done, statuses.end(), last_status_);
    has_ended_ = wanted.is_last;
    is_in_batch_ = !wanted.is_last;
    held_bytes_ += std::accumulate(wanted.lengths.begin(), wanted.lengths.end(), int64_t{0});
    is_held_ = !wanted.is_last && (held_bytes_ < arena_bytes_ / kHeldShare || ends_batch(stream_));
    say(frame, ems::Saved{{statuses.data(), statuses.size()}});
    return true;
}

// Saves the keys from `start` to `stop` of a message, up to the first one without room. Returns how many were tried,
// each with a status; the one without room may be tried again, and is not among them then.
int64_t Serving::save_some(const ems::Save& wanted, int64_t start, int64_t stop, uint8_t* statuses) {
    const auto num = static_cast<size_t>(stop - start);
    const Key* keys = Keys(wanted.keys).at + start;
    const Key* before = start > 0 ? keys - 1 : parent_in(wanted.parent);
    const Key* parent = wanted.is_chain ? before : nullptr;
    std::vector<uint8_t> routes(num, kHere), is_rcache(num);
    if (terms_.node.route != nullptr) {
        terms_.node.route(keys, stop - start, routes.data());
        if (routes[0] == kAway && !wanted.write_rcache) {  // then there is only one key
            const uint8_t* bytes = arena_ + wanted.offsets[start];
            if (terms_.node.send_now(keys, bytes, wanted.lengths[start], parent, send_by_ns_) != 0) {
                statuses[0] = kStored;
                return 1;
            }
            routes[0] = kCutOff;  // better stored here than nowhere
        }
        std::transform(routes.begin(), routes.end(), is_rcache.begin(), [](uint8_t route) { return route == kAway; });
    }
    std::vector<const uint8_t*> areas(num);
    std::vector<Id> ids(num, kNone);
    const int64_t* offsets = wanted.offsets.data() + start;
    std::transform(offsets, offsets + num, areas.begin(), [&](int64_t at) { return arena_ + at; });
    Save part{};
    part.keys = keys;
    part.lengths = wanted.lengths.data() + start;
    part.is_rcache = is_rcache.data();
    part.areas = areas.data();
    part.parent = parent;
    part.statuses = statuses;
    part.ids = ids.data();
    part.num = stop - start;
    part.is_chain = wanted.is_chain;
    store(part, routes.data());
    return part.num_done;
}

// Saves a part of a message's blocks, up to the first one without room, and sends them to their homes.
void Serving::store(Save& part, const uint8_t* routes) {
    with_memory(part, [&] { return write(handle_, xxh3_, part); });
    for (int64_t i = 0; i < part.num_done; i++) {
        if (part.statuses[i] == kStored) {
            count_stored(part.lengths[i]);
        }
        if (part.ids[i] != kNone) {
            batch_.push_back(part.ids[i]);
        }
    }
    send_home(part, routes);
    const int64_t last = part.num_done - 1;
    if (last >= 0 && part.statuses[last] == kNoRoom && (end_read() || release_sent())) {
        part.num_done = last;  // the last one is tried again
    }
    for (int64_t i = 0; i < part.num_done; i++) {
        if (part.statuses[i] == kNoRoom || part.statuses[i] == kLeft) {
            const uint32_t slot = slot_bytes(static_cast<uint32_t>(part.lengths[i]));
            part.statuses[i] = static_cast<uint8_t>(callbacks_.refuse(&part.keys[i], slot));
        }
    }
}

// Has a part's blocks sent to their homes in the background. Those that will not get there are kLocal.
void Serving::send_home(Save& part, const uint8_t* routes) {
    std::vector<Id> ids;
    std::vector<const Key*> parents;
    std::vector<int64_t> sent;
    for (int64_t i = 0; i < part.num_done; i++) {
        if (routes[i] == kAway && is_success(part.statuses[i])) {
            ids.push_back(part.ids[i]);
            parents.push_back(i > 0 && part.is_chain != 0 ? &part.keys[i - 1] : part.parent);
            sent.push_back(i);
        } else if (routes[i] == kCutOff && is_success(part.statuses[i])) {
            part.statuses[i] = kLocal;
        }
    }
    if (ids.empty()) {
        return;
    }
    {
        const Held held(handle_);
        for (Id id : ids) {
            handle_->pool.entries[id].pins++;
        }
    }
    std::vector<uint8_t> are_sent(ids.size());
    const auto num = static_cast<int64_t>(ids.size());
    terms_.node.send_later(ids.data(), parents.data(), num, send_by_ns_, are_sent.data());
    for (size_t i = 0; i < sent.size(); i++) {
        if (are_sent[i] == 0) {
            part.statuses[sent[i]] = kLocal;
        }
    }
}

// Unpins the batch's copies that have reached their home, so that a batch may be larger than this node's pool; waits
// for one until the batch's time for that is over. Returns whether there were any; at once if none is on its way.
bool Serving::release_sent() {
    while (true) {
        std::vector<Id> sent;
        bool is_one_coming = false;
        {
            const Held held(handle_);
            const Entries& entries = handle_->pool.entries;
            auto is_there = [&](Id id) { return entries[id].is_rcache && entries[id].is_home; };
            std::copy_if(batch_.begin(), batch_.end(), std::back_inserter(sent), is_there);
            batch_.erase(std::remove_if(batch_.begin(), batch_.end(), is_there), batch_.end());
            is_one_coming = std::any_of(batch_.begin(), batch_.end(),
                                        [&](Id id) { return entries[id].is_rcache && entries[id].pins > 1; });
        }
        if (!sent.empty()) {
            unpin(sent);
            return true;
        }
        if (!is_one_coming || ems::now_ns() > send_by_ns_) {
            return false;
        }
        std::this_thread::sleep_for(kPause);
    }
}

}  // namespace pool
