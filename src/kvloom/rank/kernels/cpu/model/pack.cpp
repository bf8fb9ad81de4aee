// Declaring, allocating and packing a model's weights, and setting its program.
#include <algorithm>
#include <cmath>
#include <exception>

#include "mixers/mixer.hpp"
#include "model/model.hpp"

namespace kvl {
namespace {

// Output channel of row r of a tensor: first + r; or, with interleave 0 or 1, the channel of row first + r in panels
// whose first 16 lanes are gate and whose last 16 are up.
int64_t channel_of(int64_t r, int64_t first, int32_t interleave) {
    if (interleave < 0) return first + r;
    return (first + r) / kLanes * kPanel + interleave * kLanes + (first + r) % kLanes;
}

// Replaces the bits of `mask`, from `shift` on, of a byte.
void set_bits(uint8_t& byte, int shift, int mask, int bits) { byte = uint8_t((byte & ~(mask << shift)) | (bits & mask) << shift); }

// Writes the quantised number of weight k of a channel into a group, in any format but bf16.
void set_number(uint8_t* group, int format, int channel, int k, int number) {
    uint8_t* planes = group + scale_bytes(format);
    uint8_t* rest = planes + plane_bytes(format);
    if (is_thin(format)) {
        set_bits(planes[plane_offset(format, k, channel)], plane_shift(format, k), 3, number);
        if (format != KVL_INT2) set_bits(planes[third_offset(k, channel)], k / 4, 1, number >> 2);
        return;
    }
    if (has_bytes(format)) {
        rest[byte_offset(k, channel)] = uint8_t(number);
        return;
    }
    set_bits(rest[nibble_offset(k, channel)], k % 8 < 4 ? 0 : 4, 15, number);
    if (high_bits(format) == 0) return;
    set_bits(planes[plane_offset(format, k, channel)], plane_shift(format, k), (1 << high_bits(format)) - 1, number >> 4);
}

// Reads the number that set_number wrote.
int number_at(const uint8_t* group, int format, int channel, int k) {
    const uint8_t* planes = group + scale_bytes(format);
    const uint8_t* rest = planes + plane_bytes(format);
    if (is_thin(format)) {
        const int low = planes[plane_offset(format, k, channel)] >> plane_shift(format, k) & 3;
        return format == KVL_INT2 ? low : low | (planes[third_offset(k, channel)] >> k / 4 & 1) << 2;
    }
    if (has_bytes(format)) return rest[byte_offset(k, channel)];
    const int byte = rest[nibble_offset(k, channel)], nibble = k % 8 < 4 ? byte & 15 : byte >> 4;
    if (high_bits(format) == 0) return nibble;
    const int upper = planes[plane_offset(format, k, channel)] >> plane_shift(format, k);
    return nibble | (upper & ((1 << high_bits(format)) - 1)) << 4;
}

// The value of a quantised number, before scale and minimum.
int level_of(int format, int number) {
    if (has_bytes(format)) return number - 128;
    if (has_table(format)) return table_of(format)[number];
    return format == KVL_INT6 ? number - 32 : number;
}

// Writes scale and minimum of a channel, or the scales of its two runs, into a group; both are fp16.
void set_halves(uint8_t* group, int channel, uint16_t first, uint16_t second) {
    std::memcpy(group + channel * 2, &first, 2);
    std::memcpy(group + kPanel * 2 + channel * 2, &second, 2);
}

// int2: scale and minimum of one run of a channel's group, from 0 to 15, and the factor that this group holds.
void set_run(uint8_t* group, int channel, int run, float scale, float minimum) {
    group[kPanel * 2 + run * kPanel + channel] = uint8_t(int(scale) | int(minimum) << 4);
}

// Writes scales and minimums of one group, whose first column is k, of a file's row.
struct FileScales {
    const kvl_numbers& from;
    int64_t row, cols, runs = (cols + from.run - 1) / from.run;

