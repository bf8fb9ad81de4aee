// Declaring, allocating and packing a model's weights, and setting its program.
#include <algorithm>
#include <cmath>
#include <exception>

#include "mixers/mixer.hpp"
#include "model/model.hpp"
#include "model/numbers.hpp"

namespace kvl {
namespace {

// Output channel of row r of a tensor: first + r; or, with interleave 0 or 1, the channel of row first + r in panels
// whose first 16 lanes are gate and whose last 16 are up.
int64_t channel_of(int64_t r, int64_t first, int32_t interleave) {
    if (interleave < 0) return first + r;
    return (first + r) / kLanes * kPanel + interleave * kLanes + (first + r) % kLanes;
}

void set_half(uint8_t* at, int channel, uint16_t half) { std::memcpy(at + channel * 2, &half, 2); }
float half_at(const uint8_t* at, int channel) {
    uint16_t half;
    std::memcpy(&half, at + channel * 2, 2);
    return fp16_to_float(half);
}

// Scale and minimum of some weights of a channel.
struct Line {
    float scale, minimum;
};

// A pair of 6 bits of a channel and group of a super-block; `pairs`: where those of the block begin.
void set_pair(uint8_t* pairs, int group, int channel, int first, int second) {
    pairs[group * kPanel + channel] = uint8_t((first & 15) | (second & 15) << 4);
    uint8_t& upper = pairs[pair_plane(group, channel)];
    set_bits(upper, pair_shift(group, 0), 3, first >> 4);
    set_bits(upper, pair_shift(group, 1), 3, second >> 4);
}
int pair_at(const uint8_t* pairs, int group, int channel, int which) {
    const int low = pairs[group * kPanel + channel] >> 4 * which & 15;
    return low | (pairs[pair_plane(group, channel)] >> pair_shift(group, which) & 3) << 4;
}

// Scale and minimum of weight k of a block, as its format stores them.
Line line_at(const uint8_t* block, int format, int channel, int k) {
    const int group = k / kFileGroup, run = k / kRun;
    if (!is_super(format)) {
        const int second = kPanel * 2;
        if (has_runs(format)) return {half_at(block + run * second, channel), 0};
        return {half_at(block, channel), has_min(format) ? half_at(block + second, channel) : 0};
    }
    const uint8_t* numbers = block + factor_bytes(format);
    const float factor = half_at(block, channel), minimum_factor = has_min(format) ? half_at(block + kPanel * 2, channel) : 0;
    if (scaling_of(format) == Scaling::kBytes) return {factor * float(int8_t(numbers[run * kPanel + channel])), 0};
    if (scaling_of(format) == Scaling::kNibbles) {
        const int both = numbers[run * kPanel + channel];
        return {factor * float(both & 15), minimum_factor * float(both >> 4)};
    }
    if (scaling_of(format) == Scaling::kOdd) {
        const int which = has_runs(format) ? run : group, nibble = numbers[which / 2 * kPanel + channel] >> which % 2 * 4 & 15;
        return {factor * unit_of(format) * float(2 * nibble + 1), 0};
    }
    if (has_runs(format)) return {factor * float(pair_at(numbers, group, channel, run % 2) - 32), 0};
    return {factor * float(pair_at(numbers, group, channel, 0)), minimum_factor * float(pair_at(numbers, group, channel, 1))};
}

// Weight i of a group of a channel, dequantised; `first`: column of the group in its block.
float weight_at(const uint8_t* panel, const uint8_t* block, const uint8_t* group, int format, int channel, int first, int i) {
    if (format == KVL_BF16) return bf16_to_float(reinterpret_cast<const uint16_t*>(group)[bf16_offset(i, channel)]);
    const int number = has_grid(format) ? number_of_point(block, format, channel, first + i) : number_at(group, format, channel, i);
    const float level = float(level_of(format, number));
    if (is_whole(format)) return level * reinterpret_cast<const float*>(panel)[channel];
    const Line line = line_at(block, format, channel, first + i);
    return level * line.scale + line.minimum;
}

// Writes scales and minimums of the blocks of a file's row.
struct FileScales {
    const kvl_numbers& from;
    int64_t row, cols, runs = (cols + from.run - 1) / from.run;

