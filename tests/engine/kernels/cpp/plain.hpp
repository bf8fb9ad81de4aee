// A decoder in plain loops over doubles, with which whole steps are compared.
#pragma once

#include <algorithm>
#include <memory>
#include <numeric>

#include "check.hpp"
#include "layout.hpp"

using namespace kvl;
using Row = std::vector<double>;

// No size is a multiple of a panel or of the padding; a panel of gate and up is shared by 16 channels of each.
constexpr int kHidden = 48, kMlp = 40, kHeads = 6, kKvHeads = 2, kDim = 32, kVocab = 70, kLayers = 2, kBlocks = 40;
constexpr int kQueries = kHeads * kDim, kKeys = kKvHeads * kDim;
constexpr int kMaxPositions = 256, kMaxBlocks = kMaxPositions / kBlockTokens;

struct FreeModel {
    void operator()(kvl_model* model) const { kvl_free(model); }
};

struct Options {
    int kv_format, threads, window;
    bool has_bias, has_norms;
    bool is_apart = false;  // gate and up in panels of their own, the embedding in a linear: as files of mixed forms have them
    int experts = 0;  // in place of each layer's MLP, and sinks; where has_bias they have biases and clamped gates
};

constexpr int kPerToken = 2;
constexpr double kLimit = 1.2, kAlpha = 1.7;

// Most of the time of this reference: compiled with optimisation even where the rest of the program is not.
template <class Number>
__attribute__((optimize("O2"))) double dot(const Number* a, const double* b, size_t count) {
    double sum = 0;
    for (size_t i = 0; i < count; i++) sum += double(a[i]) * b[i];
    return sum;
}

// A matrix [rows][cols] of bf16 numbers, so that packing as bf16 loses nothing.
struct Matrix {
    int rows, cols;
    std::vector<float> values;
    Matrix(int rows, int cols) : rows(rows), cols(cols), values(noise(int64_t(rows) * cols, 1 / std::sqrt(float(cols)))) {
        for (float& value : values) value = bf16_to_float(float_to_bf16(value));
    }
    Row times(const Row& x) const {
        Row out(static_cast<size_t>(rows));
        for (size_t r = 0; r < out.size(); r++) out[r] = dot(&values[r * x.size()], x.data(), x.size());
        return out;
    }
};

struct Layer {
    Matrix q{kQueries, kHidden}, k{kKeys, kHidden}, v{kKeys, kHidden}, o{kHidden, kQueries};
    Matrix gate{kMlp, kHidden}, up{kMlp, kHidden}, down{kHidden, kMlp};
    std::vector<float> attention_norm = noise(kHidden), mlp_norm = noise(kHidden), q_norm = noise(kDim), k_norm = noise(kDim);
    std::vector<float> bias = noise(kQueries + 2 * kKeys), sinks = noise(kHeads, 2);
};

// Experts of a layer; the MLP of a layer stands for the shared one.
struct ExpertsOf {
    explicit ExpertsOf(int count)
        : router(count, kHidden), router_bias(noise(count)), mlps(static_cast<size_t>(count)), shared(noise(kHidden)) {
        for (float& value : router.values) value *= 4;  // so that rounding does not change the chosen experts
        for (int e = 0; e < count; e++) up_bias.push_back(noise(2 * kMlp)), down_bias.push_back(noise(kHidden));
    }
    struct Mlp {
        Matrix gate{kMlp, kHidden}, up{kMlp, kHidden}, down{kHidden, kMlp};
    };
    Matrix router;
    std::vector<float> router_bias;
    std::vector<Mlp> mlps;
    std::vector<float> shared;
    std::vector<std::vector<float>> up_bias, down_bias;
};

static Row normed(const double* x, int count, const std::vector<float>& weight) {
    double squares = 0;
    for (int i = 0; i < count; i++) squares += x[i] * x[i];
    Row out(static_cast<size_t>(count));
    for (int i = 0; i < count; i++) out[size_t(i)] = x[i] / std::sqrt(squares / count + 1e-5) * double(weight[size_t(i)]);
    return out;
}

// The rotary table of all positions, for heads of kDim.
static std::vector<float> rope_of() {
    std::vector<float> rope(size_t(kMaxPositions) * kDim);
    for (int p = 0; p < kMaxPositions; p++)
        for (int i = 0; i < kDim / 2; i++) {
            const double angle = p * std::pow(10000.0, -2.0 * i / kDim);
            rope[size_t(p * kDim + i)] = float(std::cos(angle));
            rope[size_t(p * kDim + kDim / 2 + i)] = float(std::sin(angle));
        }
    return rope;
}

// Rotates a head in place.
static void turn(double* at, const std::vector<float>& rope, int position) {
    for (int i = 0; i < kDim / 2; i++) {
        const double a = at[i], b = at[kDim / 2 + i];
        const double cosine = rope[size_t(position * kDim + i)], sine = rope[size_t(position * kDim + kDim / 2 + i)];
        at[i] = a * cosine - b * sine;
        at[kDim / 2 + i] = b * cosine + a * sine;
    }
}

static void add_to(Row& x, const Row& y) {
    for (size_t i = 0; i < x.size(); i++) x[i] += y[i];
}

// The decoder in plain loops: no pages, no panels, no threads.
class Plain {
  public:
    explicit Plain(const Options& options) : options(options) {}

