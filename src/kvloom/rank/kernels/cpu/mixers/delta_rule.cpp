// The gated delta rule (Yang et al. 2024) with its depthwise causal convolution, and with a decay for each head or for each
// channel of a key; DeltaRule and KimiDelta of families/mixers.py say what it computes.
//
// Memory of a sequence: the last conv_width - 1 inputs of the convolution, [conv_width - 1][channels], oldest first; then
// a state for each value head, in strips of kLanes columns: [v_dim / kLanes][k_dim][kLanes]. A step reads and writes each
// strip once for kMixerTokens tokens; in between it stays in the first-level cache.
#include <cmath>

#include "isa/simd.hpp"
#include "mixers/mixer.hpp"

namespace kvl {
namespace {

constexpr float kUnitEps = 1e-6f;  // below the root of the squares of queries and keys
constexpr int kStripsOnce = 4;     // strips that share each broadcast of a key and of a query

// Factors of the parts of a value head's state that a token leaves: one for all of it, or one for each channel of a key.
int64_t num_decays(const kvl_delta_rule& mixer) { return mixer.decays_channels ? mixer.k_dim : 1; }

// A key head: where its channels are, and the floats of a few tokens: [tokens][q, k, v of each value head], then q . k of
// each token, then [tokens][num_decays] of the value head that is computed.
struct Head {
    const kvl_delta_rule& mixer;
    const MixerRows& rows;
    int64_t index, each, keys, channels;  // each: value heads of a key head; channels of all keys; of the convolution

    Head(const kvl_delta_rule& mixer, const MixerRows& rows, int64_t index)
        : mixer(mixer), rows(rows), index(index), each(mixer.num_v_heads / mixer.num_k_heads),
          keys(int64_t(mixer.num_k_heads) * mixer.k_dim), channels(2 * keys + mixer_width(mixer)) {}

    int64_t value_head(int64_t i) const { return mixer.is_tiled ? i * mixer.num_k_heads + index : index * each + i; }
    int64_t width() const { return 2 * mixer.k_dim + each * mixer.v_dim; }
    float* query(int64_t t) const { return rows.room + t * width(); }
    float* key(int64_t t) const { return query(t) + mixer.k_dim; }
    float* value(int64_t t, int64_t i) const { return query(t) + 2 * mixer.k_dim + i * mixer.v_dim; }
    float& product(int64_t t) const { return rows.room[kMixerTokens * width() + t]; }
    float* stays(int64_t t) const { return rows.room + kMixerTokens * (width() + 1) + t * num_decays(mixer); }
    float* before(int64_t j) const { return rows.memory + j * channels; }
    float* state(int64_t value_head) const {
        return before(mixer.conv_width - 1) + value_head * mixer.k_dim * mixer.v_dim;
    }

