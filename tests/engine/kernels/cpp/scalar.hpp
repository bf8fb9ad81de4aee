// Scalar references of the kernels: plain loops over the same packed data, to which tests compare every kernel.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "activations/quant.hpp"
#include "attention/attention.hpp"
#include "experts/experts.hpp"
#include "lora/lora.hpp"

namespace kvl::scalar {

// The number of weight k of a group of 32 of channel c: bit by bit, as layout.hpp lists them.
inline int number_at(const uint8_t* group, int bits, int k, int c) {
    const int lane = c * 4 + k % 4, row = kPanel * 4, quad = k / 4;
    const auto bit_of = [&](int plane, int bit) { return group[plane * row + lane] >> bit & 1; };
    const auto two_of = [&] { return bit_of(k / kRun, quad % 4 * 2) | bit_of(k / kRun, quad % 4 * 2 + 1) << 1; };
    const auto nibble_behind = [&](int planes) { return group[planes * row + quad / 2 * row + lane] >> quad % 2 * 4 & 15; };
    switch (bits) {
        case 1: return bit_of(0, quad);
        case 2: return two_of();
        case 3: return two_of() | bit_of(2, quad) << 2;
        case 4: return nibble_behind(0);
        case 5: return nibble_behind(1) | bit_of(0, quad) << 4;
        case 6: return nibble_behind(2) | two_of() << 4;
        default: return group[quad * row + lane];
    }
}

// The number of weight k of a block of channel c, where weights are points of a grid, as layout.hpp lists it.
inline int point_number_at(const uint8_t* block, int format, int k, int c) {
    const GridShape grid = grid_of(format);
    const int point = k / 8, bits = grid.bits + grid.has_move - 8;
    const uint8_t* uppers = block + 64 + (has_runs(format) ? 8 : 4) * kPanel;
    const uint8_t* group = uppers + 4 * bits * kPanel + k / 32 * (4 * kPanel + (grid.has_move ? 0 : kPanel * 4));
    int index = group[point % 4 * kPanel + c];
    for (int bit = 0; bit < bits; bit++) index |= (uppers[(point * bits + bit) / 8 * kPanel + c] >> (point * bits + bit) % 8 & 1) << (8 + bit);
    const int size = grid.points[index % (1 << grid.bits)] >> k % 8 * 2 & 3;
    if (grid.has_move) return size | (index >> grid.bits) << 2;
    return size | (group[4 * kPanel + c * 4 + k % 4] >> k % 32 / 4 & 1) << 2;
}

// The small integers of a super-block, behind its factors: those of group g, or of run r, of channel c.
inline int pair_at(const uint8_t* at, int group, int which, int c) {
    const int upper = at[256 + group / 4 * 64 + group % 2 * 32 + c] >> (group % 4 / 2 * 4 + which * 2) & 3;
    return (at[group * 32 + c] >> which * 4 & 15) + 16 * upper;
}

// Weight k of channel c of a packed panel, dequantised.
inline float weight_at(const uint8_t* panel, int format, int64_t k, int c) {
    const uint8_t* block = panel + head_bytes(format) + k / block_size(format) * block_bytes(format);
    const int at = int(k % block_size(format)), in_group = at % group_size(format), group = at / kFileGroup, run = at / kRun;
    const auto half = [&](int row) { return fp16_to_float(reinterpret_cast<const uint16_t*>(block)[row * kPanel + c]); };
    if (format == KVL_BF16) return bf16_to_float(reinterpret_cast<const uint16_t*>(block)[bf16_offset(in_group, c)]);
    const uint8_t* numbers = block + front_bytes(format) + at / group_size(format) * group_bytes(format);
    const int number = has_grid(format) ? point_number_at(block, format, at, c) : number_at(numbers, number_bits(format), in_group, c);
    if (scaling_of(format) == Scaling::kOdd) {
        const int part = has_runs(format) ? run : group, step = block[64 + part / 2 * kPanel + c] >> part % 2 * 4 & 15;
        return float(table_of(format)[number]) * (half(0) * float(2 * step + 1) * unit_of(format));
    }
    if (has_table(format)) return float(table_of(format)[number]) * half(has_runs(format) ? run : 0);
    const uint8_t *behind_one = block + 64, *behind_two = block + 128;
    switch (format) {
        case KVL_INT8_CHANNEL: return float(number - 128) * reinterpret_cast<const float*>(panel)[c];
        case KVL_INT8:
        case KVL_INT8_32: return float(number - 128) * half(0);
        case KVL_INT8_MIN: return float(number - 128) * half(0) + half(1);
        case KVL_INT1: return float(2 * number - 1) * half(0);
        case KVL_INT2:
        case KVL_INT2_256: return float(number - 1) * half(0);
        case KVL_INT2_K: return float(number) * (half(0) * float(behind_two[run * 32 + c] & 15)) + half(1) * float(behind_two[run * 32 + c] >> 4);
        case KVL_INT3_K: return float(number - 4) * (half(0) * float(pair_at(behind_one, group, run % 2, c) - 32));
        case KVL_INT4_K:
        case KVL_INT5_K: return float(number) * (half(0) * float(pair_at(behind_two, group, 0, c))) + half(1) * float(pair_at(behind_two, group, 1, c));
        case KVL_INT6_K: return float(number - 32) * (half(0) * float(int8_t(behind_one[run * 32 + c])));
        default: return float(number) * half(0) + half(1);
    }
}

// Activation k of a row, dequantised.
inline float activation_at(const Activations& x, int64_t row, int64_t cols, int format, int64_t k) {
    if (format == KVL_BF16) return bf16_to_float(reinterpret_cast<const uint16_t*>(x.data)[row * cols + k]);
    const int64_t scales = num_scales(format, cols);
    return float(x.data[row * cols + k]) * x.scale[row * scales + (is_whole(format) ? 0 : k / group_size(format))];
}

// The dot product of one row and one channel.
inline double dot(const Activations& x, int64_t row, int64_t cols, int format, const uint8_t* panel, int c) {
    double total = 0;
    for (int64_t k = 0; k < cols; k++)
        total += double(activation_at(x, row, cols, format, k)) * double(weight_at(panel, format, k, c));
    return total;
}

// The dot product with bf16 weights in the order of the tile unit, bit by bit: products of the first elements of a
// stretch's pairs are one chain, those of the second elements another, and their sum is added to that of earlier
// stretches.
inline float dot_in_order(const Activations& x, int64_t row, int64_t cols, const uint8_t* panel, int c) {
    float total = 0;
    for (int64_t k = 0; k < cols; k += kFileGroup) {
        float halves[2] = {};
        for (int64_t i = k; i < k + kFileGroup; i++)
            halves[i % 2] = std::fma(activation_at(x, row, cols, KVL_BF16, i), weight_at(panel, KVL_BF16, i, c), halves[i % 2]);
        total += halves[0] + halves[1];
    }
    return total;
}

// The dot product with bf16 weights in the order of vdpbf16ps, bit by bit: one chain, to which each pair adds its
// second product, then its first.
inline float dot_in_pairs(const Activations& x, int64_t row, int64_t cols, const uint8_t* panel, int c) {
    float total = 0;
    for (int64_t k = 0; k < cols; k += 2)
        for (int64_t i : {k + 1, k}) total = std::fma(activation_at(x, row, cols, KVL_BF16, i), weight_at(panel, KVL_BF16, i, c), total);
    return total;
}

// Dequantised elements of a module: A at rank r and column k; B at rank r of the channel in `lane` of a half panel.
inline float a_at(const LoraPart& part, const LoraInput& input, int64_t r, int64_t k) {
    const uint8_t* tile = part.a + r / kLanes * input.tile_bytes();
    const int64_t lane = r % kLanes;
    const float scale = reinterpret_cast<const float*>(tile)[lane];
    tile += kLanes * 4;
    if (input.is_bf16()) return bf16_to_float(reinterpret_cast<const uint16_t*>(tile)[k / 2 * 32 + 2 * lane + k % 2]) * scale;
    return float(int(tile[k / 4 * 64 + 4 * lane + k % 4]) - 128) * scale;
}
inline float b_at(const uint8_t* half, bool is_bf16, int64_t r, int64_t lane) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(half);
    if (is_bf16) return bf16_to_float(halves[r * kLanes + lane]);
    return float(int(half[32 + r / 4 * 64 + 4 * lane + r % 4]) - 128) * bf16_to_float(halves[lane]);
}

