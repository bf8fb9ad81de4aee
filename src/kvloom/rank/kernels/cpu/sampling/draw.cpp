// Draws a random token from one row of logits by temperature, top-p and min-p.
//
// A token's weight is e^((logit - largest logit) / temperature), so it is in [0, 1]. A first pass keeps only the sum
// and the largest weight of each block of tokens. Afterwards the weights of a few blocks are computed again: of the
// block with the drawn token; or, for top-p and min-p, of blocks whose largest weight is large enough, whose tokens are
// then sorted.
#include "sampling/draw.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "isa/simd.hpp"
#include "runtime/memory.hpp"

namespace kvl {
namespace {

constexpr int kBlock = 64;  // tokens of a block: 4 vectors
// For top-p, tokens of at least kFirstShare of the largest weight are gathered first; while their sum is too small,
// that limit is multiplied by kNextShare.
constexpr float kFirstShare = 1 / 8.0f;
constexpr float kNextShare = 1 / 16.0f;
constexpr size_t kFewTokens = 512;  // so few are sorted by comparing them
constexpr int kDigitBits = 11;      // of a digit of the others' weights

struct Block {
    float sum, largest;
};

// A row of logits in whole blocks: the last block is padded with masked logits.
class BlockedRow {
  public:
    BlockedRow(const float* logits, int64_t count) : logits_(logits), count_(count), num_whole_(count / kBlock) {
        std::copy(logits + num_whole_ * kBlock, logits + count, last_);
        std::fill(last_ + count % kBlock, last_ + kBlock, kMasked);
    }
    int64_t count() const { return count_; }
    int64_t num_blocks() const { return (count_ + kBlock - 1) / kBlock; }
    const float* block(int64_t b) const { return b < num_whole_ ? logits_ + b * kBlock : last_; }

  private:
    const float* const logits_;
    const int64_t count_, num_whole_;
    alignas(64) float last_[kBlock];
};

struct Weights {
    const BlockedRow& row;
    F32 peak, factor;  // largest logit; factor that converts logits to powers of 2: log2(e) / temperature
    std::vector<Block> blocks;
    double total = 0;

