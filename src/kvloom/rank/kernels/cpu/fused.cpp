// Steps of many rows: an instruction that needs less than a row at a time is done with the one before it, by whoever has
// made the floats, while they are in its cache. Heads are rotated and stored as soon as their panels are multiplied, and
// what the next linear reads is quantised. The floats, and so all bits, are those that the instruction alone would find.
#include "step.hpp"

namespace kvl {

// Whether the instruction behind this one is done with it.
bool Step::does_next(const kvl_instruction& instruction) const {
    const kvl_instruction* const next = &instruction + 1;
    if (!is_fused_ || next == model_.program.data() + model_.program.size()) return false;
    const bool is_linear = instruction.kind == KVL_LINEAR;
    if (is_linear && instruction.epilogue == KVL_TO_QKV) return next->kind == KVL_ROPE_KV && next->source != KVL_NORM_ROWS;
    if (next->kind != KVL_QUANT || is_whole(model_.linears[size_t(next->linear)].activation_format())) return false;
    if (is_linear) return next->source == KVL_FROM_MLP && (is_gate(instruction.epilogue) || instruction.epilogue == KVL_GELU);
    return instruction.kind == KVL_ATTENTION && next->source == KVL_FROM_ATTENTION && shape_.head_dim % kPad == 0;
}

bool Step::is_done(const kvl_instruction& instruction) const {
    return &instruction != model_.program.data() && does_next((&instruction)[-1]);
}

const Activations& Step::input_of(const kvl_instruction& linear, int64_t rows, int thread) const {
    if (is_small(rows)) return scratch_.own[size_t(thread)];
    const kvl_instruction* const quant = &linear - 1;
    return quant->kind == KVL_QUANT && is_done(*quant) ? scratch_.fused : scratch_.shared;
}

// Panels that give a head, or kPad columns of what the next linear reads.
int64_t Step::panels_of_unit(const kvl_instruction& linear) const {
    if (linear.epilogue == KVL_TO_QKV) return shape_.head_dim / kPanel;
    return kPad / (is_gate(linear.epilogue) ? kLanes : kPanel);
}

// The panels of a unit times some rows, at most kTileRows, and the next instruction on what they give.
void Step::unit(const kvl_instruction& instruction, int64_t index, const Activations& x, Span span, int thread) {
    const Linear& linear = model_.linears[size_t(instruction.linear)];
    const int64_t panels = panels_of_unit(instruction), each = is_gate(instruction.epilogue) ? kLanes : kPanel;
    const int64_t width = panels * each, first = index * panels;
    float* const floats = scratch_.unit[size_t(thread)] - span.begin * width;  // of row r: at r * width
    alignas(64) float sums[kTileRows * kPanel];
    for (int64_t p = 0; p < panels; p++) {
        float* const at = floats + p * each;
        if (first + p >= linear.panels) {  // padding
            for (int64_t r = span.begin; r < span.end; r++) std::fill(at + r * width, at + r * width + each, 0.0f);
            continue;
        }
        const Way way(linear.format(first + p), span.end - span.begin, model_.uses_tiles);
        for (int64_t i = 0; i < way.passes.count; i++) {
            const int64_t begin = span.begin + way.passes.begin(i), end = span.begin + way.passes.begin(i + 1);
            way.multiply({x, begin, linear.padded_cols, linear.panel(first + p), sums}, int(end - begin));
            for (int64_t r = begin; r < end; r++) store_panel(instruction, first + p, sums + (r - begin) * kPanel, at + r * width);
        }
    }
    const kvl_instruction& next = (&instruction)[1];
    for (int64_t r = span.begin; r < span.end; r++) {
        if (next.kind == KVL_QUANT) store_columns(next, r, index * kPad, floats + r * width, kPad);
        else if (shape_.kv_format == KVL_KV_INT8) place_head<Int8Cache>(next, r, int(index), floats + r * width);
        else place_head<Bf16Cache>(next, r, int(index), floats + r * width);
    }
}

// `count` floats of a row of what the next linear reads, from column `first` on: both are multiples of kPad.
void Step::store_columns(const kvl_instruction& quant, int64_t row, int64_t first, const float* x, int64_t count) const {
    const Linear& linear = model_.linears[size_t(quant.linear)];
    const int format = linear.activation_format();
    const int64_t at = row * linear.padded_cols + first;
    const Activations& to = scratch_.fused;
    const Activations columns{to.data + at * (format == KVL_BF16 ? 2 : 1), to.scale + at / group_size(format), to.sum + at / run_size(format)};
    store_activations(columns, 0, x, count, format);
}

}  // namespace kvl