    // work(first channel, number of channels, first float of a token's row): q, k, then v of each value head.
    template <class Work>
    void each_section(const Work& work) const {
        work(index * mixer.k_dim, mixer.k_dim, 0);
        work(keys + index * mixer.k_dim, mixer.k_dim, mixer.k_dim);
        for (int64_t i = 0; i < each; i++)
            work(2 * keys + value_head(i) * mixer.v_dim, mixer.v_dim, 2 * mixer.k_dim + i * mixer.v_dim);
    }
};

// Makes the head's part of the memory zero.
void clear(const Head& head) {
    head.each_section([&](int64_t channel, int64_t count, int64_t) {
        for (int j = 0; j < head.mixer.conv_width - 1; j++) std::fill_n(head.before(j) + channel, count, 0.0f);
    });
    for (int64_t i = 0; i < head.each; i++)
        std::fill_n(head.state(head.value_head(i)), int64_t(head.mixer.k_dim) * head.mixer.v_dim, 0.0f);
}

// Channels of the convolution's input at token t of the step; below 0 are those of earlier steps.
const float* input(const Head& head, int64_t t) {
    return t < 0 ? head.before(head.mixer.conv_width - 1 + t) : head.rows.in.row(t);
}

// Convolution and SiLU of tokens [first, first + count).
void convolve(const Head& head, const float* weights, int64_t first, int64_t count) {
    const int width = head.mixer.conv_width;
    head.each_section([&](int64_t channel, int64_t size, int64_t at) {
        for (int64_t c = 0; c < size; c += kLanes)
            for (int64_t t = 0; t < count; t++) {
                F32 total = splat(0);
                for (int j = 0; j < width; j++) {
                    const float* x = input(head, first + t - width + 1 + j);
                    total = fma(load(weights + j * head.channels + channel + c), load(x + channel + c), total);
                }
                store(head.query(t) + at + c, silu(total));
            }
    });
}

// Keeps the last inputs of the convolution. In order: an input moves towards the beginning.
void keep(const Head& head) {
    const int64_t kept = head.mixer.conv_width - 1;
    head.each_section([&](int64_t channel, int64_t size, int64_t) {
        for (int64_t j = 0; j < kept; j++)
            std::copy_n(input(head, head.rows.count - kept + j) + channel, size, head.before(j) + channel);
    });
}

// x[count] divided by its norm, times `factor`.
void make_unit(float* x, int64_t count, float factor) {
    F32 squares = splat(0);
    for (int64_t i = 0; i < count; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
    const F32 scale = splat(factor / std::sqrt(sum(squares) + kUnitEps));
    for (int64_t i = 0; i < count; i += kLanes) store(x + i, mul(load(x + i), scale));
}

void make_units(const Head& head, int64_t count) {
    const int64_t dim = head.mixer.k_dim;
    for (int64_t t = 0; t < count; t++) {
        make_unit(head.query(t), dim, 1 / std::sqrt(float(dim)));
        make_unit(head.key(t), dim, 1);
        F32 total = splat(0);
        for (int64_t i = 0; i < dim; i += kLanes) total = fma(load(head.query(t) + i), load(head.key(t) + i), total);
        head.product(t) = sum(total);
    }
}

// What a token does to a value head's state: how much of it stays (num_decays factors), and how much of the difference is
// written.
struct Gates {
    const float* stays;
    float writes;
};

Gates gates_of(const kvl_model& model, const kvl_delta_rule& mixer, const float* row, int64_t value_head, float* stays) {
    const int64_t count = num_decays(mixer), first = value_head * count;
    const float *const a = row + mixer.decay_at + first, *const bias = model.vectors[size_t(mixer.decay_bias)].data() + first;
    const float decay = model.vectors[size_t(mixer.decay)][size_t(value_head)];
    if (mixer.decays_channels)
        for (int64_t i = 0; i < count; i += kLanes)
            store(stays + i, exp2(mul(splat(decay * kLog2E), softplus(add(load(a + i), load(bias + i))))));
    else
        *stays = float(std::exp(double(decay) * softplus(double(*a + *bias))));
    return {stays, float(1 / (1 + std::exp(-double(row[mixer.beta_at + value_head]))))};
}

// One token at N strips of a state [N][k_dim][kLanes]. From S comes the output o = (stays S) q + (q . k) d and the new
// state stays S + k d, with d = writes (v - (stays S) k): the state is read for both products at once. What stays of each
// channel multiplies keys and queries, what stays of all the products.
template <int N, bool kByChannel>
void advance(float* state, int64_t dim, const float* q, const float* k, float product, Gates gates, const float* v, float* out) {
    F32 by_key[N], by_query[N], delta[N];
    const F32 all = splat(*gates.stays), writes = splat(gates.writes);
    const auto left = [&](F32 x) { return kByChannel ? x : mul(all, x); };
    for (int s = 0; s < N; s++) by_key[s] = by_query[s] = splat(0);
    for (int64_t i = 0; i < dim; i++) {
        const float part = kByChannel ? gates.stays[i] : 1.0f;
        const F32 key = splat(part * k[i]), query = splat(part * q[i]);
#pragma GCC unroll 4
        for (int s = 0; s < N; s++) {
            const F32 held = load(state + (s * dim + i) * kLanes);
            by_key[s] = fma(key, held, by_key[s]);
            by_query[s] = fma(query, held, by_query[s]);
        }
    }
    for (int s = 0; s < N; s++) {
        delta[s] = mul(writes, sub(load(v + s * kLanes), left(by_key[s])));
        store(out + s * kLanes, fma(splat(product), delta[s], left(by_query[s])));
    }
    for (int64_t i = 0; i < dim; i++) {
        const F32 key = splat(k[i]), stays = kByChannel ? splat(gates.stays[i]) : all;
#pragma GCC unroll 4
        for (int s = 0; s < N; s++) {
            float* const at = state + (s * dim + i) * kLanes;
            store(at, fma(key, delta[s], mul(stays, load(at))));
        }
    }
}

// The recurrence of value head i over prepared tokens, N strips from column `column` on.
template <int N, bool kByChannel>
void advance_strips(const Head& head, int64_t i, int64_t column, int64_t first, int64_t count, const Gates* gates) {
    const int64_t own = head.value_head(i), dim = head.mixer.k_dim;
    float* const state = head.state(own) + column * dim;
    for (int64_t t = 0; t < count; t++)
        advance<N, kByChannel>(state, dim, head.query(t), head.key(t), head.product(t), gates[t], head.value(t, i) + column,
                   head.rows.out.row(first + t) + own * head.mixer.v_dim + column);
}

// The same of all its strips.
template <bool kByChannel>
void advance_all(const Head& head, int64_t i, int64_t first, int64_t count, const Gates* gates) {
    constexpr int64_t kWide = kStripsOnce * kLanes;
    int64_t column = 0;
    for (; column + kWide <= head.mixer.v_dim; column += kWide)
        advance_strips<kStripsOnce, kByChannel>(head, i, column, first, count, gates);
    for (; column < head.mixer.v_dim; column += kLanes) advance_strips<1, kByChannel>(head, i, column, first, count, gates);
}

// RMSNorm of a value head's output, times the norm's weights and the gate.
void finish(const Head& head, const float* weights, int64_t value_head, int64_t t) {
    const int64_t dim = head.mixer.v_dim;
    float* const out = head.rows.out.row(t) + value_head * dim;
    const float* const gate = head.rows.in.row(t) + head.mixer.gate_at + value_head * dim;
    rms_norm(out, weights, dim, dim, head.rows.eps, out);
    for (int64_t i = 0; i < dim; i += kLanes) {
        const F32 x = load(gate + i);
        store(out + i, mul(load(out + i), head.mixer.gates_by_sigmoid ? sigmoid(x) : silu(x)));
    }
}

}  // namespace

int64_t mixer_room(const kvl_delta_rule& mixer) {
    const int64_t each = mixer.num_v_heads / mixer.num_k_heads;
    return kMixerTokens * (2 * int64_t(mixer.k_dim) + each * mixer.v_dim + 1 + num_decays(mixer));
}

void delta_rule(const kvl_model& model, const kvl_delta_rule& mixer, const MixerRows& rows, int64_t key_head) {
    const Head head(mixer, rows, key_head);
    Gates gates[kMixerTokens];
    if (rows.is_first) clear(head);
    for (int64_t first = 0; first < rows.count; first += kMixerTokens) {
        const int64_t count = std::min<int64_t>(kMixerTokens, rows.count - first);
        convolve(head, model.vectors[size_t(mixer.conv)].data(), first, count);
        make_units(head, count);
        for (int64_t i = 0; i < head.each; i++) {
            const int64_t own = head.value_head(i);
            for (int64_t t = 0; t < count; t++) gates[t] = gates_of(model, mixer, rows.in.row(first + t), own, head.stays(t));
            mixer.decays_channels ? advance_all<true>(head, i, first, count, gates) : advance_all<false>(head, i, first, count, gates);
            for (int64_t t = 0; t < count; t++) finish(head, model.vectors[size_t(mixer.norm)].data(), own, first + t);
        }
    }
    keep(head);
}

}  // namespace kvl

int32_t kvl_add_delta_rule(kvl_model* model, const kvl_delta_rule* mixer) {
    return kvl::or_out_of_memory([=] {
        model->delta_rules.push_back(*mixer);
        return int32_t(model->delta_rules.size()) - 1;
    });
}
