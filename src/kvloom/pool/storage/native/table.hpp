// The index's data structures: arrays that grow without moving elements, hash tables that grow by one bucket at a time,
// linked lists. No operation touches all elements, so no call takes longer because a pool is large.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace pool {

using Id = uint32_t;
constexpr Id kNone = UINT32_MAX;

// An array in chunks: growing does not move elements, so references stay valid.
template <typename T>
class Chunked {
  public:
    T& operator[](size_t index) { return chunks_[index / kChunk][index % kChunk]; }
    const T& operator[](size_t index) const { return chunks_[index / kChunk][index % kChunk]; }
    void reach(size_t size) {
        while (chunks_.size() * kChunk < size) {
            chunks_.push_back(std::make_unique<T[]>(kChunk));
        }
    }

  private:
    static constexpr size_t kChunk = 4096;
    std::vector<std::unique_ptr<T[]>> chunks_;
};

// Prefetches memory: when done for several uncached addresses before any is read, all arrive in about the time of one.
inline void expect(const void* what) { __builtin_prefetch(what); }

// Records, identified by number; numbers that are given back are reused.
template <typename T>
class Records {
  public:
    T& operator[](Id id) { return records_[id]; }
    const T& operator[](Id id) const { return records_[id]; }

    Id take() {
        if (!free_.empty()) {
            const Id id = free_.back();
            free_.pop_back();
            return id;
        }
        records_.reach(size_ + 1);
        return size_++;
    }

    void give_back(Id id) { free_.push_back(id); }

    void expect(Id id) const {
        const char* record = reinterpret_cast<const char*>(&records_[id]);
        for (size_t at = 0; at < sizeof(T); at += kLine) {
            pool::expect(record + at);
        }
    }

    // Prefetches the free records that are taken next.
    void expect_free(size_t count) const {
        for (size_t i = 0; i < std::min(count, free_.size()); i++) {
            expect(free_[free_.size() - 1 - i]);
        }
    }

  private:
    static constexpr size_t kLine = 64;

    Chunked<T> records_;
    std::vector<Id> free_;
    Id size_ = 0;
};

// Linear hashing (Litwin, 1980) over records with hash() and hash_next: each record beyond the number of buckets splits
// one bucket, so the table is never rehashed as a whole.
template <typename T>
class HashIndex {
  public:
    explicit HashIndex(Records<T>& records) : records_(records) {
        heads_.reach(kFirst);
        for (size_t i = 0; i < kFirst; i++) {
            heads_[i] = kNone;
        }
    }

    size_t size() const { return size_; }

    // Prefetches for a later find(): expect the bucket of a hash; expect_first, once that has arrived, its first
    // record.
    void expect(uint64_t hash) const { pool::expect(&heads_[bucket(hash)]); }
    void expect_first(uint64_t hash) const {
        if (const Id id = heads_[bucket(hash)]; id != kNone) {
            records_.expect(id);
        }
    }

    template <typename Matches>
    Id find(uint64_t hash, Matches matches) const {
        Id id = heads_[bucket(hash)];
        while (id != kNone && !matches(records_[id])) {
            id = records_[id].hash_next;
        }
        return id;
    }

    void add(Id id) {
        push(bucket(records_[id].hash()), id);
        if (++size_ > level_ + split_) {
            split_one();
        }
    }

    void remove(Id id) {
        Id* at = &heads_[bucket(records_[id].hash())];
        while (*at != id) {
            at = &records_[*at].hash_next;
        }
        *at = records_[id].hash_next;
        size_--;
    }

  private:
    static constexpr size_t kFirst = 64;

    size_t bucket(uint64_t hash) const {
        const size_t at = hash & (level_ - 1);
        return at < split_ ? hash & (2 * level_ - 1) : at;
    }

    void push(size_t bucket, Id id) {
        records_[id].hash_next = heads_[bucket];
        heads_[bucket] = id;
    }

    void split_one() {
        heads_.reach(level_ + split_ + 1);
        Id id = heads_[split_];
        heads_[split_] = heads_[level_ + split_] = kNone;
        if (++split_ == level_) {
            level_ *= 2;
            split_ = 0;
        }
        while (id != kNone) {
            const Id next = records_[id].hash_next;
            push(bucket(records_[id].hash()), id);
            id = next;
        }
    }

    Records<T>& records_;
    Chunked<Id> heads_;
    size_t size_ = 0;
    size_t level_ = kFirst;  // a power of two; there are level_ + split_ buckets
    size_t split_ = 0;
};

// A doubly linked list through two members of its records.
template <typename T, Id T::*Prev, Id T::*Next>
class Linked {
  public:
    Id first() const { return first_; }
    size_t size() const { return size_; }

    void push_back(Records<T>& records, Id id) {
        records[id].*Prev = last_;
        records[id].*Next = kNone;
        (last_ == kNone ? first_ : records[last_].*Next) = id;
        last_ = id;
        size_++;
    }

    void remove(Records<T>& records, Id id) {
        const Id before = records[id].*Prev, after = records[id].*Next;
        (before == kNone ? first_ : records[before].*Next) = after;
        (after == kNone ? last_ : records[after].*Prev) = before;
        size_--;
    }

    void move_to_back(Records<T>& records, Id id) {
        remove(records, id);
        push_back(records, id);
    }

  private:
    Id first_ = kNone;
    Id last_ = kNone;
    size_t size_ = 0;
};

}  // namespace pool
