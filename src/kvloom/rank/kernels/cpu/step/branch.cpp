// Step: norms behind the branches of a layer, and the inputs that layers get besides the residual stream.
#include <algorithm>
#include <cmath>

#include "activations/gates.hpp"
#include "step/step.hpp"

namespace kvl {

// KVL_ADD_NORMED: normalises a branch's output and adds it to the residual stream.
void Step::add_normed(const kvl_instruction& instruction, int thread) {
    const int64_t count = model_.hidden_stride();
    const Rows& from = instruction.source == 1 ? scratch_.beside : scratch_.branch;
    const float* last = vector(instruction.vector2);
    float* normed = scratch_.row[size_t(thread)];
    const F32 scale = splat(shape_.residual_scale), whole = splat(last ? *last : 1.0f);
    for (int64_t r = deal(batch_.num_tokens, thread); r < deal(batch_.num_tokens, thread + 1); r++) {
        float* to = scratch_.residual.row(r);
        rms_norm(from.row(r), vector(instruction.vector), count, shape_.hidden, shape_.norm_eps, normed);
        for (int64_t k = 0; k < count; k += kLanes) store(to + k, mul(fma(load(normed + k), scale, load(to + k)), whole));
    }
    sync(thread);
}

// KVL_NORM_BRANCH. Needs no barrier: each thread has the same rows in KVL_ADD_NORMED, and others add to a branch only
// after one.
void Step::norm_branch(const kvl_instruction& instruction, int thread) {
    const int64_t count = model_.hidden_stride();
    for (int64_t r = deal(batch_.num_tokens, thread); r < deal(batch_.num_tokens, thread + 1); r++) {
        float *const own = scratch_.branch.row(r), *const to = scratch_.beside.row(r);
        rms_norm(own, vector(instruction.vector), count, shape_.hidden, shape_.norm_eps, own);
        for (int64_t k = 0; k < count; k += kLanes) {
            store(to + k, instruction.source == 1 ? add(load(to + k), load(own + k)) : load(own + k));
            store(own + k, splat(0));
        }
    }
}

int64_t width_joined(const kvl_model& model) {
    for (const kvl_instruction& i : model.program)
        if (i.kind == KVL_JOIN) return model.linears[size_t(i.linear)].padded_cols;
    return 0;
}

// KVL_JOIN.
void Step::join(const kvl_instruction& instruction, int thread) {
    const int64_t hidden = shape_.hidden, stride = model_.hidden_stride();
    const int64_t width = model_.linears[size_t(instruction.linear)].padded_cols;
    float* const room = scratch_.row[size_t(thread)];
    share_rows(index_of(instruction), batch_.num_tokens, thread, [&](int64_t token) {
        float *const own = scratch_.residual.row(token), *const to = scratch_.qkv.row(token);
        const float* const state = batch_.layer_rows + token * hidden;
        rms_norm(own, vector(instruction.vector), stride, hidden, shape_.norm_eps, room);
        std::copy(room, room + hidden, to);
        std::fill(std::copy(state, state + hidden, room), room + stride, 0.0f);
        rms_norm(room, vector(instruction.vector2), stride, hidden, shape_.norm_eps, room);
        std::fill(std::copy(room, room + hidden, to + hidden), to + width, 0.0f);
        std::fill(own, own + hidden, 0.0f);
    });
}

// KVL_LAYER_INPUTS: changes the output of KVL_TO_INPUTS in place.
void Step::make_inputs(const kvl_instruction& instruction, int thread) {
    const int64_t size = instruction.source, width = model_.linears[size_t((&instruction)[-1].linear)].rows;
    const F32 scale = splat(1.0f / std::sqrt(float(shape_.hidden))), half = splat(std::sqrt(0.5f));
    share_rows(index_of(instruction), batch_.num_tokens, thread, [&](int64_t token) {
        const float* from = batch_.layer_rows + token * width;
        for (float* own = scratch_.inputs.row(token); own < scratch_.inputs.row(token) + width; own += size, from += size) {
            for (int64_t k = 0; k < size; k += kLanes) store(own + k, mul(load(own + k), scale));
            rms_norm(own, vector(instruction.vector), size, size, shape_.norm_eps, own);
            for (int64_t k = 0; k < size; k += kLanes) store(own + k, mul(add(load(own + k), load(from + k)), half));
        }
    });
}

// The input x[cols] of a linear with zeros behind it, where others may have left something: in memory or in `room`.
static const float* padded(const Linear& linear, const float* x, float* room) {
    if (linear.cols == linear.padded_cols) return x;
    std::fill(std::copy_n(x, linear.cols, room), room + linear.padded_cols, 0.0f);
    return room;
}

// The floats that KVL_QUANT quantises of a row, in memory or made in `room`.
const float* Step::source_row(const kvl_instruction& quant, int64_t row, float* room) const {
    const Linear& linear = model_.linears[size_t(quant.linear)];
    switch (quant.source) {
        case KVL_FROM_GATE_UP: return activate(quant.epilogue, shape_, scratch_.qkv.row(row), linear.cols, room);
        case KVL_FROM_INPUTS: return gated_inputs(quant, row, linear.cols, room);
        case KVL_FROM_NORMED_MIXER:
            return norm_groups(model_, model_.mamba2s[size_t(quant.layer)], scratch_.mixed.row(row), linear.padded_cols, room);
        case KVL_FROM_MIXER: return padded(linear, scratch_.mixed.row(row), room);
        case KVL_FROM_RESIDUAL: return scratch_.residual.row(row);
        case KVL_FROM_QKV: return padded(linear, scratch_.qkv.row(row) + quant.at, room);
        case KVL_FROM_MLP: return scratch_.mlp.row(row);
        default: return scratch_.attended.row(row);
    }
}

// KVL_FROM_INPUTS: what a layer gets of a row's token, `size` numbers, gated; padded with zeros.
const float* Step::gated_inputs(const kvl_instruction& instruction, int64_t row, int64_t size, float* room) const {
    const float* const own = scratch_.inputs.row(row) + instruction.layer * size;
    const float* const gates = scratch_.qkv.row(row);
    for (int64_t k = 0; k < size; k += kLanes) store(room + k, gated(instruction.epilogue, shape_, load(gates + k), load(own + k)));
    for (int64_t k = size; k < round_up(size, kPad); k += kLanes) store(room + k, splat(0));
    return room;
}

}  // namespace kvl