// What an adapter adds to a channel of a row, and the largest error that rounding h to int8 can cause.
struct LowRankSum {
    double value = 0, most_off = 0;
};
inline LowRankSum low_rank(const LoraLinear& linear, const LoraInput& input, int64_t row, int64_t c) {
    LowRankSum total;
    for (const LoraPart& part : linear.parts) {
        const uint8_t* half = part.half(c / kLanes);
        double peak = 0, sizes = 0;
        for (int64_t r = 0; half != nullptr && r < part.ranks; r++) {
            double h = 0;
            for (int64_t k = 0; k < input.cols; k++)
                h += double(a_at(part, input, r, k)) * double(activation_at(input.x, row, input.cols, input.format, k));
            const double b = double(b_at(half, linear.is_bf16, r, c % kLanes));
            total.value += h * b;
            peak = std::max(peak, std::fabs(h));
            sizes += std::fabs(b);
        }
        total.most_off += linear.is_bf16 ? 0 : peak / 127 / 2 * sizes;
    }
    return total;
}

inline void rms_norm(const float* x, const float* weight, int64_t real, float eps, float* out) {
    double squares = 0;
    for (int64_t k = 0; k < real; k++) squares += double(x[k]) * double(x[k]);
    const double factor = 1.0 / std::sqrt(squares / double(real) + double(eps));
    for (int64_t k = 0; k < real; k++) out[k] = float(double(x[k]) * factor * double(weight[k]));
}