    float scale(int64_t k) const { return k < cols ? from.scales[row * runs + k / from.run] : 0; }
    float minimum(int64_t k) const { return k < cols && from.minimums != nullptr ? from.minimums[row * runs + k / from.run] : 0; }
    void set(uint8_t* group, int format, int channel, int64_t k) const {
        if (format == KVL_INT2) {
            const bool is_second = k / kFileGroup % 2 == 1;
            const int64_t at = row * (cols / kFactorRun) + k / kFactorRun;
            const uint16_t factor = float_to_fp16((is_second ? from.minimum_factors : from.scale_factors)[at]);
            std::memcpy(group + channel * 2, &factor, 2);
            for (int run = 0; run < 2; run++) set_run(group, channel, run, scale(k + run * kRun), minimum(k + run * kRun));
            return;
        }
        const uint16_t first = float_to_fp16(scale(k));
        if (has_runs(format)) set_halves(group, channel, first, float_to_fp16(scale(k + kRun)));
        else if (has_min(format)) set_halves(group, channel, first, float_to_fp16(minimum(k)));
        else std::memcpy(group + channel * 2, &first, 2);
    }
};

void pack_int8(uint8_t* group, int format, int channel, const float* values, int64_t count) {
    const uint16_t scale_bits = float_to_fp16(peak_of(values, count) / 127.0f);
    const float scale = fp16_to_float(scale_bits), inverse = scale > 0 ? 1.0f / scale : 0.0f;
    std::memcpy(group + channel * 2, &scale_bits, 2);
    for (int k = 0; k < group_size(format); k++) {
        const float value = k < count ? std::nearbyint(values[k] * inverse) : 0.0f;
        set_number(group, format, channel, k, int(std::clamp(value, -127.0f, 127.0f)) + 128);
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
    set_halves(group, channel, scale_bits, min_bits);
    for (int k = 0; k < kFileGroup; k++) {
        const float step = k < count && scale > 0 ? std::nearbyint((values[k] - minimum) / scale) : 0.0f;
        set_number(group, KVL_INT4, channel, k, int(std::clamp(step, 0.0f, 15.0f)));
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
    for (int64_t k = 0; k < linear.padded_cols; k += size, group += group_bytes(format)) {
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
    uint8_t* group = linear.panel(channel / kPanel) + head_bytes(format);
    if (is_whole(format)) {
        const float scale = scales.scale(0);
        std::memcpy(group - head_bytes(format) + lane * 4, &scale, 4);
    }
    for (int64_t k = 0; k < linear.cols; k += group_size(format), group += group_bytes(format)) {
        if (!is_whole(format)) scales.set(group, format, lane, k);
        for (int i = 0; i < group_size(format) && k + i < linear.cols; i++) set_number(group, format, lane, i, numbers[k + i]);
    }
}

// Scale and minimum of weight i of a channel in group `number` of a panel.
struct Line {
    float scale, minimum;
};
Line line_at(const uint8_t* group, int format, int channel, int i, int64_t number) {
    const auto half = [&](int64_t at) {
        uint16_t bits;
        std::memcpy(&bits, group + at + channel * 2, 2);
        return fp16_to_float(bits);
    };
    if (format == KVL_INT2) {
        const int both = group[kPanel * 2 + i / kRun * kPanel + channel];
        return {half(factors_at(number, 0)) * float(both & 15), half(factors_at(number, 1)) * float(both >> 4)};
    }
    if (has_runs(format)) return {half(i < kRun ? 0 : kPanel * 2), 0};
    return {half(0), has_min(format) ? half(kPanel * 2) : 0};
}

// Places a thread's part of every linear in memory, contiguously from `at` on. Returns the end.
uint8_t* lay_out(kvl_model& model, int thread, uint8_t* at) {
    for (Linear& linear : model.linears) {
        linear.part[size_t(thread)] = at;
        at += linear.offset(linear.share(thread + 1)) - linear.offset(linear.share(thread));
    }
    return at;
}

}  // namespace

void read_row(const Linear& linear, int64_t channel, float* out) {
    const int format = linear.format(channel / kPanel), lane = int(channel % kPanel);
    const uint8_t* panel = linear.panel(channel / kPanel);
    const uint8_t* group = panel + head_bytes(format);
    for (int64_t g = 0, k = 0; k < linear.cols; g++, group += group_bytes(format)) {
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(group);
        for (int i = 0; i < group_size(format) && k < linear.cols; i++, k++) {
            if (format == KVL_BF16) {
                out[k] = bf16_to_float(halves[bf16_offset(i, lane)]);
                continue;
            }
            const float level = float(level_of(format, number_at(group, format, lane, i)));
            if (is_whole(format)) {
                out[k] = level * reinterpret_cast<const float*>(panel)[lane];
                continue;
            }
            const Line line = line_at(group, format, lane, i, g);
            out[k] = level * line.scale + line.minimum;
        }
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
    for (const kvl::Linear& l : model->linears) bytes += l.offset(l.share(thread + 1)) - l.offset(l.share(thread));
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
            return other.num_heads == attention->num_heads && other.num_kv_heads == attention->num_kv_heads;
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
            if (instructions[i].kind == KVL_ATTENTION) model->last_mixer = i;
            if (kvl::is_mixing(instructions[i].kind)) model->last_mixer = i + 1;
        }
        model->turns.clear();
        uint8_t turn = 0;
        for (const kvl_instruction& i : model->program) model->turns.push_back(turn ^= kvl::is_quantising(i.kind));
        model->next = std::vector<std::atomic<int64_t>>(size_t(model->counters()) * size_t(model->pool.size()));
        return 0;
    });
}
