// The most likely tokens of a row, kept while its logits pass by: the head then writes none of them to memory.
//
// Order: larger logit first, of equal ones the smaller id. It is a total order, so the result does not depend on which
// thread has seen which part of the vocabulary, nor when.
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

// The best candidates of `rows` rows, tops[row] of each (0 = none), as each of `threads` threads has met them.
class Candidates {
  public:
    Candidates(const int32_t* tops, int64_t rows, int32_t max_top, int threads)
        : tops_(tops), rows_(rows), max_top_(max_top), lists_(size_t(threads * rows * max_top)), counts_(size_t(threads * rows)) {}

    // `count` <= kPanel logits of tokens first, first + 1, ... of one row, as met by `thread`.
    void offer(int thread, int64_t row, int32_t first, const float* logits, int count) {
        const int32_t capacity = tops_[row];
        Candidate* const list = this->list(thread, row);
        int32_t& held = counts_[size_t(thread * rows_ + row)];
        if (held == capacity && largest(max(load(logits), load(logits + kLanes))) < list[capacity - 1].value) return;
        for (int i = 0; i < count; i++) insert(list, held, capacity, {logits[i], first + i});
    }

    // Merges the threads' lists of one row; what no thread has met is left as a default Candidate.
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

    // Into a list that is in order; the last one falls out of a full list.
    static void insert(Candidate* list, int32_t& held, int32_t capacity, const Candidate& candidate) {
        int32_t at = held;
        if (held == capacity && !is_before(candidate, list[--at])) return;
        held = at + 1;
        for (; at > 0 && is_before(candidate, list[at - 1]); at--) list[at] = list[at - 1];
        list[at] = candidate;
    }

    const int32_t* const tops_;
    const int64_t rows_, max_top_;
    std::vector<Candidate> lists_;  // [threads][rows][max_top], each list in order
    std::vector<int32_t> counts_;   // [threads][rows]
};

}  // namespace kvl
