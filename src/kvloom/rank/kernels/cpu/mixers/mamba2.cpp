// Mamba-2 (Dao and Gu 2024) behind its convolution; Mamba2 of families/mixers.py says what it computes.
//
// It keeps a state for each head, in strips of kLanes channels: [head_dim / kLanes][state_dim][kLanes]. A step reads and
// writes each strip once for kMixerTokens tokens, a few columns of it at a time, which stay in registers.
#include <algorithm>

#include "isa/simd.hpp"
#include "mixers/mixer.hpp"

namespace kvl {
namespace {

constexpr int kColumns = 4;  // of a strip that are in registers at once

// A head, and where its channels are.
struct SpaceHead {
    const kvl_model& model;
    const kvl_mamba2& mixer;
    const MixerRows& rows;
    int64_t index, b_at, c_at;  // the channels of its group's B and C

    SpaceHead(const kvl_model& model, const kvl_mamba2& mixer, const MixerRows& rows, int64_t index)
        : model(model), mixer(mixer), rows(rows), index(index) {
        const int64_t group = index / (mixer.num_heads / mixer.num_groups);
        b_at = mixer.x_at + mixer_width(mixer) + group * mixer.state_dim;
        c_at = b_at + int64_t(mixer.num_groups) * mixer.state_dim;
    }

    float weight(int32_t vector) const { return model.vectors[size_t(vector)][size_t(index)]; }
    int64_t channel(int64_t strip) const { return index * mixer.head_dim + strip * kLanes; }
    float* state(int64_t strip) const { return rows.memory + channel(strip) * mixer.state_dim; }
};

// What a token does to a head's state: how much of it stays, and the factor of what is added.
struct SpaceGates {
    float stays, step;
};

SpaceGates gates_of(const SpaceHead& head, int64_t t) {
    const kvl_mamba2& mixer = head.mixer;
    const double asked = softplus(double(head.rows.in.row(t)[mixer.decay_at + head.index]) + head.weight(mixer.decay_bias));
    const double step = std::min<double>(std::max<double>(asked, mixer.least_step), mixer.most_step);
    return {float(std::exp(head.weight(mixer.decay) * step)), float(step)};
}

// The recurrence of tokens [first, first + count) at kColumns columns of a strip, [kColumns][kLanes]: changes the state S,
// and adds S C to the output of each token. scaled: step x.
void advance(const SpaceHead& head, float* state, int64_t column, int64_t first, int64_t count, const SpaceGates* gates,
             const float* scaled, float* out) {
    F32 held[kColumns];
    for (int i = 0; i < kColumns; i++) held[i] = load(state + i * kLanes);
    for (int64_t t = 0; t < count; t++) {
        const float* const row = head.rows.in.row(first + t);
        const float *const b = row + head.b_at + column, *const c = row + head.c_at + column;
        const F32 stays = splat(gates[t].stays), x = load(scaled + t * kLanes);
        F32 total = splat(0);
#pragma GCC unroll 4
        for (int i = 0; i < kColumns; i++) {
            held[i] = fma(splat(b[i]), x, mul(stays, held[i]));
            total = fma(splat(c[i]), held[i], total);
        }
        store(out + t * kLanes, add(load(out + t * kLanes), total));
    }
    for (int i = 0; i < kColumns; i++) store(state + i * kLanes, held[i]);
}

// A strip of tokens [first, first + count), at most kMixerTokens.
void advance_strip(const SpaceHead& head, int64_t strip, int64_t first, int64_t count, const SpaceGates* gates) {
    const kvl_mamba2& mixer = head.mixer;
    alignas(64) float scaled[kMixerTokens * kLanes], out[kMixerTokens * kLanes];
    const int64_t channel = head.channel(strip);
    const F32 skip = splat(head.weight(mixer.skip));
    const auto x = [&](int64_t t) { return load(head.rows.in.row(first + t) + mixer.x_at + channel); };
    for (int64_t t = 0; t < count; t++) {
        store(scaled + t * kLanes, mul(splat(gates[t].step), x(t)));
        store(out + t * kLanes, splat(0));
    }
    float* const state = head.state(strip);
    for (int64_t column = 0; column < mixer.state_dim; column += kColumns)
        advance(head, state + column * kLanes, column, first, count, gates, scaled, out);
    for (int64_t t = 0; t < count; t++) {
        const F32 gate = silu(load(head.rows.in.row(first + t) + mixer.gate_at + channel));
        store(head.rows.out.row(first + t) + channel, mul(fma(skip, x(t), load(out + t * kLanes)), gate));
    }
}

}  // namespace

void mamba2(const kvl_model& model, const kvl_mamba2& mixer, const MixerRows& rows, int64_t index) {
    const SpaceHead head(model, mixer, rows, index);
    if (rows.is_first) std::fill_n(head.state(0), int64_t(mixer.head_dim) * mixer.state_dim, 0.0f);
    SpaceGates gates[kMixerTokens];
    for (int64_t first = 0; first < rows.count; first += kMixerTokens) {
        const int64_t count = std::min<int64_t>(kMixerTokens, rows.count - first);
        for (int64_t t = 0; t < count; t++) gates[t] = gates_of(head, first + t);
        for (int64_t strip = 0; strip < mixer.head_dim / kLanes; strip++) advance_strip(head, strip, first, count, gates);
    }
}

const float* norm_groups(const kvl_model& model, const kvl_mamba2& mixer, const float* x, int64_t padded, float* room) {
    const int64_t width = mixer_width(mixer), each = width / mixer.num_groups;
    const float* const weights = model.vectors[size_t(mixer.norm)].data();
    for (int64_t at = 0; at < width; at += each) rms_norm(x + at, weights + at, each, each, model.shape.norm_eps, room + at);
    std::fill(room + width, room + padded, 0.0f);
    return room;
}

}  // namespace kvl

int32_t kvl_add_mamba2(kvl_model* model, const kvl_mamba2* mixer) {
    return kvl::or_out_of_memory([=] {
        model->mamba2s.push_back(*mixer);
        return int32_t(model->mamba2s.size()) - 1;
    });
}
