// The gated delta rule (Yang et al. 2024) with its depthwise causal convolution; DeltaRule of families/mixers.py says
// what it computes.
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

// A key head: where its channels are, and the floats of a few tokens: [tokens][q, k, v of each value head], then q . k of
// each token.
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

// What a token does to a value head's state: how much of it stays, and how much of the difference is written.
struct Gates {
    float stays, writes;
};

Gates gates_of(const kvl_model& model, const kvl_delta_rule& mixer, const float* row, int64_t value_head) {
    const double a = row[mixer.decay_at + value_head] + model.vectors[size_t(mixer.decay_bias)][size_t(value_head)];
    const double decay = model.vectors[size_t(mixer.decay)][size_t(value_head)];
    return {float(std::exp(decay * softplus(a))), float(1 / (1 + std::exp(-double(row[mixer.beta_at + value_head]))))};
}

// One token at N strips of a state [N][k_dim][kLanes]. From S comes the output o = stays (S q) + (q . k) d and the new
// state stays S + k d, with d = writes (v - stays (S k)): the state is read for both products at once.
template <int N>
void advance(float* state, int64_t dim, const float* q, const float* k, float product, Gates gates, const float* v, float* out) {
    F32 by_key[N], by_query[N], delta[N];
    const F32 stays = splat(gates.stays), writes = splat(gates.writes);
    for (int s = 0; s < N; s++) by_key[s] = by_query[s] = splat(0);
    for (int64_t i = 0; i < dim; i++) {
        const F32 key = splat(k[i]), query = splat(q[i]);
#pragma GCC unroll 4
        for (int s = 0; s < N; s++) {
            const F32 held = load(state + (s * dim + i) * kLanes);
            by_key[s] = fma(key, held, by_key[s]);
            by_query[s] = fma(query, held, by_query[s]);
        }
    }
    for (int s = 0; s < N; s++) {
        delta[s] = mul(writes, sub(load(v + s * kLanes), mul(stays, by_key[s])));
        store(out + s * kLanes, fma(splat(product), delta[s], mul(stays, by_query[s])));
    }
    for (int64_t i = 0; i < dim; i++) {
        const F32 key = splat(k[i]);
#pragma GCC unroll 4
        for (int s = 0; s < N; s++) {
            float* const at = state + (s * dim + i) * kLanes;
            store(at, fma(key, delta[s], mul(stays, load(at))));
        }
    }
}

// The recurrence of value head i over prepared tokens, N strips from column `column` on.
template <int N>
void advance_all(const Head& head, int64_t i, int64_t column, int64_t first, int64_t count, const Gates* gates) {
    const int64_t own = head.value_head(i), dim = head.mixer.k_dim;
    float* const state = head.state(own) + column * dim;
    for (int64_t t = 0; t < count; t++)
        advance<N>(state, dim, head.query(t), head.key(t), head.product(t), gates[t], head.value(t, i) + column,
                   head.rows.out.row(first + t) + own * head.mixer.v_dim + column);
}

// RMSNorm of a value head's output, times the norm's weights and SiLU of the gate.
void finish(const Head& head, const float* weights, int64_t value_head, int64_t t) {
    const int64_t dim = head.mixer.v_dim;
    float* const out = head.rows.out.row(t) + value_head * dim;
    const float* const gate = head.rows.in.row(t) + head.mixer.gate_at + value_head * dim;
    rms_norm(out, weights, dim, dim, head.rows.eps, out);
    for (int64_t i = 0; i < dim; i += kLanes) store(out + i, mul(load(out + i), silu(load(gate + i))));
}

}  // namespace

int64_t mixer_room(const kvl_delta_rule& mixer) {
    const int64_t each = mixer.num_v_heads / mixer.num_k_heads;
    return kMixerTokens * (2 * int64_t(mixer.k_dim) + each * mixer.v_dim + 1);
}

void delta_rule(const kvl_model& model, const kvl_delta_rule& mixer, const MixerRows& rows, int64_t key_head) {
    const Head head(mixer, rows, key_head);
    constexpr int64_t kWide = kStripsOnce * kLanes;
    Gates gates[kMixerTokens];
    if (rows.is_first) clear(head);
    for (int64_t first = 0; first < rows.count; first += kMixerTokens) {
        const int64_t count = std::min<int64_t>(kMixerTokens, rows.count - first);
        convolve(head, model.vectors[size_t(mixer.conv)].data(), first, count);
        make_units(head, count);
        for (int64_t i = 0; i < head.each; i++) {
            const int64_t own = head.value_head(i);
            for (int64_t t = 0; t < count; t++) gates[t] = gates_of(model, mixer, rows.in.row(first + t), own);
            int64_t column = 0;
            for (; column + kWide <= mixer.v_dim; column += kWide) advance_all<kStripsOnce>(head, i, column, first, count, gates);
            for (; column < mixer.v_dim; column += kLanes) advance_all<1>(head, i, column, first, count, gates);
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