inline void layer_norm(const float* x, const float* weight, const float* bias, int64_t real, float eps, float* out) {
    double total = 0, squares = 0;
    for (int64_t k = 0; k < real; k++) total += double(x[k]);
    const double mean = total / double(real);
    for (int64_t k = 0; k < real; k++) squares += (double(x[k]) - mean) * (double(x[k]) - mean);
    const double factor = 1.0 / std::sqrt(squares / double(real) + double(eps));
    for (int64_t k = 0; k < real; k++) out[k] = float((double(x[k]) - mean) * factor * double(weight[k]) + double(bias[k]));
}

// The largest error of int8 quantisation: half a step of the group's scale.
inline float half_step(const float* x, int64_t k, int group) {
    const float* first = x + k / group * group;
    float peak = 0;
    for (int i = 0; i < group; i++) peak = std::max(peak, std::fabs(first[i]));
    return peak / 127.0f / 2;
}

inline void rotate(float* head, const float* table, int dim) {
    for (int i = 0; i < dim / 2; i++) {
        const float a = head[i], b = head[dim / 2 + i], cosine = table[i], sine = table[dim / 2 + i];
        head[i] = a * cosine - b * sine;
        head[dim / 2 + i] = b * cosine + a * sine;
    }
}

// Element `index` of a cached tile, dequantised; it belongs to token `slot` of the block.
inline float tile_at(const uint8_t* tile, int kv_format, int64_t index, int64_t slot) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(tile);
    if (kv_format == KVL_KV_BF16) return bf16_to_float(halves[index]);
    return float(reinterpret_cast<const int8_t*>(tile)[kBlockTokens * 2 + index]) * fp16_to_float(halves[slot]);
}

inline float key_at(const PagedHead& head, int kv_format, int64_t key, int d) {
    const int64_t slot = key % kBlockTokens;
    return tile_at(head.key_tile(key / kBlockTokens), kv_format, (d / 2 * kBlockTokens + slot) * 2 + d % 2, slot);
}

inline float value_at(const PagedHead& head, int kv_format, int64_t key, int d) {
    if (head.is_shared) return key_at(head, kv_format, key, d);
    const int64_t slot = key % kBlockTokens;
    return tile_at(head.value_tile(key / kBlockTokens), kv_format, (slot / 2 * head.value_dim + d) * 2 + slot % 2, slot);
}

inline float query_at(const Query& query, int kv_format, int d) {
    return (kv_format == KVL_KV_BF16 ? bf16_to_float(query.as<uint16_t>()[d]) : float(query.as<int16_t>()[d])) * query.scale;
}

// Softmax attention of one query over the keys that it sees; out[value_dim].
inline void attend(const PagedHead& head, int kv_format, const Query& query, double* out) {
    std::vector<double> scores;
    for (int64_t key = query.from; key < query.until; key++) {
        double score = 0;
        for (int d = 0; d < head.key_dim; d++)
            score += double(query_at(query, kv_format, d)) * double(key_at(head, kv_format, key, d));
        if (head.softcap > 0) score = double(head.softcap) * std::tanh(score / double(head.softcap));
        scores.push_back(score);
    }
    const double peak = *std::max_element(scores.begin(), scores.end());
    double weight = 0;
    std::fill(out, out + head.value_dim, 0.0);
    for (size_t i = 0; i < scores.size(); i++) {
        const double p = std::exp2(scores[i] - peak);
        weight += p;
        for (int d = 0; d < head.value_dim; d++)
            out[d] += p * double(value_at(head, kv_format, query.from + int64_t(i), d));
    }
    for (int d = 0; d < head.value_dim; d++) out[d] /= weight;
}