    // Logits of every token of one sequence.
    std::vector<Row> forward(const std::vector<int32_t>& ids) const {
        std::vector<Row> x;
        for (int32_t id : ids) x.emplace_back(&embed.values[size_t(id * kHidden)], &embed.values[size_t((id + 1) * kHidden)]);
        for (const Layer& layer : layers) {
            attend(layer, x);
            for (Row& row : x) options.experts ? mix(layer, mixtures[size_t(&layer - layers.data())], row) : feed(layer, row);
        }
        std::vector<Row> logits;
        for (const Row& row : x) logits.push_back(head.times(normed(row.data(), kHidden, norm)));
        return logits;
    }

    const Options options;
    std::vector<Layer> layers{kLayers};
    std::vector<ExpertsOf> mixtures{kLayers, ExpertsOf(options.experts)};
    Matrix embed{kVocab, kHidden}, head{kVocab, kHidden};
    std::vector<float> norm = noise(kHidden), rope = rope_of();

  private:
    void place(Row& row, int heads, const std::vector<float>& weight, int position) const {
        for (int h = 0; h < heads; h++) {
            double* at = &row[size_t(h * kDim)];
            if (options.has_norms) {
                const Row n = normed(at, kDim, weight);
                std::copy(n.begin(), n.end(), at);
            }
            turn(at, rope, position);
        }
    }

    void attend(const Layer& layer, std::vector<Row>& x) const {
        std::vector<Row> q, k, v;
        for (size_t t = 0; t < x.size(); t++) {
            const Row in = normed(x[t].data(), kHidden, layer.attention_norm);
            q.push_back(layer.q.times(in));
            k.push_back(layer.k.times(in));
            v.push_back(layer.v.times(in));
            if (options.has_bias) {
                add_to(q[t], {layer.bias.begin(), layer.bias.begin() + kQueries});
                add_to(k[t], {layer.bias.begin() + kQueries, layer.bias.begin() + kQueries + kKeys});
                add_to(v[t], {layer.bias.begin() + kQueries + kKeys, layer.bias.end()});
            }
            place(q[t], kHeads, layer.q_norm, int(t));
            place(k[t], kKvHeads, layer.k_norm, int(t));
        }
        for (size_t t = 0; t < x.size(); t++) {
            Row out(kQueries);
            for (int h = 0; h < kHeads; h++) attend_head(q[t].data() + h * kDim, k, v, h / (kHeads / kKvHeads), t, layer.sinks[size_t(h)], &out[size_t(h * kDim)]);
            add_to(x[t], layer.o.times(out));
        }
    }

    void attend_head(const double* q, const std::vector<Row>& k, const std::vector<Row>& v, int kv_head, size_t t,
                     float sink, double* out) const {
        const size_t from = options.window && t + 1 > size_t(options.window) ? t + 1 - size_t(options.window) : 0;
        double total = options.experts ? std::exp(double(sink)) : 0;
        for (size_t key = from; key <= t; key++) {
            const double *keys = k[key].data() + kv_head * kDim, *values = v[key].data() + kv_head * kDim;
            const double p = std::exp(dot(q, keys, kDim) / std::sqrt(kDim));
            total += p;
            for (int d = 0; d < kDim; d++) out[d] += p * values[d];
        }
        for (int d = 0; d < kDim; d++) out[d] /= total;
    }

    double gate_of(double gate, double up) const {
        if (!options.has_bias) return gate / (1 + std::exp(-gate)) * up;
        gate = std::min(gate, kLimit);
        return gate / (1 + std::exp(-kAlpha * gate)) * (std::clamp(up, -kLimit, kLimit) + 1);
    }

    // The chosen experts, and the layer's own MLP as the shared one.
    void mix(const Layer& layer, const ExpertsOf& experts, Row& x) const {
        const Row in = normed(x.data(), kHidden, layer.mlp_norm);
        Row logits = experts.router.times(in);
        if (options.has_bias) add_to(logits, {experts.router_bias.begin(), experts.router_bias.end()});
        std::vector<size_t> order(logits.size());
        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });
        double total = 0;
        for (size_t i = 0; i < (options.has_bias ? size_t(kPerToken) : order.size()); i++) total += std::exp(logits[order[i]]);
        for (size_t i = 0; i < kPerToken; i++) {
            const size_t e = order[i];
            add_scaled(x, experts.mlps[e], in, std::exp(logits[e]) / total, options.has_bias ? &experts.up_bias[e] : nullptr,
                       options.has_bias ? &experts.down_bias[e] : nullptr);
        }
        const double share = std::inner_product(in.begin(), in.end(), experts.shared.begin(), 0.0);
        add_scaled(x, {layer.gate, layer.up, layer.down}, in, 1 / (1 + std::exp(-share)), nullptr, nullptr);
    }

    void add_scaled(Row& x, const ExpertsOf::Mlp& mlp, const Row& in, double weight, const std::vector<float>* up_bias,
                    const std::vector<float>* down_bias) const {
        const Row gate = mlp.gate.times(in), up = mlp.up.times(in);
        Row both(kMlp);
        for (size_t i = 0; i < kMlp; i++)
            both[i] = gate_of(gate[i] + (up_bias ? (*up_bias)[i] : 0), up[i] + (up_bias ? (*up_bias)[kMlp + i] : 0));
        Row out = mlp.down.times(both);
        for (size_t i = 0; i < kHidden; i++) x[i] += weight * (out[i] + (down_bias ? (*down_bias)[i] : 0));
    }

    void feed(const Layer& layer, Row& x) const {
        const Row in = normed(x.data(), kHidden, layer.mlp_norm), up = layer.up.times(in);
        Row gate = layer.gate.times(in);
        for (size_t i = 0; i < gate.size(); i++) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
        add_to(x, layer.down.times(gate));
    }
};
