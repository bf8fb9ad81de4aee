// A random token of one row of logits by temperature, top-p and min-p.
//
// Weights are relative to the largest, so they are in (0, 1]. They are summed block by block; blocks whose largest weight
// is too small are skipped when the heaviest tokens are gathered, and only those are sorted.
#include <algorithm>
#include <atomic>
#include <vector>

#include "model.hpp"
#include "simd.hpp"

namespace kvl {
namespace {

constexpr int kBlock = 64;               // weights whose sum and largest are kept: 4 registers
constexpr float kFirstShare = 1 / 8.0f;  // tokens at least so likely, beside the likeliest, are looked at first
constexpr int kAlone = 2;                // rows that are drawn sooner than another thread is woken
constexpr float kNextShare = 1 / 16.0f;  // and this much less likely ones each time they are not enough

struct Block {
    float sum, largest;
};

struct Weights {
    float* of;  // [count], padded to whole blocks with 0
    int64_t count;
    std::vector<Block> blocks;
    double total = 0;
};

// One block of weights of logits that are at most `peak`, in place of those logits.
Block weigh_block(float* at, F32 peak, F32 factor) {
    F32 total = splat(0), top = splat(0);
    for (int i = 0; i < kBlock; i += kLanes) {
        const F32 power = mul(sub(load(at + i), peak), factor);
        const F32 weight = zero_where_masked(exp2(power), power);  // -inf stays impossible
        store(at + i, weight);
        total = add(total, weight);
        top = max(top, weight);
    }
    return {sum(total), largest(top)};
}

Weights weigh(const float* logits, int64_t count, float temperature, float* scratch) {
    const int64_t padded = round_up(count, kBlock);
    std::copy(logits, logits + count, scratch);
    std::fill(scratch + count, scratch + padded, kMasked);
    F32 peak = splat(kMasked);
    for (int64_t i = 0; i < padded; i += kLanes) peak = max(peak, load(scratch + i));
    peak = splat(largest(peak));
    Weights weights{scratch, count, {}, 0};
    weights.blocks.reserve(size_t(padded / kBlock));
    for (int64_t i = 0; i < padded; i += kBlock) {
        weights.blocks.push_back(weigh_block(scratch + i, peak, splat(kLog2E / temperature)));
        weights.total += double(weights.blocks.back().sum);
    }
    std::fill(scratch + count, scratch + padded, 0.0f);
    return weights;
}

// The token at `point` of the total, in the order of the vocabulary. A token of weight 0 is never it.
int32_t pick(const Weights& weights, double point) {
    double left = point * weights.total;
    for (size_t b = 0; b < weights.blocks.size(); b++) {
        if (left >= double(weights.blocks[b].sum)) {
            left -= double(weights.blocks[b].sum);
            continue;
        }
        for (int32_t i = int32_t(b) * kBlock, end = i + kBlock; i < end; i++) {
            if (left < double(weights.of[i])) return i;
            left -= double(weights.of[i]);
        }
    }
    int64_t last = weights.count - 1;  // rounding has left something over
    while (last > 0 && weights.of[last] <= 0) last--;
    return int32_t(last);
}

struct Token {
    float weight;
    int32_t id;
};

// Tokens of weight at least `least`; returns the sum of their weights.
double gather(const Weights& weights, float least, std::vector<Token>& tokens) {
    double total = 0;
    tokens.clear();
    for (size_t b = 0; b < weights.blocks.size(); b++) {
        if (weights.blocks[b].largest < least) continue;
        for (int32_t i = int32_t(b) * kBlock, end = i + kBlock; i < end; i++) {
            if (weights.of[i] < least || weights.of[i] <= 0) continue;
            tokens.push_back({weights.of[i], i});
            total += double(weights.of[i]);
        }
    }
    return total;
}

// The token at `point` of the likeliest that make up top_p of the total and are at least min_p as likely as the first.
int32_t pick_likely(const Weights& weights, float top_p, float min_p, double point) {
    const double wanted = double(top_p) * weights.total;
    std::vector<Token> tokens;
    float least = top_p < 1 ? std::max(kFirstShare, min_p) : min_p;
    while (gather(weights, least, tokens) < wanted && least > min_p)
        least = least < 1e-30f ? min_p : std::max(min_p, least * kNextShare);
    std::sort(tokens.begin(), tokens.end(),
              [](const Token& a, const Token& b) { return a.weight > b.weight || (a.weight == b.weight && a.id < b.id); });
    double kept = 0;
    size_t count = 0;
    for (; count < tokens.size() && (top_p >= 1 || kept < wanted); count++) kept += double(tokens[count].weight);
    double left = point * kept;
    for (size_t i = 0; i < count; i++) {
        if (left < double(tokens[i].weight) || i + 1 == count) return tokens[i].id;
        left -= double(tokens[i].weight);
    }
    return 0;  // no weight at all: every logit is -inf or none is a number
}

}  // namespace
}  // namespace kvl

int32_t kvl_draw(const float* logits, int64_t count, const kvl_draw_rules* rules, float* scratch) {
    const kvl::TinyIsZero tiny;  // as for rows that a step's threads draw
    const kvl::Weights weights = kvl::weigh(logits, count, rules->temperature, scratch);
    if (rules->top_p >= 1 && rules->min_p <= 0) return kvl::pick(weights, rules->point);
    return kvl::pick_likely(weights, rules->top_p, rules->min_p, rules->point);
}

void kvl_draw_rows(kvl_model* model, const float* logits, int64_t count, const int32_t* rows, const kvl_draw_rules* rules,
                   int32_t num_rows, float* scratch, int32_t* tokens) {
    std::atomic<int32_t> next{0};
    const auto draw_some = [&](int thread) {
        float* own = scratch + thread * kvl::round_up(count, kvl::kBlock);
        for (int32_t i = next.fetch_add(1); i < num_rows; i = next.fetch_add(1))
            tokens[i] = kvl_draw(logits + rows[i] * count, count, &rules[i], own);
    };
    if (num_rows <= kvl::kAlone)
        draw_some(0);
    else
        model->pool.run(draw_some);
}