// See clamped_gate in activations/gates.hpp.
inline double clamped_gate(double gate, double up, double limit, double alpha) {
    gate = std::min(gate, limit);
    return gate / (1 + std::exp(-alpha * gate)) * (std::clamp(up, -limit, limit) + 1);
}

// The experts of a row and their weights, by definition: sorts all logits, adds all weights.
inline std::vector<Choice> choose(const std::vector<float>& logits, int count, bool weighs_chosen) {
    std::vector<int32_t> ids(logits.size());
    std::iota(ids.begin(), ids.end(), 0);
    std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return logits[size_t(a)] > logits[size_t(b)]; });
    double total = 0;
    for (size_t i = 0; i < (weighs_chosen ? size_t(count) : ids.size()); i++) total += std::exp(double(logits[size_t(ids[i])]));
    std::vector<Choice> found;
    for (int i = 0; i < count; i++) found.push_back({ids[size_t(i)], float(std::exp(double(logits[size_t(ids[size_t(i)])])) / total)});
    return found;
}

// The experts of a row and their weights as `routing` says, by definition.
inline std::vector<Choice> choose(const std::vector<float>& logits, const Routing& routing) {
    std::vector<double> scores, ranks;
    double all = 0;
    for (float logit : logits) all += std::exp(double(logit));
    for (float logit : logits) scores.push_back(routing.is_sigmoid ? 1 / (1 + std::exp(-double(logit))) : std::exp(double(logit)) / all);
    for (size_t e = 0; e < scores.size(); e++) ranks.push_back(scores[e] + (routing.correction ? double(routing.correction[e]) : 0));
    const size_t size = scores.size() / size_t(routing.groups);
    std::vector<std::pair<double, size_t>> groups;  // sums, negative so that the largest come first
    for (size_t g = 0; g < size_t(routing.groups); g++) {
        std::vector<double> own(ranks.begin() + int64_t(g * size), ranks.begin() + int64_t((g + 1) * size));
        std::sort(own.begin(), own.end(), std::greater<>());
        groups.push_back({-own[0] - (size > 1 && routing.group_best == 2 ? own[1] : 0), g});
    }
    std::sort(groups.begin(), groups.end());
    std::vector<int32_t> ids;
    for (int i = 0; i < routing.kept_groups; i++)
        for (size_t e = 0; e < size; e++) ids.push_back(int32_t(groups[size_t(i)].second * size + e));
    std::sort(ids.begin(), ids.end());
    std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return ranks[size_t(a)] > ranks[size_t(b)]; });
    double total = 0;
    for (int i = 0; i < routing.per_token; i++) total += scores[size_t(ids[size_t(i)])];
    std::vector<Choice> found;
    for (int i = 0; i < routing.per_token; i++)
        found.push_back({ids[size_t(i)], float(double(routing.scale) * scores[size_t(ids[size_t(i)])] / (routing.weighs_chosen ? total : 1))});
    return found;
}

// The token that `point` falls on, by definition: sorts all tokens, adds all weights.
inline int32_t draw(const std::vector<float>& logits, const kvl_draw_rules& rules) {
    std::vector<int32_t> ids(logits.size());
    std::iota(ids.begin(), ids.end(), 0);
    const double peak = double(*std::max_element(logits.begin(), logits.end()));
    std::vector<double> weights;
    for (float logit : logits) weights.push_back(std::exp((double(logit) - peak) / double(rules.temperature)));
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    const auto weight = [&](int32_t id) { return weights[size_t(id)]; };
    if (rules.top_p < 1 || rules.min_p > 0)
        std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return weight(a) > weight(b); });
    double before = 0, kept = 0;
    for (int32_t id : ids) {
        if ((rules.top_p < 1 && before >= double(rules.top_p) * total) || weight(id) < double(rules.min_p)) weights[size_t(id)] = 0;
        before += std::exp((double(logits[size_t(id)]) - peak) / double(rules.temperature));
        kept += weight(id);
    }
    double left = rules.point * kept;
    for (int32_t id : ids) {
        if (left < weight(id)) return id;
        left -= weight(id);
    }
    return ids.front();
}

}  // namespace kvl::scalar