    float scale(int64_t k) const { return k < cols ? from.scales[row * runs + k / from.run] : 0; }
    float minimum(int64_t k) const { return k < cols && from.minimums != nullptr ? from.minimums[row * runs + k / from.run] : 0; }
    // Of the block whose first column is k.
    void set(uint8_t* block, int format, int channel, int64_t k) const {
        if (is_super(format)) return set_super(block, format, channel, k);
        set_half(block, channel, float_to_fp16(scale(k)));
        if (has_runs(format)) set_half(block + kPanel * 2, channel, float_to_fp16(scale(k + kRun)));
        if (has_min(format)) set_half(block + kPanel * 2, channel, float_to_fp16(minimum(k)));
    }
    void set_super(uint8_t* block, int format, int channel, int64_t k) const {
        const int64_t at = row * (cols / kSuper) + k / kSuper;
        const float unit = scaling_of(format) == Scaling::kOdd ? unit_of(format) : 1;
        set_half(block, channel, float_to_fp16(from.scale_factors[at] / unit));
        if (has_min(format)) set_half(block + kPanel * 2, channel, float_to_fp16(from.minimum_factors[at]));
        uint8_t* numbers = block + factor_bytes(format);
        if (scaling_of(format) == Scaling::kOdd) return set_odd(numbers, channel, k, has_runs(format) ? kRun : kFileGroup);
        const bool in_pairs = scaling_of(format) == Scaling::kPairs, in_nibbles = scaling_of(format) == Scaling::kNibbles;
        for (int group = 0; in_pairs && group < kSuper / kFileGroup; group++, k += kFileGroup) {
            if (has_runs(format)) set_pair(numbers, group, channel, int(scale(k)) + 32, int(scale(k + kRun)) + 32);
            else set_pair(numbers, group, channel, int(scale(k)), int(minimum(k)));
        }
        for (int run = 0; !in_pairs && run < kSuper / kRun; run++, k += kRun)
            numbers[run * kPanel + channel] = uint8_t(in_nibbles ? int(scale(k)) | int(minimum(k)) << 4 : int(scale(k)));
    }
    void set_odd(uint8_t* numbers, int channel, int64_t k, int run) const {
        for (int i = 0; i < kSuper / run; i++, k += run) set_bits(numbers[i / 2 * kPanel + channel], i % 2 * 4, 15, int(scale(k)) / 2);
    }
};

void pack_int8(uint8_t* group, int format, int channel, const float* values, int64_t count) {
    const uint16_t scale_bits = float_to_fp16(peak_of(values, count) / 127.0f);
    const float scale = fp16_to_float(scale_bits), inverse = scale > 0 ? 1.0f / scale : 0.0f;
    set_half(group, channel, scale_bits);
    for (int k = 0; k < group_size(format); k++) {
        const float value = k < count ? std::nearbyint(values[k] * inverse) : 0.0f;
        set_number(group + scale_bytes(format), format, channel, k, int(std::clamp(value, -127.0f, 127.0f)) + 128);
    }
}

// Quantises to 16 levels, equally spaced from the smallest to the largest value of the group.
void pack_int4(uint8_t* group, int channel, const float* values, int64_t count) {
    float low = 0, high = 0;
    if (count > 0) {
        low = *std::min_element(values, values + count);
        high = *std::max_element(values, values + count);
    }
    const uint16_t scale_bits = float_to_fp16((high - low) / 15.0f), min_bits = float_to_fp16(low);
    const float scale = fp16_to_float(scale_bits), minimum = fp16_to_float(min_bits);
    set_half(group, channel, scale_bits);
    set_half(group + kPanel * 2, channel, min_bits);
    for (int k = 0; k < kFileGroup; k++) {
        const float step = k < count && scale > 0 ? std::nearbyint((values[k] - minimum) / scale) : 0.0f;
        set_number(group + scale_bytes(KVL_INT4), KVL_INT4, channel, k, int(std::clamp(step, 0.0f, 15.0f)));
    }
}

void pack_bf16(uint8_t* group, int channel, const float* values, int64_t count) {
    uint16_t* out = reinterpret_cast<uint16_t*>(group);
    for (int k = 0; k < kFileGroup; k++) out[bf16_offset(k, channel)] = k < count ? float_to_bf16(values[k]) : 0;
}

// Packs one row of floats into its channel of every group of its panel, in int8, int8_32, int4 or bf16; other formats
// are packed from a file's numbers only.
void pack_row(const Linear& linear, int64_t channel, const float* values) {
    uint8_t* group = linear.panel(channel / kPanel);
    const int format = linear.format(channel / kPanel), lane = int(channel % kPanel), size = group_size(format);
    for (int64_t k = 0; k < linear.padded_cols; k += size, group += block_bytes(format)) {
        const int64_t count = std::clamp<int64_t>(linear.cols - k, 0, size);
        if (format == KVL_INT8 || format == KVL_INT8_32) pack_int8(group, format, lane, values + k, count);
        if (format == KVL_INT4) pack_int4(group, lane, values + k, count);
        if (format == KVL_BF16) pack_bf16(group, lane, values + k, count);
    }
}

// Packs row `row` of a file's numbers into its channel. Padding after the last column is not written: its scales stay
// zero, or the activations that it is multiplied by are zero.
void pack_numbers(const Linear& linear, int64_t channel, const kvl_numbers& from, int64_t row) {
    const int format = linear.format(channel / kPanel), lane = int(channel % kPanel);
    const uint8_t* numbers = from.numbers + row * linear.cols;
    const FileScales scales{from, row, linear.cols};
    uint8_t* panel = linear.panel(channel / kPanel);
    if (is_whole(format)) {
        const float scale = scales.scale(0);
        std::memcpy(panel + lane * 4, &scale, 4);
    }
    for (int64_t k = 0; k < linear.cols; k += group_size(format)) {
        uint8_t *block = block_of(panel, format, k), *group = group_of(block, format, k);
        if (!is_whole(format) && k % block_size(format) == 0) scales.set(block, format, lane, k);
        if (has_grid(format)) {
            for (int i = 0; i < kFileGroup; i += kPoint) set_point(block, format, lane, int(k % kSuper) + i, numbers + k + i);
            continue;
        }
        for (int i = 0; i < group_size(format) && k + i < linear.cols; i++) set_number(group, format, lane, i, numbers[k + i]);
    }
}

// Places a thread's part of every linear in memory, contiguously from `at` on. Returns the end.
uint8_t* lay_out(kvl_model& model, int thread, uint8_t* at) {
    for (Linear& linear : model.linears) {
        if (linear.is_shared) continue;
        linear.part[size_t(thread)] = at;
        at += linear.offset(linear.share(thread + 1)) - linear.offset(linear.share(thread));
    }
    return at;
}

}  // namespace

void read_row(const Linear& linear, int64_t channel, float* out) {
    const int format = linear.format(channel / kPanel), lane = int(channel % kPanel);
    const uint8_t* panel = linear.panel(channel / kPanel);
    for (int64_t first = 0; first < linear.cols; first += group_size(format)) {
        const uint8_t *block = block_of(panel, format, first), *group = group_of(block, format, first);
        const int64_t count = min_of<int64_t>(group_size(format), linear.cols - first);
        for (int i = 0; i < int(count); i++) out[first + i] = weight_at(panel, block, group, format, lane, int(first % block_size(format)), i);
    }
}

}  // namespace kvl

