#include "serving.hpp"

namespace pool {

namespace {

using ems::Frame;

constexpr int64_t kSendNs = int64_t{10} * 1000000000;  // time limit for sending answers; then the client counts as gone
constexpr int64_t kAheadShare = 16;               // at most 1 / kAheadShare of a quota is kept free for the next batch
}  // namespace

Serving::~Serving() {
    drop_reserved();
    end_batch();
    for (std::vector<Id> ids; !(ids = leases_.end_one()).empty();) {
        unpin(ids);
    }
}

int Serving::next(uint64_t valid_at, Frame& frame) {
    while (true) {
        const int problem = is_unchecked_ ? 0 : receive(unchecked_);
        frame = unchecked_;
        if (problem != 0 && problem != ems::kMalformed) {
            return problem;
        }
        is_unchecked_ = problem == 0 && terms_.keyring_version->load() != valid_at;
        if (problem == 0 && frame.header.op == ems::Reserve::kOp) {
            drop_reserved();  // whoever answers
        }
        const bool is_ours = problem == 0 && !is_unchecked_ && answer(frame);
        if (!(is_held_ && is_ours && has_frame())) {
            if (const int failure = flush()) {
                return failure;
            }
        }
        if (!is_in_batch_) {
            end_read();
        }
        if (!is_ours) {
            return is_unchecked_ ? kUnchecked : 0;
        }
        while (rest() && !has_frame()) {
        }
    }
}

// Whether another request has arrived, entirely or in part.
bool Serving::has_frame() const {
    pollfd wanted{fd_, POLLIN, 0};
    return stream_.has_frame() || poll(&wanted, 1, 0) > 0;
}

int Serving::flush() {
    const int problem = ems::send_all(fd_, out_.data.data(), out_.data.size(), ems::now_ns() + kSendNs);
    out_.data.clear();
    is_held_ = false;
    held_bytes_ = 0;
    return problem;
}

bool Serving::answer(const Frame& frame) {
    is_held_ = false;
    switch (frame.header.op) {
#define ANSWER(Request)                                      \
    case ems::Request::kOp: {                                \
        ems::Request request;                                \
        return frame.read(request) && answer(frame, request); \
    }
        EMS_NATIVE_REQUESTS(ANSWER)
#undef ANSWER
        default:
            return false;
    }
}

bool Serving::answer(const Frame& frame, const ems::Ping&) {
    say(frame, ems::Done{});
    return true;
}

// Does a part of the work that can wait until a batch is answered: makes room for another batch of its size, then
// unpins its blocks. Returns whether there is more to do.
bool Serving::rest() {
    if (!has_ended_) {
        return false;
    }
    Glance& glance = handle_->glance;
    if (num_stored_ > 0) {
        auto make_room = [&](bool may_grow) {
            const Held held(handle_);
            const int64_t share = std::min<int64_t>(glance.quota, handle_->pool.memory.capacity()) / kAheadShare;
            return handle_->pool.make_room_ahead(largest_slot_, num_stored_, share, may_grow);
        };
        Outcome outcome = make_room(glance.may_grow != 0);
        if (outcome == kNeedsMemory) {
            outcome = callbacks_.grow() != 0 ? kMore : make_room(false);
        }
        if (outcome == kMore) {
            return true;
        }
    }
    end_batch();
    return false;
}

void Serving::end_batch() {
    unpin(batch_);
    batch_.clear();
    has_ended_ = false;
    last_status_ = kStored;
    send_by_ns_ = 0;
    num_stored_ = largest_slot_ = 0;
}

void Serving::unpin(const std::vector<Id>& ids) {
    if (ids.empty()) {
        return;
    }
    {
        const Held held(handle_);
        for (Id id : ids) {
            handle_->pool.unpin(id);
        }
    }
    close_left();
}

// Load: pins the longest prefix of the keys that is in the pool, under a lease.
bool Serving::answer(const Frame& frame, const ems::Load& asked) {
    const Keys keys(asked.keys);
    if (!keys.are_good) {
        return false;
    }
    std::vector<Id> ids;
    uint8_t cause = 0;
    {
        const Held held(handle_);
        Pool& pool = handle_->pool;
        for (int64_t i = 0; i < keys.num; i++) {
            const Id id = pool.find_next(keys.at, i, keys.num);
            if (id == kNone) {
                cause = pool.missed(keys.at[i], keys.num - i);
                break;
            }
            ids.push_back(id);
        }
        if (static_cast<int64_t>(ids.size()) < keys.num && asks_others(asked.read_local_only)) {
            return false;
        }
        for (Id id : ids) {
            pool.pin(id);
        }
    }
    handle_->glance.counts.add(static_cast<uint64_t>(keys.num), ids.size(), cause);
    say_found(frame, ids, cause);
    return true;
}

// Pick: pins every key that is in the pool, under one lease; a key that is named twice is pinned twice.
bool Serving::answer(const Frame& frame, const ems::Pick& asked) {
    const Keys keys(asked.keys);
    if (!keys.are_good) {
        return false;
    }
    std::vector<Id> ids(static_cast<size_t>(keys.num));
    uint64_t num_found = 0;
    uint8_t cause = 0;
    {
        const Held held(handle_);
        Pool& pool = handle_->pool;
        for (int64_t i = 0; i < keys.num; i++) {
            ids[i] = pool.find_next(keys.at, i, keys.num);
            num_found += ids[i] != kNone;
            if (ids[i] == kNone && cause == 0) {
                cause = pool.missed(keys.at[i], 1);
            }
        }
        if (cause != 0 && asks_others(asked.read_local_only)) {
            return false;
        }
        for (Id id : ids) {
            if (id != kNone) {
                pool.pin(id);
            }
        }
    }
    handle_->glance.counts.add(static_cast<uint64_t>(keys.num), num_found, cause);
    say_found(frame, ids, cause);
    return true;
}

// Answers with the blocks' locations and checksums (zeros for missing ones), and turns their pins into a lease.
void Serving::say_found(const Frame& request, const std::vector<Id>& ids, uint8_t cause) {
    std::vector<Id> pinned;
    std::copy_if(ids.begin(), ids.end(), std::back_inserter(pinned), [](Id id) { return id != kNone; });
    const bool is_lent = !pinned.empty() && !leases_.is_full();
    const bool is_each = request.header.op == ems::Pick::kOp;  // the answer has an entry for every key, found or not
    const size_t num = is_lent || is_each ? ids.size() : 0;
    ems::Found found;
    found.segments.resize(num), found.offsets.resize(num), found.lengths.resize(num);
    std::vector<Sum> sums(num);
    {
        const Held held(handle_);
        const Memory& memory = handle_->pool.memory;
        for (size_t i = 0; is_lent && i < num; i++) {
            if (ids[i] != kNone) {
                const Entry& entry = handle_->pool.entries[ids[i]];
                const auto offset = static_cast<int64_t>(entry.offset);
                found.segments[i] = offset / memory.segment_bytes;
                found.offsets[i] = offset % memory.segment_bytes;
                found.lengths[i] = entry.length;
                sums[i] = entry.sum;
            }
        }
        found.num_given_back = static_cast<int64_t>(memory.num_given_back());
    }
    if (is_lent) {
        found.lease = leases_.lend(std::move(pinned));
    } else if (!pinned.empty()) {
        handle_->glance.counts.add_one(handle_->glance.counts.denied_leases);
        unpin(pinned);
    }
    found.sums = {sums.data(), num * sizeof(Sum)};
    found.cause = cause;
    say(request, found);
}

// Release: ends a lease. A block that the client reports as corrupt is checked before it is removed.
bool Serving::answer(const Frame&, const ems::Release& read) {
    if (read.lease % 2 == 0) {
        return false;
    }
    const std::vector<Id> ids = leases_.end(read.lease);
    if (read.corrupt >= 0 && read.corrupt < static_cast<int64_t>(ids.size())) {
        distrust(ids[static_cast<size_t>(read.corrupt)]);
    }
    unpin(ids);
    return true;
}

// Checks a pinned block's checksum; if its bytes have changed, removes it and retires its memory.
void Serving::distrust(Id id) {
    Pool& pool = handle_->pool;
    const uint8_t* memory;
    size_t length;
    Sum sum;
    {
        const Held held(handle_);
        const Entry& entry = pool.entries[id];
        memory = pool.memory.at(entry.offset);
        length = entry.length;
        sum = entry.sum;
    }
    if (ems::sum_of(xxh3_, memory, length) == sum) {
        return;
    }
    const Held held(handle_);
    if (pool.entries[id].is_live) {
        pool.spoil(id);
        handle_->glance.counts.add_one(handle_->glance.counts.corrupt);
    }
}

// Exists: answers with the length of the prefix that a load would find; does not count as a use.
bool Serving::answer(const Frame& frame, const ems::Exists& asked) {
    const Keys keys(asked.keys);
    if (!keys.are_good) {
        return false;
    }
    int64_t count = 0;
    {
        const Held held(handle_);
        while (count < keys.num && handle_->pool.find_next(keys.at, count, keys.num) != kNone) {
            count++;
        }
    }
    if (count < keys.num && asks_others(asked.read_local_only)) {
        return false;
    }
    say(frame, ems::Count{count});
    return true;
}

// Has: answers which of the keys `pick` would find.
bool Serving::answer(const Frame& frame, const ems::Has& asked) {
    const Keys keys(asked.keys);
    if (!keys.are_good) {
        return false;
    }
    std::vector<uint8_t> found(static_cast<size_t>(keys.num));
    {
        const Held held(handle_);
        for (int64_t i = 0; i < keys.num; i++) {
            found[i] = handle_->pool.find_next(keys.at, i, keys.num) != kNone;
        }
    }
    if (asks_others(asked.read_local_only) && std::count(found.begin(), found.end(), 0) > 0) {
        return false;
    }
    say(frame, ems::Present{{found.data(), found.size()}});
    return true;
}

}  // namespace pool
