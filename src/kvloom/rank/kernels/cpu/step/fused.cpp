// Fusion in steps of many rows: a thread runs the next instruction on the floats that it has just computed, while they
// are in its cache. Heads are rotated and stored as soon as their panels are multiplied; other outputs are quantised as
// the input of the next linear. An instruction that needs whole rows (a norm, or one scale per row) runs after one
// thread has multiplied a strip of rows by all panels. The floats, and so all bits, are the same as without fusion.
#include "step/step.hpp"

namespace kvl {

// Whether the next instruction is fused with this one.
bool Step::does_next(const kvl_instruction& instruction) const {
    const kvl_instruction* const next = &instruction + 1;
    if (!is_fused_ || next == model_.program.data() + model_.program.size()) return false;
    const bool is_linear = instruction.kind == KVL_LINEAR;
    if (is_linear && instruction.epilogue == KVL_TO_QKV)
        return next->kind == KVL_ROPE_KV && next->source != KVL_NORM_ROWS && attention_of(*next).key_dim == attention_of(*next).value_dim;
    if (is_linear && instruction.epilogue == KVL_RESIDUAL) return next->kind == KVL_NORM_QUANT && has_strips(instruction, 0);
    if (next->kind != KVL_QUANT) return false;
    const Linear& reader = model_.linears[size_t(next->linear)];
    const bool needs_rows = is_whole(reader.activation_format());
    if (is_linear && next->source == KVL_FROM_MLP && (is_gate(instruction.epilogue) || is_pointwise(instruction.epilogue)))
        return !needs_rows || has_strips(instruction, reader.padded_cols);
    if (needs_rows || instruction.kind != KVL_ATTENTION) return false;
    return next->source == KVL_FROM_ATTENTION && attention_of(instruction).value_dim % kPad == 0;
}

bool Step::is_done(const kvl_instruction& instruction) const {
    return &instruction != model_.program.data() && does_next((&instruction)[-1]);
}

// Whether the instruction after a linear works on whole rows.
bool Step::precedes_rows(const kvl_instruction& linear) const {
    const kvl_instruction* const next = &linear + 1;
    if (next == model_.program.data() + model_.program.size()) return false;
    if (linear.epilogue == KVL_RESIDUAL) return next->kind == KVL_NORM_QUANT;
    return next->kind == KVL_QUANT && is_whole(model_.linears[size_t(next->linear)].activation_format());
}

// Divides the rows into strips, each of which a thread multiplies by panels of the linear at a time: as many strips for
// each thread, unless these would have less than kLeastStrip rows.
Passes Step::strips_of(const kvl_instruction& linear, int64_t rows) const {
    const bool unpacks = has_groups(model_.linears[size_t(linear.linear)].activation_format());
    const int64_t most = precedes_rows(linear) && !unpacks ? kStripRows : kTileRows;
    const int64_t least = (rows + most - 1) / most, even = round_up(least, model_.pool.size());
    return Passes::of_blocks(rows, rows / even >= kLeastStrip ? even : least, kStripBlock);
}

// Whether one thread can multiply a strip by all panels of a linear: each thread has equally many strips, and `floats`
// floats per row, which must be kept until the row is complete, fit the cache.
bool Step::has_strips(const kvl_instruction& linear, int64_t floats) const {
    const Passes strips = strips_of(linear, batch_.num_tokens);
    return strips.count % model_.pool.size() == 0 && strips.most() * floats <= kStripFloats;
}

// Number of panels of a unit, the smallest output on which the next instruction can run: a head, kPad columns of the
// next linear's input, or whole rows.
int64_t Step::panels_of_unit(const kvl_instruction& linear) const {
    const kvl_instruction& next = (&linear)[1];
    if (linear.epilogue == KVL_TO_QKV) return attention_of(next).key_dim / kPanel;
    const int64_t panels = model_.linears[size_t(linear.linear)].panels;
    const int64_t least = kPad / (is_gate(linear.epilogue) ? kLanes : kPanel);
    if (next.kind == KVL_NORM_QUANT) return panels;
    return is_whole(model_.linears[size_t(next.linear)].activation_format()) ? round_up(panels, least) : least;
}

// Multiplies the panels of unit `index` by the rows `span`, at most kTileRows, and runs the next instruction on the
// results. Returns whether the caller wins the claim; else nothing is written. If the results are added to the residual
// stream, it must win first.
bool Step::unit(const kvl_instruction& instruction, int64_t index, const Activations& x, Span span, Claim& claim, int thread) {
    const bool adds = instruction.epilogue == KVL_RESIDUAL;
    if (adds && !claim.wins()) return false;
    const int64_t panels = panels_of_unit(instruction), each = is_gate(instruction.epilogue) ? kLanes : kPanel;
    const int64_t width = panels * each, first = index * panels;
    float* const floats = scratch_.unit[size_t(thread)] - span.begin * width;  // those of row r are at r * width
    for (int64_t p = first; p < first + panels; p += kPanelsTogether) {
        const Span few{p, std::min(p + kPanelsTogether, first + panels)};
        multiply_few(instruction, few, x, span, Rows{floats + (p - first) * each, width});
    }
    if (!adds && !claim.wins()) return false;
    for (int64_t r = span.begin; r < span.end; r++) follow((&instruction)[1], r, index, floats + r * width, thread);
    return true;
}

// Multiplies panels [few.begin, few.end), at most kPanelsTogether, by `rows`. floats: destination of the results, from
// the first panel on, unless they are added to the residual stream. Panels after the linear's last give zeros.
void Step::multiply_few(const kvl_instruction& instruction, Span few, const Activations& x, Span rows, Rows floats) {
    const Linear& linear = model_.linears[size_t(instruction.linear)];
    const int64_t each = is_gate(instruction.epilogue) ? kLanes : kPanel;
    alignas(64) float sums[kTileRows * kPanel];
    Epilogue epilogues[kPanelsTogether];
    Pass passes[kPanelsTogether];
    for (int64_t p = few.begin, same = p; p < few.end; p++) {  // [same, p]: panels of one format
        if (p >= linear.panels) {
            for (int64_t r = rows.begin; r < rows.end; r++) std::fill_n(floats.row(r) + (p - few.begin) * each, each, 0.0f);
            continue;
        }
        Epilogue& epilogue = epilogues[p - same] = epilogue_of(instruction, p, 0);
        epilogue.padding = 0;
        if (!epilogue.adds) {
            epilogue.to = floats.at + (p - few.begin) * each;
            epilogue.stride = floats.stride;
            epilogue.is_near = instruction.epilogue == KVL_TO_QKV || floats.stride <= kPad;
        }
        passes[p - same] = {x, rows.begin, linear.padded_cols, linear.panel(p), sums, &epilogue};
        const Way way(linear.format(p), rows.end - rows.begin, model_.unit);
        const bool is_last = p + 1 == std::min(few.end, linear.panels) || linear.format(p + 1) != linear.format(p);
        // several passes run panel by panel, so that the panel stays in the first-level cache
        if (!is_last && way.passes.count == 1) continue;
        for (int64_t i = 0; i < way.passes.count; i++) {
            const int64_t begin = way.passes.begin(i), end = way.passes.begin(i + 1);
            for (Pass* pass = passes; pass <= passes + (p - same); pass++) pass->row = rows.begin + begin, pass->ahead = way.ahead(i, linear.padded_cols);
            way.multiply(passes, p - same + 1, int(end - begin));
        }
        same = p + 1;
    }
}

// Runs an instruction on the output of the linear before it for one row: the floats x of unit `index`, or, for a norm,
// the row of the residual stream.
void Step::follow(const kvl_instruction& next, int64_t row, int64_t index, float* x, int thread) {
    if (next.kind == KVL_ROPE_KV) {
        if (shape_.kv_format == KVL_KV_INT8) place_head<Int8Cache>(next, row, int(index), x);
        else place_head<Bf16Cache>(next, row, int(index), x);
        return;
    }
    const Linear& reader = model_.linears[size_t(next.linear)];
    const int format = reader.activation_format();
    if (next.kind == KVL_QUANT && !is_whole(format)) return store_columns(next, row, index * kPad, x, kPad);
    const float* from = next.kind == KVL_QUANT ? x : float_row(next, row, scratch_.row[size_t(thread)]);
    store_activations(activations(next, batch_.num_tokens, thread), row, from, reader.padded_cols, format);
}

// Quantises `count` columns, from `first` on, of a row of the next linear's input; both are multiples of kPad.
void Step::store_columns(const kvl_instruction& quant, int64_t row, int64_t first, const float* x, int64_t count) const {
    const Linear& linear = model_.linears[size_t(quant.linear)];
    const int format = linear.activation_format();
    const int64_t at = row * linear.padded_cols + first;
    const Activations& to = activations(quant, batch_.num_tokens, 0);
    const Activations columns{to.data + at * (format == KVL_BF16 ? 2 : 1), to.scale + at / group_size(format), to.sum + at / run_size(format)};
    store_activations(columns, 0, x, count, format);
}

}  // namespace kvl
