// Eviction orders: S3-FIFO or LRU, one order per size class, separate for the tenant's own blocks and for copies of
// other nodes' blocks. The reference implementation, with the reasons, is evict.py; tests compare both.
#pragma once

#include <algorithm>
#include <map>
#include <vector>

#include "entries.hpp"

namespace pool {

class Order {
  public:
    explicit Order(bool is_lru) : is_lru_(is_lru) {}

    size_t size() const { return small_.size() + main_.size(); }

    // Prefetch for a key that is about to be added or removed; see HashIndex.
    void expect(uint64_t hash) const {
        ghosts_.expect(hash);
        former_.expect(hash);
    }
    void expect_first(uint64_t hash) const {
        ghosts_.expect_first(hash);
        former_.expect_first(hash);
    }

    void add(Entries& entries, Id id) {
        Entry& entry = entries[id];
        entry.uses = 0;
        missed(entry.key_hash, 1);
        entry.is_small = !is_lru_ && !ghosts_.remove(entry.key_hash);
        queue_of(entry).push_back(entries, id);
    }

    void touch(Entries& entries, Id id) {
        if (is_lru_) {
            main_.move_to_back(entries, id);
        } else if (entries[id].uses < kMaxUses) {
            entries[id].uses++;
        }
    }

    // Records that a reader missed a key and the count - 1 after it. If the key is remembered, shifts the small queue's
    // share towards the queue that would have kept it; the fewer keys are remembered of that queue, the larger the
    // shift.
    void missed(uint64_t key_hash, int64_t count) {
        const uint64_t num_unused = std::max<size_t>(1, ghosts_.size()), num_used = std::max<size_t>(1, former_.size());
        const uint64_t step = std::min<uint64_t>(count, kMaxMissed) * kWhole / std::max(kMinSize, size());
        if (ghosts_.get(key_hash, kMissed) == kNotMissed) {
            ghosts_.put(key_hash, kMissed);
            share_ = std::min(kMost, share_ + step * std::clamp<uint64_t>(num_used / num_unused, 1, kMaxRatio));
        } else if (former_.remove(key_hash)) {
            const uint64_t fall = kFall * step * std::clamp<uint64_t>(num_unused / num_used, 1, kMaxRatio);
            share_ = std::max(kLeast, share_ - std::min(share_, fall));
        }
    }

    void remove(Entries& entries, Id id) {
        const Entry& entry = entries[id];
        queue_of(entry).remove(entries, id);
        if (entry.is_small) {
            ghosts_.put(entry.key_hash, kNotMissed);
            ghosts_.shrink_to(std::max<size_t>(16, size()));
        } else if (!is_lru_) {
            former_.put(entry.key_hash, kNotMissed);
            former_.shrink_to(std::max<size_t>(16, size() - std::min(size(), ghosts_.size() / 2)));
        }
    }

    // The block to evict; kNone if all are pinned. Ages the blocks that it passes over, at most kMaxPassed per call.
    Id victim(Entries& entries) {
        if (is_lru_) {
            return first_unpinned(entries, main_);
        }
        size_t left = kMaxPassed;
        const size_t total = size();
        for (size_t n = std::min(small_.size(), left); n > 0; n--, left--) {
            if (small_.size() * kWhole < share_ * total) {
                break;  // the rest of the small queue is new: give it time to be used
            }
            const Id id = small_.first();
            Entry& entry = entries[id];
            if (entry.pins > 0) {
                small_.move_to_back(entries, id);
            } else if (entry.uses > 0) {
                small_.remove(entries, id);
                entry.uses = 0;
                entry.is_small = false;
                main_.push_back(entries, id);
            } else {
                return id;
            }
        }
        for (size_t n = std::min((kMaxUses + 1) * main_.size(), left); n > 0; n--) {
            const Id id = main_.first();
            Entry& entry = entries[id];
            if (entry.uses == 0 && entry.pins == 0) {
                return id;
            }
            entry.uses = entry.uses > 0 ? entry.uses - 1 : 0;
            main_.move_to_back(entries, id);
        }
        const Id id = first_unpinned(entries, main_);
        return id != kNone ? id : first_unpinned(entries, small_);
    }

  private:
    static constexpr uint8_t kMaxUses = 3;      // further uses do not make a block stay longer
    static constexpr uint64_t kWhole = uint64_t{1} << 32;  // a share of 1, as shares are fixed-point numbers
    static constexpr uint64_t kLeast = kWhole / 10, kMost = kWhole * 9 / 10;  // limits of the small queue's share
    static constexpr uint64_t kFall = 8;  // a missed key that had been used shifts the share by so many times more
    static constexpr uint64_t kMaxMissed = 64, kMaxRatio = 64;
    static constexpr size_t kMinSize = 256;
    static constexpr uint8_t kNotMissed = 0, kMissed = 1;  // whether a removed key was missed since
    static constexpr size_t kMaxPassed = 4096;  // takes well below a millisecond

    Queue& queue_of(const Entry& entry) { return entry.is_small ? small_ : main_; }

    static Id first_unpinned(const Entries& entries, const Queue& queue) {
        Id id = queue.first();
        while (id != kNone && entries[id].pins > 0) {
            id = entries[id].next_in_queue;
        }
        return id;
    }

    bool is_lru_;
    Queue small_, main_;
    Remembered ghosts_;  // keys evicted from the small queue
    Remembered former_;  // keys evicted from the main queue and not missed since
    uint64_t share_ = kLeast;
};

class Orders {
  public:
    explicit Orders(bool is_lru) : is_lru_(is_lru) {}

    Order& of(const Entry& entry) { return of(entry.slot, entry.is_rcache); }

    Order& of(uint32_t slot, bool is_rcache) {
        auto& orders = is_rcache ? copies_ : own_;
        auto found = orders.find(slot);
        if (found == orders.end()) {
            found = orders.emplace(slot, std::make_unique<Order>(is_lru_)).first;
        }
        return *found->second;
    }

    // Records in all orders that a reader missed a key and the count - 1 after it.
    void missed(uint64_t key_hash, int64_t count) {
        for (Map* orders : {&copies_, &own_}) {
            for (const auto& each : *orders) {
                each.second->missed(key_hash, count);
            }
        }
    }

    // The orders of one class, copies first.
    std::vector<Order*> of_slot(uint32_t slot) {
        std::vector<Order*> found;
        for (auto* orders : {&copies_, &own_}) {
            if (auto at = orders->find(slot); at != orders->end()) {
                found.push_back(at->second.get());
            }
        }
        return found;
    }

    std::vector<Order*> copies() { return heaviest_first(copies_); }

    // All orders, copies first.
    std::vector<Order*> every() {
        std::vector<Order*> found = heaviest_first(copies_);
        for (Order* order : heaviest_first(own_)) {
            found.push_back(order);
        }
        return found;
    }

  private:
    using Map = std::map<uint32_t, std::unique_ptr<Order>>;

    static std::vector<Order*> heaviest_first(const Map& orders) {
        std::vector<std::pair<uint64_t, Order*>> found;
        for (const auto& [slot, order] : orders) {
            found.emplace_back(uint64_t{slot} * order->size(), order.get());
        }
        std::stable_sort(found.begin(), found.end(), [](auto& a, auto& b) { return a.first > b.first; });
        std::vector<Order*> sorted;
        for (const auto& each : found) {
            sorted.push_back(each.second);
        }
        return sorted;
    }

    bool is_lru_;
    Map copies_, own_;
};

}  // namespace pool
