// Step: routing and computing mixtures of experts.
//
// Rows are grouped by expert, and only the weights of chosen experts are read. One thread adds the outputs of all
// experts for a panel of output channels, in the order of the experts' numbers, so a row's sum does not depend on other
// rows.
#include "experts/experts.hpp"

#include <cmath>
#include <cstring>

#include "step/step.hpp"

namespace kvl {

uint8_t* lay_out_experts(Scratch& s, const kvl_model& model, int64_t tokens, uint8_t* at) {
    ExpertScratch& e = s.experts;
    int64_t experts = 0, per_token = 0, channels = 0, apart = 0;
    for (const kvl_mixture& m : model.mixtures) {
        experts = std::max<int64_t>(experts, round_up(m.num_experts, kLanes));
        per_token = std::max<int64_t>(per_token, m.per_token);
        channels = std::max(channels, model.linears[size_t(m.first + 1)].padded_cols);
        apart = std::max(apart, model.linears[size_t(m.first)].panels * kPanel);
    }
    if (model.mixtures.empty()) return at;
    const int64_t threads = model.pool.size(), slots = tokens * per_token;
    e.logits = {take<float>(at, (tokens + 2 * threads) * experts), experts};
    e.gates = {take<float>(at, slots * channels), channels};
    e.apart = {take<float>(at, slots * apart), apart};
    e.chosen = take<Choice>(at, slots);
    e.shared = take<float>(at, tokens);
    e.slots = take_activations(at, slots, std::max(model.hidden_stride(), channels));
    e.own.resize(size_t(threads));
    for (Activations& own : e.own) own = take_activations(at, kOwnTokens * per_token, channels);
    e.own_chosen.assign(size_t(threads), std::vector<Choice>(size_t(kOwnTokens * per_token)));
    e.groups.resize(size_t(threads));
    for (Groups& groups : e.groups) groups.reserve(slots, experts);
    return at;
}

// KVL_ROUTE: normalises, quantises and scores rows, and chooses their experts. In small steps every thread quantises
// all rows, computes the logits of its share of the experts, and after a barrier chooses the experts of all rows for
// itself.
void Step::route(const kvl_instruction& instruction, int thread) {
    const kvl_mixture& mixture = model_.mixtures[size_t(instruction.layer)];
    const Linear& linear = model_.linears[size_t(instruction.linear)];
    ExpertScratch& e = scratch_.experts;
    const int64_t rows = batch_.num_tokens;
    const bool small = is_small(rows);
    const Activations& to = activations(instruction, rows, thread);
    for (int64_t r = small ? 0 : deal(rows, thread); r < (small ? rows : deal(rows, thread + 1)); r++) {
        const float* x = float_row(instruction, r, scratch_.row[size_t(thread)]);
        store_activations(to, r, x, linear.padded_cols, linear.activation_format());
        const float* read = vector(mixture.router_norm);
        float* const room = scratch_.row[size_t(thread)];
        if (read) rms_norm(scratch_.residual.row(r), read, model_.hidden_stride(), shape_.hidden, shape_.norm_eps, room);
        score_row(mixture, r, read ? room : x, thread);
        if (!small) choose_row(mixture, r, thread, e.chosen + r * mixture.per_token);
    }
    sync(thread);
    Choice* chosen = small ? e.own_chosen[size_t(thread)].data() : e.chosen;
    for (int64_t r = 0; small && r < rows; r++) choose_row(mixture, r, thread, chosen + r * mixture.per_token);
    e.groups[size_t(thread)].build(chosen, rows, mixture.per_token, mixture.num_experts);
    if (!small) gather(linear, to, thread);
}

// Computes the router's logits of a row (in a small step those of the thread's share of experts) and the weight of the
// shared expert.
void Step::score_row(const kvl_mixture& mixture, int64_t row, const float* x, int thread) {
    const bool small = is_small(batch_.num_tokens);
    const int64_t cols = model_.hidden_stride();
    const int64_t first = small ? deal(mixture.num_experts, thread) : 0;
    const int64_t end = small ? deal(mixture.num_experts, thread + 1) : mixture.num_experts;
    float* logits = scratch_.experts.logits.row(row);
    score(vector(mixture.router) + first * cols, x, cols, end - first, logits + first);
    const float* bias = vector(mixture.router_bias);
    for (int64_t i = first; bias && i < end; i++) logits[i] += bias[i];
    if (mixture.shared < 0 || (small && thread > 0)) return;
    float product;
    score(vector(mixture.shared), x, cols, 1, &product);
    scratch_.experts.shared[row] = 1.0f / (1.0f + exp2_scalar(-product * kLog2E));
}

void Step::choose_row(const kvl_mixture& mixture, int64_t row, int thread, Choice* out) {
    const Rows& logits = scratch_.experts.logits;
    float* own = logits.row(scratch_.capacity + thread);
    std::memcpy(own, logits.row(row), size_t(mixture.num_experts) * sizeof(float));
    const Routing routing{mixture.num_experts, mixture.per_token, mixture.weighs_chosen != 0, mixture.is_sigmoid != 0,
                          mixture.groups, mixture.kept_groups, mixture.scale, mixture.group_best, vector(mixture.correction)};
    if (routing.is_plain()) return choose(own, mixture.num_experts, mixture.per_token, routing.weighs_chosen, out);
    choose(own, logits.row(scratch_.capacity + model_.pool.size() + thread), routing, out);
}

// Copies the quantised rows into the order of their slots, so that the rows of an expert are contiguous. Ends with a
// barrier.
void Step::gather(const Linear& linear, const Activations& from, int thread) {
    const ExpertScratch& e = scratch_.experts;
    const Groups& groups = e.groups[size_t(thread)];
    const Activations& to = e.slots;
    const int format = linear.activation_format();
    const int64_t cols = linear.padded_cols, bytes = cols * (format == KVL_BF16 ? 2 : 1);
    const int64_t scales = num_scales(format, cols), sums = num_sums(format, cols);
    for (int64_t slot = deal(groups.slots(), thread); slot < deal(groups.slots(), thread + 1); slot++) {
        const int64_t row = groups.row[size_t(slot)];
        std::memcpy(to.data + slot * bytes, from.data + row * bytes, size_t(bytes));
        if (format == KVL_BF16) continue;
        std::memcpy(to.scale + slot * scales, from.scale + row * scales, size_t(scales) * sizeof(float));
        std::memcpy(to.sum + slot * sums, from.sum + row * sums, size_t(sums) * sizeof(int32_t));
    }
    sync(thread);
}

void Step::multiply_up(const kvl_instruction& instruction, int thread) {
    const Linear& any = model_.linears[size_t(model_.mixtures[size_t(instruction.layer)].first)];
    const int64_t groups = scratch_.experts.groups[size_t(thread)].size();
    if (batch_.num_tokens < kHandOutTokens) {
        for (int64_t g = 0; g < groups; g++)
            for (int64_t p = any.share(thread); p < any.share(thread + 1); p++) up_panel(instruction, g, p, thread);
        return sync(thread);
    }
    share_whole(index_of(instruction), groups * any.panels, thread, [&](int64_t i) {
        up_panel(instruction, i / any.panels, i % any.panels, thread);
    });
}

// Multiplies one panel of gate and up of the expert of `group` by the expert's rows, and stores the results in the
// scratch memory of experts.
void Step::up_panel(const kvl_instruction& instruction, int64_t group, int64_t index, int thread) {
    static_assert(kOwnTokens == 2, "the rows of an expert lie together in a small step, too");
    const kvl_mixture& mixture = model_.mixtures[size_t(instruction.layer)];
    const ExpertScratch& e = scratch_.experts;
    const Groups& groups = e.groups[size_t(thread)];
    const int64_t expert = groups.expert[size_t(group)], first = groups.begin[size_t(group)];
    const Linear& linear = model_.linears[size_t(mixture.first + 2 * expert)];
    const bool small = is_small(batch_.num_tokens);
    const Activations& x = small ? scratch_.own[size_t(thread)] : e.slots;
    const int64_t row = small ? groups.row[size_t(first)] : first;
    const float* bias = vector(mixture.up_bias);
    if (bias) bias += (expert * linear.panels + index) * kPanel;
    alignas(64) float sums[kTileRows * kPanel];
    const Way way(linear.format(index), groups.count(group), model_.unit);
    for (int64_t i = 0; i < way.passes.count; i++) {
        const int64_t begin = way.passes.begin(i), end = way.passes.begin(i + 1);
        way.multiply({x, row + begin, linear.padded_cols, linear.panel(index), sums}, int(end - begin));
        for (int64_t r = begin; r < end; r++) {
            F32 lo = load(sums + (r - begin) * kPanel), hi = load(sums + (r - begin) * kPanel + kLanes);
            if (bias) lo = add(lo, load(bias)), hi = add(hi, load(bias + kLanes));
            if (is_gate(instruction.epilogue)) {
                store(e.gates.row(first + r) + index * kLanes, gated(instruction.epilogue, shape_, lo, hi));
            } else if (is_pointwise(instruction.epilogue)) {
                store(e.gates.row(first + r) + index * kPanel, pointwise(instruction.epilogue, lo));
                store(e.gates.row(first + r) + index * kPanel + kLanes, pointwise(instruction.epilogue, hi));
            } else {
                store(e.apart.row(first + r) + index * kPanel, lo);
                store(e.apart.row(first + r) + index * kPanel + kLanes, hi);
            }
        }
    }
}

// KVL_EXPERTS_DOWN. In small steps every thread quantises all slots and reads its own panels, expert by expert. In
// large steps a thread that takes a panel computes it for all experts, because they add to the same output channels.
void Step::multiply_down(const kvl_instruction& instruction, int thread) {
    const Linear& any = model_.linears[size_t(instruction.linear)];
    const ExpertScratch& e = scratch_.experts;
    const Groups& groups = e.groups[size_t(thread)];
    const bool small = is_small(batch_.num_tokens);
    const int64_t slots = groups.slots();
    const Activations& to = small ? e.own[size_t(thread)] : e.slots;
    for (int64_t s = small ? 0 : deal(slots, thread); s < (small ? slots : deal(slots, thread + 1)); s++) {
        const float* x = e.gates.row(s);
        if (instruction.source == KVL_FROM_GATE_UP)
            x = activate(instruction.epilogue, shape_, e.apart.row(s), any.cols, scratch_.row[size_t(thread)]);
        store_activations(to, s, x, any.padded_cols, any.activation_format());
    }
    if (!small) sync(thread);
    if (batch_.num_tokens < kHandOutTokens) {
        for (int64_t g = 0; g < groups.size(); g++)
            for (int64_t p = any.share(thread); p < any.share(thread + 1); p++) down_panel(instruction, g, p, thread);
        return sync(thread);
    }
    share_whole(index_of(instruction), any.panels, thread, [&](int64_t p) {
        for (int64_t g = 0; g < groups.size(); g++) down_panel(instruction, g, p, thread);
    });
}

// Multiplies one panel of the down projection of the expert of `group` by the expert's rows, and adds the results,
// weighted by the router, to the residual stream.
void Step::down_panel(const kvl_instruction& instruction, int64_t group, int64_t index, int thread) {
    const kvl_mixture& mixture = model_.mixtures[size_t(instruction.layer)];
    const ExpertScratch& e = scratch_.experts;
    const Groups& groups = e.groups[size_t(thread)];
    const int64_t expert = groups.expert[size_t(group)], first = groups.begin[size_t(group)];
    const Linear& linear = model_.linears[size_t(mixture.first + 2 * expert + 1)];
    const Activations& x = is_small(batch_.num_tokens) ? e.own[size_t(thread)] : e.slots;
    const float* bias = vector(mixture.down_bias);
    if (bias) bias += (expert * linear.panels + index) * kPanel;
    alignas(64) float sums[kTileRows * kPanel];
    const Way way(linear.format(index), groups.count(group), model_.unit);
    for (int64_t i = 0; i < way.passes.count; i++) {
        const int64_t begin = way.passes.begin(i), end = way.passes.begin(i + 1);
        way.multiply({x, first + begin, linear.padded_cols, linear.panel(index), sums}, int(end - begin));
        for (int64_t r = begin; r < end; r++) {
            F32 lo = load(sums + (r - begin) * kPanel), hi = load(sums + (r - begin) * kPanel + kLanes);
            if (bias) lo = add(lo, load(bias)), hi = add(hi, load(bias + kLanes));
            const size_t slot = size_t(first + r);
            const F32 weight = splat(groups.weight[slot] * (mixture.to_branch ? 1.0f : shape_.residual_scale));
            float* to = (mixture.to_branch ? scratch_.branch : scratch_.residual).row(groups.row[slot]) + index * kPanel;
            store(to, fma(lo, weight, load(to)));
            store(to + kLanes, fma(hi, weight, load(to + kLanes)));
        }
    }
}

}  // namespace kvl

int32_t kvl_add_mixture(kvl_model* model, const kvl_mixture* mixture) {
    return kvl::or_out_of_memory([=] {
        model->mixtures.push_back(*mixture);
        return int32_t(model->mixtures.size()) - 1;
    });
}