    F32 of(F32 logits) const {
        const F32 power = mul(sub(logits, peak), factor);
        return zero_where_masked(exp2(power), power);  // a logit of -inf gets weight 0
    }
    // Computes the weights of block `b` into to[kBlock]; 0 after the last token.
    void make(int64_t b, float* to) const {
        for (int i = 0; i < kBlock; i += kLanes) store(to + i, of(load(row.block(b) + i)));
        const int64_t end = std::min<int64_t>(kBlock, row.count() - b * kBlock);
        std::fill(to + end, to + kBlock, 0.0f);
    }
};

Weights weigh(const BlockedRow& row, float temperature) {
    F32 peak = splat(kMasked);
    for (int64_t b = 0; b < row.num_blocks(); b++)
        for (int i = 0; i < kBlock; i += kLanes) peak = max(peak, load(row.block(b) + i));
    Weights weights{row, splat(largest(peak)), splat(kLog2E / temperature), {}, 0};
    weights.blocks.reserve(size_t(row.num_blocks()));
    for (int64_t b = 0; b < row.num_blocks(); b++) {
        F32 total = splat(0), top = splat(0);
        for (int i = 0; i < kBlock; i += kLanes) {
            const F32 weight = weights.of(load(row.block(b) + i));
            total = add(total, weight);
            top = max(top, weight);
        }
        weights.blocks.push_back({sum(total), largest(top)});
        weights.total += double(weights.blocks.back().sum);
    }
    return weights;
}

// The token at `point` of the total weight, in the order of the vocabulary. Tokens of weight 0 are never chosen.
int32_t pick(const Weights& weights, double point) {
    alignas(64) float of[kBlock];
    double left = point * weights.total;
    for (size_t b = 0; b < weights.blocks.size(); b++) {
        if (left >= double(weights.blocks[b].sum)) {
            left -= double(weights.blocks[b].sum);
            continue;
        }
        weights.make(int64_t(b), of);
        for (int32_t i = 0; i < kBlock; i++) {
            if (left < double(of[i])) return int32_t(b) * kBlock + i;
            left -= double(of[i]);
        }
    }
    for (int64_t b = weights.row.num_blocks() - 1; b >= 0; b--) {  // rounding left a remainder: the last possible token
        weights.make(b, of);
        for (int32_t i = kBlock - 1; i >= 0; i--)
            if (!(of[i] <= 0)) return int32_t(b) * kBlock + i;
    }
    return 0;  // no weight at all: every logit is -inf or none is a number
}

struct Token {
    float weight;
    int32_t id;
};

// Collects the tokens of weight at least `least` (and above 0); returns the sum of their weights.
double gather(const Weights& weights, float least, std::vector<Token>& tokens) {
    alignas(64) float of[kBlock];
    double total = 0;
    tokens.clear();
    for (size_t b = 0; b < weights.blocks.size(); b++) {
        if (weights.blocks[b].largest < least) continue;
        weights.make(int64_t(b), of);
        for (int32_t i = 0; i < kBlock; i++) {
            if (of[i] < least || of[i] <= 0) continue;
            tokens.push_back({of[i], int32_t(b) * kBlock + i});
            total += double(of[i]);
        }
    }
    return total;
}

// Sorts by weight, the largest first; `tokens` come in the order of their ids, and those of equal weight stay so. A flat
// distribution leaves all of the vocabulary to be sorted, so many are sorted by the bits of their weights, which are not
// negative, a digit at a time from the last one on.
void sort_by_weight(std::vector<Token>& tokens) {
    if (tokens.size() <= kFewTokens) {
        std::sort(tokens.begin(), tokens.end(),
                  [](const Token& a, const Token& b) { return a.weight > b.weight || (a.weight == b.weight && a.id < b.id); });
        return;
    }
    std::vector<Token> sorted(tokens.size());
    for (int shift = 0; shift < 32; shift += kDigitBits) {
        const auto digit = [shift](const Token& token) {
            uint32_t bits;
            std::memcpy(&bits, &token.weight, 4);
            return ~bits >> shift & ((1u << kDigitBits) - 1);
        };
        std::array<uint32_t, (1u << kDigitBits) + 1> begin{};  // of the tokens with each digit
        for (const Token& token : tokens) begin[digit(token) + 1]++;
        for (size_t i = 1; i < begin.size(); i++) begin[i] += begin[i - 1];
        for (const Token& token : tokens) sorted[begin[digit(token)]++] = token;
        tokens.swap(sorted);
    }
}

// The token at `point` of the kept weight: kept are the most likely tokens that together reach top_p of the total, and
// of these the ones with at least min_p of the largest weight.
int32_t pick_likely(const Weights& weights, float top_p, float min_p, double point) {
    const double wanted = double(top_p) * weights.total;
    std::vector<Token> tokens;
    float least = top_p < 1 ? std::max(kFirstShare, min_p) : min_p;
    while (gather(weights, least, tokens) < wanted && least > min_p)
        least = least < 1e-30f ? min_p : std::max(min_p, least * kNextShare);
    sort_by_weight(tokens);
    double kept = 0;
    size_t count = 0;
    for (; count < tokens.size() && (top_p >= 1 || count == 0 || kept < wanted); count++) kept += double(tokens[count].weight);
    double left = point * kept;
    for (size_t i = 0; i < count; i++) {
        if (left < double(tokens[i].weight) || i + 1 == count) return tokens[i].id;
        left -= double(tokens[i].weight);
    }
    return 0;  // no weight at all: every logit is -inf or none is a number
}

// The upper 64 bits of the product of two 64-bit integers.
uint64_t high_half(uint64_t a, uint64_t b) {
    const uint64_t a0 = uint32_t(a), a1 = a >> 32, b0 = uint32_t(b), b1 = b >> 32;
    const uint64_t middle = a1 * b0 + (a0 * b0 >> 32), other = a0 * b1 + uint32_t(middle);
    return a1 * b1 + (middle >> 32) + (other >> 32);
}

}  // namespace

int32_t draw(const float* logits, int64_t count, const kvl_draw_rules& rules) {
    const BlockedRow row(logits, count);
    const Weights weights = weigh(row, rules.temperature);
    if (rules.top_p >= 1 && rules.min_p <= 0) return pick(weights, rules.point);
    return pick_likely(weights, rules.top_p, rules.min_p, rules.point);
}

double uniform(uint64_t seed, uint64_t position) {
    uint64_t at[4] = {position + 1, position + 1 == 0, 0, 0}, key[2] = {seed, 0};
    for (int round = 0; round < 10; round++) {
        const uint64_t m0 = 0xD2E7470EE14C6C93, m1 = 0xCA5A826395121157;
        const uint64_t high0 = high_half(m0, at[0]), low0 = m0 * at[0], high1 = high_half(m1, at[2]), low1 = m1 * at[2];
        at[0] = high1 ^ at[1] ^ key[0];
        at[1] = low1;
        at[2] = high0 ^ at[3] ^ key[1];
        at[3] = low0;
        key[0] += 0x9E3779B97F4A7C15;
        key[1] += 0xBB67AE8584CAA73B;
    }
    return double(at[0] >> 11) * 0x1p-53;
}

}  // namespace kvl

int32_t kvl_draw(const float* logits, int64_t count, const kvl_draw_rules* rules) {
    const kvl::TinyIsZero tiny;  // as in the threads of a step
    return kvl::or_out_of_memory([=] { return kvl::draw(logits, count, *rules); });
}

double kvl_uniform(uint64_t seed, uint64_t position) { return kvl::uniform(seed, position); }
