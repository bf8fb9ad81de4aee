// Compares mixers with a state with plain recurrences in double, and their results whole, in chunks and behind others.
#include "check.hpp"
#include "mixers/mixer.hpp"

using namespace kvl;

namespace {

// A delta rule with random tensors, and the rows of its linears for `count` tokens.
struct DeltaCase {
    kvl_delta_rule mixer;
    kvl_model model{kvl_shape{64, 64, 2, 1, 32, 32, 1}};
    int64_t channels, width, count;
    std::vector<float> in;

    DeltaCase(int k_heads, int v_heads, int k_dim, int v_dim, int conv_width, bool is_tiled, int64_t count)
        : mixer{k_heads, v_heads, k_dim, v_dim, conv_width, is_tiled}, channels(2 * k_heads * k_dim + v_heads * v_dim),
          count(count) {
        mixer.gate_at = int32_t(channels);
        mixer.beta_at = mixer.gate_at + v_heads * v_dim;
        mixer.decay_at = mixer.beta_at + v_heads;
        width = mixer.decay_at + v_heads;
        in = noise(count * width, 2.0f);
        mixer.conv = add(noise(conv_width * channels));
        std::vector<float> decay = noise(v_heads);
        for (float& value : decay) value = -std::exp(value);
        mixer.decay = add(decay);
        mixer.decay_bias = add(noise(v_heads));
        mixer.norm = add(noise(v_dim));
    }

    int32_t add(const std::vector<float>& values) { return kvl_add_vector(&model, values.data(), int64_t(values.size())); }
    double weight(int32_t vector, int64_t index) const { return double(model.vectors[size_t(vector)][size_t(index)]); }
    double at(int64_t t, int64_t channel) const { return t < 0 ? 0 : double(in[size_t(t * width + channel)]); }
    int64_t memory() const {
        return (mixer.conv_width - 1) * channels + int64_t(mixer.num_v_heads) * mixer.k_dim * mixer.v_dim;
    }

    // The output, computed in pieces of `piece` tokens with a memory that begins with other contents.
    std::vector<float> computed(int64_t piece) {
        std::vector<float> out(size_t(count * mixer_width(mixer))), kept = noise(memory()), room(size_t(mixer_room(mixer)));
        for (int64_t first = 0; first < count; first += piece)
            for (int64_t head = 0; head < mixer.num_k_heads; head++)
                delta_rule(model, mixer,
                           {{in.data() + first * width, width}, {out.data() + first * mixer_width(mixer), mixer_width(mixer)},
                            std::min(piece, count - first), kept.data(), first == 0, 1e-5f, room.data()}, head);
        return out;
    }

    double convolved(int64_t t, int64_t channel) const {
        double total = 0;
        for (int j = 0; j < mixer.conv_width; j++)
            total += weight(mixer.conv, j * channels + channel) * at(t - mixer.conv_width + 1 + j, channel);
        return total / (1 + std::exp(-total));
    }

    std::vector<double> unit(int64_t t, int64_t first) const {
        std::vector<double> x;
        double squares = 1e-6;
        for (int i = 0; i < mixer.k_dim; i++) x.push_back(convolved(t, first + i)), squares += x.back() * x.back();
        for (double& value : x) value /= std::sqrt(squares);
        return x;
    }

    // The output of value head h, [count][v_dim], by the formulas.
    std::vector<double> plain(int h) const {
        const int each = mixer.num_v_heads / mixer.num_k_heads, key_head = mixer.is_tiled ? h % mixer.num_k_heads : h / each;
        const int64_t keys = int64_t(mixer.num_k_heads) * mixer.k_dim, v_dim = mixer.v_dim;
        std::vector<double> state(size_t(mixer.k_dim * v_dim)), out;
        for (int64_t t = 0; t < count; t++) {
            const std::vector<double> q = unit(t, key_head * mixer.k_dim), k = unit(t, keys + key_head * mixer.k_dim);
            const double a = at(t, mixer.decay_at + h) + weight(mixer.decay_bias, h);
            const double stays = std::exp(weight(mixer.decay, h) * std::log1p(std::exp(a)));
            const double writes = 1 / (1 + std::exp(-at(t, mixer.beta_at + h)));
            std::vector<double> o(static_cast<size_t>(v_dim));
            double squares = 0;
            for (int64_t c = 0; c < v_dim; c++) {
                double found = 0;
                for (int i = 0; i < mixer.k_dim; i++) found += k[size_t(i)] * (state[size_t(i * v_dim + c)] *= stays);
                const double d = writes * (convolved(t, 2 * keys + h * v_dim + c) - found);
                for (int i = 0; i < mixer.k_dim; i++)
                    o[size_t(c)] += q[size_t(i)] * (state[size_t(i * v_dim + c)] += k[size_t(i)] * d) / std::sqrt(mixer.k_dim);
                squares += o[size_t(c)] * o[size_t(c)] / double(v_dim);
            }
            for (int64_t c = 0; c < v_dim; c++) {
                const double gate = at(t, mixer.gate_at + h * v_dim + c);
                out.push_back(o[size_t(c)] / std::sqrt(squares + 1e-5) * weight(mixer.norm, c) * gate / (1 + std::exp(-gate)));
            }
        }
        return out;
    }
};

void test_delta_rule(int k_heads, int v_heads, int k_dim, int v_dim, int conv_width, bool is_tiled) {
    DeltaCase drawn(k_heads, v_heads, k_dim, v_dim, conv_width, is_tiled, 37);
    const std::vector<float> whole = drawn.computed(drawn.count);
    for (int h = 0; h < v_heads; h++) {
        const std::vector<double> want = drawn.plain(h);
        for (int64_t t = 0; t < drawn.count; t++)
            for (int64_t c = 0; c < v_dim; c++)
                near(whole[size_t((t * v_heads + h) * v_dim + c)], want[size_t(t * v_dim + c)], 2e-3, "delta rule", t, c);
    }
    for (int64_t piece : {1, 2, 7, 16, 21}) {
        const std::vector<float> cut = drawn.computed(piece);
        for (size_t i = 0; i < cut.size(); i++) near(cut[i], whole[i], 0, "delta rule in pieces", piece, int64_t(i));
    }
}

}  // namespace

static void test_mixers() {
    test_delta_rule(1, 1, 16, 16, 2, false);
    test_delta_rule(2, 4, 32, 80, 4, false);
    test_delta_rule(2, 4, 48, 64, 4, true);
}
