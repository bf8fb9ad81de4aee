// Routing of a mixture of experts: the experts chosen for a row and their weights, and the rows of each expert.
//
// A row's choice depends only on the row itself, and each logit is a sum in one fixed order, so other rows of the step
// do not change it.
#pragma once

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "isa/simd.hpp"

namespace kvl {

constexpr int kMostGroupsOfExperts = 64;
constexpr float kLeastTotal = 1e-20f;  // of the scores of a row's experts: what they are divided by is not smaller
constexpr int kScoreRows = 4;  // rows of the router's weights that share each load of an activation

struct Choice {
    int32_t expert;
    float weight;
};

// logits[ROWS] = router [ROWS][cols] times x[cols].
template <int ROWS>
inline void score_tile(const float* router, const float* x, int64_t cols, float* logits) {
    F32 sums[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) sums[r] = splat(0);
    for (int64_t k = 0; k < cols; k += kLanes) {
        const F32 value = load(x + k);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) sums[r] = fma(load(router + r * cols + k), value, sums[r]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) logits[r] = sum(sums[r]);
}

// logits[count] = router [count][cols] times x[cols].
inline void score(const float* router, const float* x, int64_t cols, int64_t count, float* logits) {
    int64_t e = 0;
    for (; e + kScoreRows <= count; e += kScoreRows) score_tile<kScoreRows>(router + e * cols, x, cols, logits + e);
    for (; e < count; e++) score_tile<1>(router + e * cols, x, cols, logits + e);
}

// Chooses the `count` experts with the largest of logits[num_experts], in descending order, equal ones by ascending
// number, and computes their softmax weights: over the chosen ones (weighs_chosen) or over all. `logits` must have room
// for a multiple of 16 floats, and is overwritten. With NaN the choice is arbitrary but valid.
inline void choose(float* logits, int num_experts, int count, bool weighs_chosen, Choice* out) {
    const float peak = *std::max_element(logits, logits + num_experts);
    float total = 0;
    if (!weighs_chosen) {
        F32 sums = splat(0);
        for (int e = 0; e < num_experts; e += kLanes) {
            const F32 power = exp2(mul(sub(load(logits + e), splat(peak)), splat(kLog2E)));
            sums = add(sums, first_lanes(power, num_experts - e, 0));
        }
        total = sum(sums);
    }
    for (int i = 0; i < count; i++) {
        int best = 0;
        for (int e = 1; e < num_experts; e++)
            if (logits[e] > logits[best]) best = e;
        out[i] = {best, exp2_scalar((logits[best] - peak) * kLog2E)};
        logits[best] = -std::numeric_limits<float>::infinity();
    }
    for (int i = 0; weighs_chosen && i < count; i++) total += out[i].weight;
    for (int i = 0; i < count; i++) out[i].weight /= total;
}

// How experts are chosen by scores: softmax or sigmoid of the logits, plus `correction` for the choice alone. Of `groups`
// of equal size only the `kept_groups` with the largest sums of their `group_best` (1 or 2) largest are chosen from. An expert's weight is
// its score, divided by those of all that are chosen if weighs_chosen, times `scale`.
struct Routing {
    int num_experts, per_token;
    bool weighs_chosen, is_sigmoid;
    int groups, kept_groups;
    float scale;
    int group_best;
    const float* correction;  // [num_experts]; null = none

