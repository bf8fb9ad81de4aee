// Compares mixers with a state with plain recurrences in double, and their results whole, in chunks and behind others.
#include "check.hpp"
#include "mixers/mixer.hpp"

using namespace kvl;

namespace {

// A delta rule with random tensors, and the rows of its linears for `count` tokens.
struct DeltaCase {
    kvl_delta_rule mixer;
    kvl_model model{kvl_shape{64, 64, 32, 1}};
    int64_t channels, width, count;
    std::vector<float> in;

    DeltaCase(int k_heads, int v_heads, int k_dim, int v_dim, int conv_width, bool is_tiled, bool by_channel, int64_t count)
        : mixer{k_heads, v_heads, k_dim, v_dim, conv_width, is_tiled, by_channel, by_channel}, channels(2 * k_heads * k_dim + v_heads * v_dim),
          count(count) {
        mixer.gate_at = int32_t(channels);
        mixer.beta_at = mixer.gate_at + v_heads * v_dim;
        mixer.decay_at = mixer.beta_at + v_heads;
        const int decays = v_heads * (by_channel ? k_dim : 1);
        width = mixer.decay_at + decays;
        in = noise(count * width, 2.0f);
        mixer.conv = add(noise(conv_width * channels));
        std::vector<float> decay = noise(v_heads);
        for (float& value : decay) value = -std::exp(value);
        mixer.decay = add(decay);
        mixer.decay_bias = add(noise(decays));
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
            std::vector<double> stays;
            for (int i = 0; i < mixer.k_dim; i++) {
                const int own = mixer.decays_channels ? h * mixer.k_dim + i : h;
                const double a = at(t, mixer.decay_at + own) + weight(mixer.decay_bias, own);
                stays.push_back(std::exp(weight(mixer.decay, h) * std::log1p(std::exp(a))));
            }
            const double writes = 1 / (1 + std::exp(-at(t, mixer.beta_at + h)));
            std::vector<double> o(static_cast<size_t>(v_dim));
            double squares = 0;
            for (int64_t c = 0; c < v_dim; c++) {
                double found = 0;
                for (int i = 0; i < mixer.k_dim; i++) found += k[size_t(i)] * (state[size_t(i * v_dim + c)] *= stays[size_t(i)]);
                const double d = writes * (convolved(t, 2 * keys + h * v_dim + c) - found);
                for (int i = 0; i < mixer.k_dim; i++)
                    o[size_t(c)] += q[size_t(i)] * (state[size_t(i * v_dim + c)] += k[size_t(i)] * d) / std::sqrt(mixer.k_dim);
                squares += o[size_t(c)] * o[size_t(c)] / double(v_dim);
            }
            for (int64_t c = 0; c < v_dim; c++) {
                const double gate = at(t, mixer.gate_at + h * v_dim + c);
                out.push_back(o[size_t(c)] / std::sqrt(squares + 1e-5) * weight(mixer.norm, c) * (mixer.gates_by_sigmoid ? 1 : gate) / (1 + std::exp(-gate)));
            }
        }
        return out;
    }
};