using kvl::kPad;

kvl_model* kvl_new(const kvl_shape* shape) {
    try {
        return new kvl_model(*shape);
    } catch (const std::exception&) {  // std::bad_alloc, or std::system_error of a thread
        return nullptr;
    }
}

void kvl_free(kvl_model* model) { delete model; }

int32_t kvl_add_linear(kvl_model* model, int64_t rows, int64_t cols, int32_t format) {
    return kvl::or_out_of_memory([=] {
        const int64_t panels = kvl::round_up(rows, kvl::kPanel) / kvl::kPanel;
        kvl::Linear linear{rows, cols, kvl::round_up(cols, kPad), panels, {{0, format}}, {}};
        linear.part.resize(size_t(model->pool.size()));
        model->linears.push_back(std::move(linear));
        return int32_t(model->linears.size()) - 1;
    });
}

int32_t kvl_share_linear(kvl_model* model, const kvl_model* other, int32_t linear) {
    return kvl::or_out_of_memory([=] {
        model->linears.push_back(other->linears[size_t(linear)]);
        model->linears.back().is_shared = true;
        return int32_t(model->linears.size()) - 1;
    });
}

int32_t kvl_set_format(kvl_model* model, int32_t linear, int64_t first, int32_t format) {
    return kvl::or_out_of_memory([=] {
        std::vector<kvl::Stretch>& stretches = model->linears[size_t(linear)].stretches;
        if (first == 0) stretches.clear();
        stretches.push_back({first / kvl::kPanel, format});
        return 0;
    });
}

int32_t kvl_add_vector(kvl_model* model, const float* values, int64_t count) {
    return kvl::or_out_of_memory([=] {
        std::vector<float> vector(size_t(kvl::round_up(count, kPad)), 0.0f);
        std::copy(values, values + count, vector.begin());
        model->vectors.push_back(std::move(vector));
        return int32_t(model->vectors.size()) - 1;
    });
}

