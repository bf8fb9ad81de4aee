// Collects the most likely tokens of a row while the head computes its logits, so that the logits need not be written
// to memory.
//
// Candidates are ordered by descending logit, equal ones by ascending id. This is a total order, so the result does not
// depend on which thread computes which part of the vocabulary, or when.
#pragma once

#include <limits>
#include <vector>

#include "isa/simd.hpp"

namespace kvl {

struct Candidate {
    float value = -std::numeric_limits<float>::infinity();
    int32_t id = 0;
};

inline bool is_before(const Candidate& a, const Candidate& b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id);
}

// The best tops[row] candidates of each of `rows` rows (0 = none). Every thread has lists of its own, so offer() needs
// no lock; merge() must run after all calls of offer().
class Candidates {
  public:
    Candidates(const int32_t* tops, int64_t rows, int32_t max_top, int threads)
        : tops_(tops), rows_(rows), max_top_(max_top), lists_(size_t(threads * rows * max_top)), counts_(size_t(threads * rows)) {}

    // Takes `count` <= kPanel logits of a row, of the tokens first, first + 1, ...; called by `thread`. `logits` must
    // have kPanel elements.
    void offer(int thread, int64_t row, int32_t first, const float* logits, int count) {
        const int32_t capacity = tops_[row];
        Candidate* const list = this->list(thread, row);
        int32_t& held = counts_[size_t(thread * rows_ + row)];
        if (held == capacity && largest(max(load(logits), load(logits + kLanes))) < list[capacity - 1].value) return;
        for (int i = 0; i < count; i++) insert(list, held, capacity, {logits[i], first + i});
    }

    // Merges the threads' lists of one row into values and ids [tops[row]]; if there are fewer candidates, the rest are
    // default ones.
    void merge(int64_t row, float* values, int32_t* ids) const {
        const int threads = int(counts_.size() / size_t(rows_));
        std::vector<int32_t> taken(size_t(threads), 0);
        for (int32_t i = 0; i < tops_[row]; i++) {
            Candidate best;
            int from = -1;
            for (int t = 0; t < threads; t++) {
                if (taken[size_t(t)] == counts_[size_t(t * rows_ + row)]) continue;
                const Candidate& next = list(t, row)[taken[size_t(t)]];
                if (from >= 0 && !is_before(next, best)) continue;
                best = next;
                from = t;
            }
            if (from >= 0) taken[size_t(from)]++;
            values[i] = best.value;
            ids[i] = best.id;
        }
    }

  private:
    Candidate* list(int thread, int64_t row) { return lists_.data() + (thread * rows_ + row) * max_top_; }
    const Candidate* list(int thread, int64_t row) const { return lists_.data() + (thread * rows_ + row) * max_top_; }

    // Inserts into an ordered list of `held` candidates; a full list (capacity) drops its last one.
    static void insert(Candidate* list, int32_t& held, int32_t capacity, const Candidate& candidate) {
        int32_t at = held;
        if (held == capacity && !is_before(candidate, list[--at])) return;
        held = at + 1;
        for (; at > 0 && is_before(candidate, list[at - 1]); at--) list[at] = list[at - 1];
        list[at] = candidate;
    }

    const int32_t* const tops_;
    const int64_t rows_, max_top_;
    std::vector<Candidate> lists_;  // [threads][rows][max_top], each list ordered
    std::vector<int32_t> counts_;   // [threads][rows]
};

}  // namespace kvl
