// Declaring, allocating and filling a model's weights.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <new>

#include "model.hpp"

namespace kvl {

HugeBuffer::HugeBuffer(int64_t bytes) : bytes_(round_up(std::max<int64_t>(bytes, 1), kHugePage)) {
    void* mapped = mmap(nullptr, size_t(bytes_ + kHugePage), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    auto* start = static_cast<uint8_t*>(mapped);
    at_ = start + (kHugePage - int64_t(reinterpret_cast<uintptr_t>(start) % kHugePage)) % kHugePage;
    if (at_ > start) munmap(start, size_t(at_ - start));
    if (start + kHugePage > at_) munmap(at_ + bytes_, size_t(start + kHugePage - at_));
#if defined(MADV_HUGEPAGE)
    madvise(at_, size_t(bytes_), MADV_HUGEPAGE);
#endif
}

HugeBuffer::~HugeBuffer() {
    if (at_ != nullptr) munmap(at_, size_t(bytes_));
}

namespace {

// Output channel of row r: itself, or its lane in a panel shared by gate (first 16 lanes) and up (last 16).
int64_t channel_of(int64_t r, int64_t first, int32_t interleave) {
    if (interleave < 0) return first + r;
    return (first + r) / kLanes * kPanel + interleave * kLanes + (first + r) % kLanes;
}

// Largest size in a group of floats that may end early.
float peak_of(const float* values, int64_t count) {
    float peak = 0;
    for (int64_t k = 0; k < count; k++) peak = std::max(peak, std::fabs(values[k]));
    return peak;
}

void pack_int8(uint8_t* group, int channel, const float* values, int64_t count) {
    const uint16_t scale_bits = float_to_fp16(peak_of(values, count) / 127.0f);
    const float scale = fp16_to_float(scale_bits), inverse = scale > 0 ? 1.0f / scale : 0.0f;
    std::memcpy(group + channel * 2, &scale_bits, 2);
    uint8_t* bytes = group + kPanel * 2;
    for (int k = 0; k < kInt8Group; k++) {
        const float value = k < count ? std::nearbyint(values[k] * inverse) : 0.0f;
        bytes[int8_offset(k, channel)] = uint8_t(int(std::clamp(value, -127.0f, 127.0f)) + 128);
    }
}

void set_nibble(uint8_t* group, int channel, int k, int value) {
    uint8_t& byte = group[kPanel * 4 + int4_offset(k, channel)];
    byte = k % 8 < 4 ? uint8_t((byte & 0xf0) | value) : uint8_t((byte & 0x0f) | value << 4);
}

void set_scale_and_min(uint8_t* group, int channel, uint16_t scale, uint16_t minimum) {
    std::memcpy(group + channel * 2, &scale, 2);
    std::memcpy(group + kPanel * 2 + channel * 2, &minimum, 2);
}

// Fifteen equal steps from the smallest to the largest value of the group.
void pack_int4(uint8_t* group, int channel, const float* values, int64_t count) {
    float low = 0, high = 0;
    if (count > 0) {
        low = *std::min_element(values, values + count);
        high = *std::max_element(values, values + count);
    }
    const uint16_t scale_bits = float_to_fp16((high - low) / 15.0f), min_bits = float_to_fp16(low);
    const float scale = fp16_to_float(scale_bits), minimum = fp16_to_float(min_bits);
    set_scale_and_min(group, channel, scale_bits, min_bits);
    for (int k = 0; k < kInt4Group; k++) {
        const float step = k < count && scale > 0 ? std::nearbyint((values[k] - minimum) / scale) : 0.0f;
        set_nibble(group, channel, k, int(std::clamp(step, 0.0f, 15.0f)));
    }
}

void pack_bf16(uint8_t* group, int channel, const float* values, int64_t count) {
    uint16_t* out = reinterpret_cast<uint16_t*>(group);
    for (int k = 0; k < kInt4Group; k++) out[bf16_offset(k, channel)] = k < count ? float_to_bf16(values[k]) : 0;
}

// One row of floats into its channel of every group of its panel.
void pack_row(const Linear& linear, int64_t channel, const float* values) {
    uint8_t* group = linear.panel(channel / kPanel);
    const int lane = int(channel % kPanel), size = group_size(linear.format);
    for (int64_t k = 0; k < linear.padded_cols; k += size, group += group_bytes(linear.format)) {
        const int64_t count = std::clamp<int64_t>(linear.cols - k, 0, size);
        if (linear.format == KVL_INT8) pack_int8(group, lane, values + k, count);
        if (linear.format == KVL_INT4) pack_int4(group, lane, values + k, count);
        if (linear.format == KVL_BF16) pack_bf16(group, lane, values + k, count);
    }
}

// One row of GGUF blocks. Q4_0: fp16 d, 16 bytes; value = d * (nibble - 8), and -8 d is exact in fp16. Q4_1: fp16 d,
// fp16 m, 16 bytes; value = d * nibble + m. Byte j holds weight j (low nibble) and weight j + 16 (high nibble).
void pack_q4_row(const Linear& linear, int64_t channel, const uint8_t* block, bool has_min) {
    uint8_t* group = linear.panel(channel / kPanel);
    const int lane = int(channel % kPanel);
    for (int64_t k = 0; k < linear.cols; k += kInt4Group, group += group_bytes(KVL_INT4)) {
        uint16_t scale, minimum;
        std::memcpy(&scale, block, 2);
        block += 2;
        if (has_min) {
            std::memcpy(&minimum, block, 2);
            block += 2;
        } else {
            minimum = float_to_fp16(-8.0f * fp16_to_float(scale));
        }
        set_scale_and_min(group, lane, scale, minimum);
        for (int j = 0; j < kInt4Group / 2; j++, block++) {
            set_nibble(group, lane, j, *block & 15);
            set_nibble(group, lane, j + kInt4Group / 2, *block >> 4);
        }
    }
}

// A thread's part of every linear, one behind the other from `at` on. Returns where they end.
uint8_t* lay_out(kvl_model& model, int thread, uint8_t* at) {
    for (Linear& linear : model.linears) {
        linear.part[size_t(thread)] = at;
        at += (linear.share(thread + 1) - linear.share(thread)) * linear.panel_bytes();
    }
    return at;
}

}  // namespace
}  // namespace kvl

using kvl::kPad;

kvl_model* kvl_new(const kvl_shape* shape) { return new (std::nothrow) kvl_model(*shape); }

void kvl_free(kvl_model* model) { delete model; }

int32_t kvl_add_linear(kvl_model* model, int64_t rows, int64_t cols, int32_t format) {
    const int64_t panels = kvl::round_up(rows, kvl::kPanel) / kvl::kPanel;
    kvl::Linear linear{rows, cols, kvl::round_up(cols, kPad), panels, format, {}};
    linear.part.resize(size_t(model->pool.size()));
    model->linears.push_back(std::move(linear));
    return int32_t(model->linears.size()) - 1;
}

int32_t kvl_add_vector(kvl_model* model, const float* values, int64_t count) {
    std::vector<float> vector(size_t(kvl::round_up(count, kPad)), 0.0f);
    std::copy(values, values + count, vector.begin());
    model->vectors.push_back(std::move(vector));
    return int32_t(model->vectors.size()) - 1;
}

int64_t kvl_arena_bytes(const kvl_model* model, int32_t thread) {
    int64_t bytes = 0;
    for (const kvl::Linear& l : model->linears) bytes += (l.share(thread + 1) - l.share(thread)) * l.panel_bytes();
    return bytes;
}

const uint8_t* kvl_arena(const kvl_model* model, int32_t thread) { return model->linears.front().part[size_t(thread)]; }

// The micro-kernels prefetch past the end of a panel, never read there: no slack is needed at an arena's end.
int64_t kvl_allocate(kvl_model* model) {
    int64_t total = 0;
    try {
        for (int t = 0; t < model->pool.size(); t++) {
            model->arenas.emplace_back(kvl_arena_bytes(model, t));
            total += kvl::lay_out(*model, t, model->arenas.back().as()) - model->arenas.back().as();
        }
    } catch (const std::bad_alloc&) {
        return -1;
    }
    return total;
}

// Nothing writes to an arena but kvl_fill_*, which nobody calls then.
void kvl_adopt(kvl_model* model, const uint8_t* arenas) {
    uint8_t* at = const_cast<uint8_t*>(arenas);
    for (int t = 0; t < model->pool.size(); t++) at = kvl::lay_out(*model, t, at);
}

// Threads of the caller fill different rows at the same time: rows of one panel may be written by two of them, but never
// the same byte of int8 or int4 data, because a channel owns its bytes.
void kvl_fill_f32(kvl_model* model, int32_t linear, const float* values, int64_t count, int64_t first, int32_t interleave) {
    const kvl::Linear& to = model->linears[size_t(linear)];
    for (int64_t r = 0; r < count; ++r) kvl::pack_row(to, kvl::channel_of(r, first, interleave), values + r * to.cols);
}

void kvl_round_bf16(const float* values, int64_t count, uint16_t* out) {
    for (int64_t i = 0; i < count; i++) out[i] = kvl::float_to_bf16(values[i]);
}

void kvl_fill_q4(kvl_model* model, int32_t linear, const uint8_t* blocks, int64_t count, int64_t first, int32_t interleave,
                 int32_t has_min) {
    const kvl::Linear& to = model->linears[size_t(linear)];
    const int64_t row_bytes = to.cols / kvl::kInt4Group * (has_min ? 20 : 18);
    for (int64_t r = 0; r < count; ++r)
        kvl::pack_q4_row(to, kvl::channel_of(r, first, interleave), blocks + r * row_bytes, has_min != 0);
}

void kvl_set_tables(kvl_model* model, const uint16_t* embed, const float* rope) {
    model->embed = embed;
    model->rope = rope;
}

void kvl_set_program(kvl_model* model, const kvl_instruction* instructions, int32_t count) {
    model->program.assign(instructions, instructions + count);
    model->next = std::vector<std::atomic<int64_t>>(size_t(count));
}
