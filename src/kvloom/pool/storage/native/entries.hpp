// The index entry of a published block, and a bounded memory of keys of removed blocks.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "sums.hpp"
#include "table.hpp"

namespace pool {

using ems::Sum;
using Key = std::array<uint8_t, 32>;

// A seeded hash, so that a client cannot choose keys that all fall into one bucket.
inline uint64_t hash_of(const Key& key, uint64_t seed) {
    uint64_t hash = seed;
    for (size_t i = 0; i < key.size(); i += 8) {
        uint64_t word;
        std::memcpy(&word, key.data() + i, sizeof word);
        hash = (hash ^ word) * 0x9E3779B97F4A7C15ULL;
        hash ^= hash >> 32;
    }
    return hash;
}

// The entry of a block; the reference is entries.py. 128 bytes; with its share of the tables a block takes about 150.
struct Entry {
    Key key;
    Sum sum;
    uint64_t key_hash;
    uint64_t offset;
    uint64_t used_at;  // time of the last use: bytes that the tenant had saved by then
    uint64_t born : 56;  // number of the publication: distinguishes blocks that have the same id one after the other
    uint64_t uses : 2;
    uint64_t is_small : 1;  // whether it is in the small queue of its order
    uint64_t is_rcache : 1;
    uint64_t is_live : 1;
    uint64_t is_spoiled : 1;
    uint64_t is_home : 1;
    uint32_t length;
    uint32_t slot;  // bytes of memory that it occupies: its size class
    uint32_t pins;
    Id hash_next;
    Id parent;
    Id first_child;
    Id prev_sibling;  // of the first child: the last one
    Id next_sibling;
    Id prev_in_queue;
    Id next_in_queue;
    Id prev_on_shelf;
    Id next_on_shelf;

    uint64_t hash() const { return key_hash; }
};
static_assert(sizeof(Entry) == 128, "what a block costs is stated in docs/ems.md");

using Entries = Records<Entry>;
using Queue = Linked<Entry, &Entry::prev_in_queue, &Entry::next_in_queue>;
using Shelf = Linked<Entry, &Entry::prev_on_shelf, &Entry::next_on_shelf>;

// Keys in order of insertion, each with a small number; only the keys' hashes are stored.
class Remembered {
  public:
    Remembered() : index_(records_) {}

    size_t size() const { return list_.size(); }

    // See HashIndex.
    void expect(uint64_t hash) const { index_.expect(hash); }
    void expect_first(uint64_t hash) const { index_.expect_first(hash); }

    void put(uint64_t hash, uint8_t value) {
        Id id = find(hash);
        if (id == kNone) {
            id = records_.take();
            records_[id].key_hash = hash;
            list_.push_back(records_, id);
            index_.add(id);
        }
        records_[id].value = value;
    }

    // The number of a key; `otherwise` if the key is not stored.
    uint8_t get(uint64_t hash, uint8_t otherwise) const {
        const Id id = find(hash);
        return id == kNone ? otherwise : records_[id].value;
    }

    bool remove(uint64_t hash) {
        const Id id = find(hash);
        if (id != kNone) {
            drop(id);
        }
        return id != kNone;
    }

    void shrink_to(size_t limit) {
        while (size() > limit) {
            drop(list_.first());
        }
    }

  private:
    struct Node {
        uint64_t key_hash;
        Id hash_next, prev, next;
        uint8_t value;
        uint64_t hash() const { return key_hash; }
    };

    Id find(uint64_t hash) const {
        return index_.find(hash, [&](const Node& node) { return node.key_hash == hash; });
    }

    void drop(Id id) {
        index_.remove(id);
        list_.remove(records_, id);
        records_.give_back(id);
    }

    Records<Node> records_;
    HashIndex<Node> index_;
    Linked<Node, &Node::prev, &Node::next> list_;
};

}  // namespace pool