void test_delta_rule(int k_heads, int v_heads, int k_dim, int v_dim, int conv_width, bool is_tiled, bool by_channel = false) {
    DeltaCase drawn(k_heads, v_heads, k_dim, v_dim, conv_width, is_tiled, by_channel, 37);
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

double silu_of(double x) { return x / (1 + std::exp(-x)); }

// Random rows of a linear's output, [count][width], and a model with vectors for mixers that read them.
struct MixerCase {
    kvl_model model{kvl_shape{64, 64, 32, 1}};
    int64_t count, width;
    std::vector<float> in;

    MixerCase(int64_t count, int64_t width) : count(count), width(width), in(noise(count * width, 2.0f)) {}
    int32_t add(const std::vector<float>& values) { return kvl_add_vector(&model, values.data(), int64_t(values.size())); }
    double weight(int32_t vector, int64_t index) const { return double(model.vectors[size_t(vector)][size_t(index)]); }
    double at(int64_t t, int64_t channel) const { return t < 0 ? 0 : double(in[size_t(t * width + channel)]); }

    // The output [count][out_width], computed in pieces of `piece` tokens with a memory that begins with other contents.
    template <class Work>
    std::vector<float> computed(int64_t piece, int64_t out_width, int64_t memory, const Work& work) {
        std::vector<float> rows = in, out(size_t(count * out_width)), kept = noise(memory);
        for (int64_t first = 0; first < count; first += piece)
            work(MixerRows{{rows.data() + first * width, width}, {out.data() + first * out_width, out_width},
                           std::min(piece, count - first), kept.data(), first == 0, 1e-5f, nullptr});
        return out;
    }

    // Compares the output of `work` with want(token, channel), and the output in pieces with that of the whole.
    template <class Work, class Want>
    void check(const char* what, int64_t out_width, int64_t memory, const Work& work, const Want& want) {
        const std::vector<float> whole = computed(count, out_width, memory, work);
        for (int64_t t = 0; t < count; t++)
            for (int64_t c = 0; c < out_width; c++)
                near(whole[size_t(t * out_width + c)], want(t, c), 2e-3 + 1e-5 * std::fabs(want(t, c)), what, t, c);
        for (int64_t piece : {1, 2, 7, 16, 21}) {
            const std::vector<float> cut = computed(piece, out_width, memory, work);
            for (size_t i = 0; i < cut.size(); i++) near(cut[i], whole[i], 0, what, piece, int64_t(i));
        }
    }
};

void test_short_conv(int32_t channels, int32_t width) {
    MixerCase drawn(37, 3 * channels);
    const kvl_short_conv mixer{channels, width, drawn.add(noise(width * channels)), 0};
    const auto work = [&](const MixerRows& rows) {
        for (int64_t c = 0; c < channels; c += kLanes) short_conv(drawn.model, mixer, rows, c);
    };
    drawn.check("short convolution", channels, (width - 1) * channels, work, [&](int64_t t, int64_t c) {
        double total = 0;
        for (int j = 0; j < width; j++) {
            const int64_t from = t - width + 1 + j;
            total += drawn.weight(mixer.conv, j * channels + c) * drawn.at(from, c) * drawn.at(from, 2 * channels + c);
        }
        return drawn.at(t, channels + c) * total;
    });
}

// A Mamba-2 mixer with its convolution, and the same by the formulas.
struct MambaCase : MixerCase {
    kvl_convolution conv;
    kvl_mamba2 mixer;

    MambaCase(int heads, int head_dim, int state_dim, int groups, int conv_width, bool has_bias)
        : MixerCase(37, 2 * heads * head_dim + 2 * groups * state_dim + heads) {
        const int size = heads * head_dim, channels = size + 2 * groups * state_dim;
        conv = {size, channels, conv_width, add(noise(conv_width * channels)), has_bias ? add(noise(channels)) : -1, 0};
        std::vector<float> decay = noise(heads);
        for (float& value : decay) value = -std::exp(value);
        mixer = {heads, head_dim, state_dim, groups, size, 0, size + channels, add(decay), add(noise(heads)),
                 add(noise(heads)), add(noise(size)), 0.2f, 2.5f, (conv_width - 1) * channels};
    }

    double convolved(int64_t t, int64_t channel) const {
        double total = conv.bias < 0 ? 0 : weight(conv.bias, channel);
        for (int j = 0; j < conv.width; j++)
            total += weight(conv.conv, j * conv.channels + channel) * at(t - conv.width + 1 + j, conv.first + channel);
        return silu_of(total);
    }

    void run(const MixerRows& rows) {
        for (int64_t c = 0; c < conv.channels; c += kMixerChannels)
            convolve(model, conv, rows, c, std::min<int64_t>(conv.channels, c + kMixerChannels));
        MixerRows own = rows;
        own.memory += mixer.state_at;
        for (int64_t head = 0; head < mixer.num_heads; head++) mamba2(model, mixer, own, head);
    }

    // The output of one channel, [count], before the norm.
    std::vector<double> plain(int64_t channel) const {
        const int64_t h = channel / mixer.head_dim, size = mixer_width(mixer), group = h * mixer.num_groups / mixer.num_heads;
        const int64_t b_at = size + group * mixer.state_dim, c_at = b_at + mixer.num_groups * mixer.state_dim;
        std::vector<double> state(size_t(mixer.state_dim)), out;
        for (int64_t t = 0; t < count; t++) {
            const double asked = std::log1p(std::exp(at(t, mixer.decay_at + h) + weight(mixer.decay_bias, h)));
            const double step = std::min(std::max(asked, double(mixer.least_step)), double(mixer.most_step));
            const double x = convolved(t, channel);
            double y = weight(mixer.skip, h) * x;
            for (int n = 0; n < mixer.state_dim; n++) {
                state[size_t(n)] = std::exp(weight(mixer.decay, h) * step) * state[size_t(n)] + step * x * convolved(t, b_at + n);
                y += state[size_t(n)] * convolved(t, c_at + n);
            }
            out.push_back(y * silu_of(at(t, mixer.gate_at + channel)));
        }
        return out;
    }
};

void test_mamba2(int heads, int head_dim, int state_dim, int groups, int conv_width, bool has_bias) {
    MambaCase drawn(heads, head_dim, state_dim, groups, conv_width, has_bias);
    const int64_t size = mixer_width(drawn.mixer), memory = drawn.mixer.state_at + size * state_dim;
    std::vector<std::vector<double>> want;
    for (int64_t c = 0; c < size; c++) want.push_back(drawn.plain(c));
    drawn.check("mamba2", size, memory, [&](const MixerRows& rows) { drawn.run(rows); },
                [&](int64_t t, int64_t c) { return want[size_t(c)][size_t(t)]; });
    std::vector<float> row = noise(size), normed(size_t(size) + kLanes, 1.0f);
    norm_groups(drawn.model, drawn.mixer, row.data(), size + kLanes, normed.data());
    for (int64_t c = 0, each = size / groups; c < size + kLanes; c++) {
        double squares = 0;
        for (int64_t i = 0; c < size && i < each; i++) squares += std::pow(double(row[size_t(c / each * each + i)]), 2) / double(each);
        const double wanted = c < size ? row[size_t(c)] / std::sqrt(squares) * drawn.weight(drawn.mixer.norm, c) : 0;
        near(normed[size_t(c)], wanted, 1e-4, "norm of groups", groups, c);
    }
}

}  // namespace

static void test_mixers() {
    test_delta_rule(1, 1, 16, 16, 2, false);
    test_delta_rule(2, 4, 32, 80, 4, false);
    test_delta_rule(2, 4, 48, 64, 4, true);
    test_delta_rule(2, 2, 80, 80, 3, false, true);
    test_delta_rule(1, 2, 16, 32, 4, false, true);
    test_short_conv(16, 2);
    test_short_conv(48, 5);
    test_mamba2(1, 16, 16, 1, 2, false);
    test_mamba2(6, 48, 80, 2, 4, true);
}