    // Whether choose() does the same.
    bool is_plain() const { return !is_sigmoid && correction == nullptr && groups == kept_groups && scale == 1; }
};

// Turns logits [num_experts] into scores in place.
inline void to_scores(float* logits, const Routing& routing) {
    const int count = routing.num_experts;
    const F32 one = splat(1), peak = splat(*std::max_element(logits, logits + count));
    F32 sums = splat(0);
    for (int e = 0; e < count; e += kLanes) {
        const F32 logit = load(logits + e);
        const F32 score = routing.is_sigmoid ? div(one, add(one, exp2(mul(logit, splat(-kLog2E)))))
                                             : exp2(mul(sub(logit, peak), splat(kLog2E)));
        store(logits + e, score);
        sums = add(sums, first_lanes(score, count - e, 0));
    }
    const float total = sum(sums);
    for (int e = 0; !routing.is_sigmoid && e < count; e++) logits[e] /= total;
}

// Sets the ranks of all but the kept groups to minus infinity; of equal groups the first ones are kept.
inline void drop_groups(float* ranks, const Routing& routing) {
    const int size = routing.num_experts / routing.groups;
    const auto sum_of = [&](int group) {
        float best = -std::numeric_limits<float>::infinity(), next = best;
        for (int e = group * size; e < (group + 1) * size; e++) {
            next = std::max(next, std::min(best, ranks[e]));
            best = std::max(best, ranks[e]);
        }
        return routing.group_best == 1 ? best : best + next;
    };
    std::array<float, kMostGroupsOfExperts> sums;
    for (int g = 0; g < routing.groups; g++) sums[size_t(g)] = sum_of(g);
    for (int g = 0; g < routing.groups; g++) {
        int better = 0;
        for (int other = 0; other < routing.groups; other++)
            better += sums[size_t(other)] > sums[size_t(g)] || (sums[size_t(other)] == sums[size_t(g)] && other < g);
        if (better >= routing.kept_groups)
            std::fill(ranks + g * size, ranks + (g + 1) * size, -std::numeric_limits<float>::infinity());
    }
}

// Chooses experts as `routing` says, in descending order of rank, equal ones by ascending number. `logits` and `ranks`
// must have room for a multiple of 16 floats, and are overwritten. With NaN the choice is arbitrary but valid.
inline void choose(float* logits, float* ranks, const Routing& routing, Choice* out) {
    to_scores(logits, routing);
    for (int e = 0; e < routing.num_experts; e++) ranks[e] = logits[e] + (routing.correction ? routing.correction[e] : 0);
    if (routing.kept_groups < routing.groups) drop_groups(ranks, routing);
    float total = 0;
    for (int i = 0; i < routing.per_token; i++) {
        const int best = int(std::max_element(ranks, ranks + routing.num_experts) - ranks);
        out[i] = {best, logits[best]};
        total += logits[best];
        ranks[best] = -std::numeric_limits<float>::infinity();
    }
    const float factor = routing.scale / (routing.weighs_chosen ? std::max(total, kLeastTotal) : 1);
    for (int i = 0; i < routing.per_token; i++) out[i].weight *= factor;
}

// The rows of a step, grouped by expert. A slot is one row of one expert; slots [begin[g], begin[g + 1]) belong to
// expert[g], in the rows' order in the step. row, weight: per slot.
struct Groups {
    std::vector<int32_t> expert, begin, row, counts;
    std::vector<float> weight;

    int64_t size() const { return int64_t(expert.size()); }
    int64_t slots() const { return int64_t(row.size()); }
    int64_t count(int64_t g) const { return begin[size_t(g + 1)] - begin[size_t(g)]; }

    // Takes the memory that build() needs for so many slots and experts.
    void reserve(int64_t slots, int64_t num_experts) {
        for (std::vector<int32_t>* of_experts : {&expert, &begin, &counts}) of_experts->reserve(size_t(num_experts) + 1);
        row.reserve(size_t(slots));
        weight.reserve(size_t(slots));
    }
    // Groups the rows by chosen[rows][per_token].
    void build(const Choice* chosen, int64_t rows, int per_token, int num_experts) {
        counts.assign(size_t(num_experts), 0);
        for (int64_t i = 0; i < rows * per_token; i++) counts[size_t(chosen[i].expert)]++;
        expert.clear();
        begin.assign(1, 0);
        for (int e = 0; e < num_experts; e++) {
            const int32_t of_expert = counts[size_t(e)];
            counts[size_t(e)] = begin.back();
            if (of_expert == 0) continue;
            expert.push_back(e);
            begin.push_back(begin.back() + of_expert);
        }
        row.resize(size_t(rows * per_token));
        weight.resize(row.size());
        for (int64_t i = 0; i < rows * per_token; i++) {
            const size_t slot = size_t(counts[size_t(chosen[i].expert)]++);
            row[slot] = int32_t(i / per_token);
            weight[slot] = chosen[i].weight;
        }
    }
};

}  // namespace kvl