int64_t kvl_arena_bytes(const kvl_model* model, int32_t thread) {
    int64_t bytes = 0;
    for (const kvl::Linear& l : model->linears)
        if (!l.is_shared) bytes += l.offset(l.share(thread + 1)) - l.offset(l.share(thread));
    return bytes;
}

const uint8_t* kvl_arena(const kvl_model* model, int32_t thread) { return model->linears.front().part[size_t(thread)]; }

// Arenas need no slack at the end: micro-kernels prefetch beyond a panel, but do not read there.
int64_t kvl_allocate(kvl_model* model) {
    return kvl::or_out_of_memory([=] {
        int64_t total = 0;
        for (int t = 0; t < model->pool.size(); t++) {
            model->arenas.emplace_back(kvl_arena_bytes(model, t));
            total += kvl::lay_out(*model, t, model->arenas.back().as()) - model->arenas.back().as();
        }
        return total;
    });
}

// Casting const away is safe: only kvl_fill_* writes to arenas, and it must not be called for adopted ones.
void kvl_adopt(kvl_model* model, const uint8_t* arenas) {
    uint8_t* at = const_cast<uint8_t*>(arenas);
    for (int t = 0; t < model->pool.size(); t++) at = kvl::lay_out(*model, t, at);
}

// Several threads may fill different rows at the same time, also of one panel: each byte belongs to one channel, so no
// two threads write the same byte.
void kvl_fill_f32(kvl_model* model, int32_t linear, const float* values, int64_t count, int64_t first, int32_t interleave) {
    const kvl::Linear& to = model->linears[size_t(linear)];
    for (int64_t r = 0; r < count; ++r) kvl::pack_row(to, kvl::channel_of(r, first, interleave), values + r * to.cols);
}

void kvl_round_bf16(const float* values, int64_t count, uint16_t* out) {
    for (int64_t i = 0; i < count; i++) out[i] = kvl::float_to_bf16(values[i]);
}

void kvl_fill_numbers(kvl_model* model, int32_t linear, const kvl_numbers* from, int64_t count, int64_t first,
                      int32_t interleave) {
    const kvl::Linear& to = model->linears[size_t(linear)];
    for (int64_t r = 0; r < count; ++r) kvl::pack_numbers(to, kvl::channel_of(r, first, interleave), *from, r);
}

void kvl_set_embed(kvl_model* model, const uint16_t* embed, int32_t linear) {
    model->embed = embed;
    model->embed_linear = linear;
}

int32_t kvl_add_rope(kvl_model* model, const float* table, int32_t dim) {
    return kvl::or_out_of_memory([=] {
        model->ropes.push_back({table, dim});
        return int32_t(model->ropes.size()) - 1;
    });
}

int32_t kvl_add_attention(kvl_model* model, const kvl_attention* attention) {
    return kvl::or_out_of_memory([=] {
        const std::vector<kvl_attention>& others = model->attentions;
        const auto is_alike = [&](const kvl_attention& other) {
            return other.num_heads == attention->num_heads && other.num_kv_heads == attention->num_kv_heads &&
                   (other.projected == KVL_LATENT) == (attention->projected == KVL_LATENT);
        };
        const auto first = std::find_if(others.begin(), others.end(), is_alike);
        const int next = others.empty() ? 0 : *std::max_element(model->plans.begin(), model->plans.end()) + 1;
        model->plans.push_back(first == others.end() ? next : model->plans[size_t(first - others.begin())]);
        model->attentions.push_back(*attention);
        return int32_t(others.size()) - 1;
    });
}

int32_t kvl_set_program(kvl_model* model, const kvl_instruction* instructions, int32_t count) {
    return kvl::or_out_of_memory([=] {
        model->program.assign(instructions, instructions + count);
        model->last_mixer = -1;
        for (int32_t i = 0; i < count; i++) {
            const bool attends = instructions[i].kind == KVL_ATTENTION;
            if (attends && model->attentions[size_t(instructions[i].layer)].projected != KVL_QUERIES) model->last_mixer = i;
            if (kvl::is_mixing(instructions[i].kind)) model->last_mixer = i + 1;
        }
        model->turns.clear();
        uint8_t turn = 0;
        for (const kvl_instruction& i : model->program) model->turns.push_back(turn ^= kvl::is_quantising(i.kind));
        model->next = std::vector<std::atomic<int64_t>>(size_t(model->counters()) * size_t(model->pool.size()));
        return 0;
    });
}
