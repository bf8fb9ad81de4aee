// Compares functions of numbers and of rows with their scalar references, for every remainder.
#include <numeric>

#include "activations/gates.hpp"
#include "activations/quant.hpp"
#include "check.hpp"
#include "scalar.hpp"

using namespace kvl;

static void test_numbers() {
    for (int bits = 0; bits < 0x7c00; bits++)  // every finite fp16 survives the way through float
        near(float_to_fp16(fp16_to_float(uint16_t(bits))), bits, 0, "fp16", bits, 0);
    for (float x = -30; x < 30; x += 0.37f) {
        alignas(64) float lane[kLanes];
        store(lane, exp2(splat(x)));
        near(lane[3] / std::exp2(double(x)), 1, 1e-6, "exp2", int64_t(x), 0);
        store(lane, silu(splat(x)));
        near(lane[5], x / (1 + std::exp(-double(x))), 1e-5, "silu", int64_t(x), 0);
        store(lane, softplus(splat(x)));
        near(lane[4] / std::log1p(std::exp(double(x))), 1, x > -10 ? 1e-6 : 4e-6, "softplus", int64_t(x), 0);
        store(lane, gelu_tanh(splat(x)));
        const double u = 0.7978845608 * (double(x) + 0.044715 * std::pow(double(x), 3));
        near(lane[7], 0.5 * double(x) * (1 + std::tanh(u)), 1e-5, "gelu", int64_t(x), 0);
        store(lane, gelu_erf(splat(x)));
        near(lane[2], 0.5 * double(x) * (1 + std::erf(double(x) / std::sqrt(2.0))), 2e-6, "gelu by erf", int64_t(x), 0);
        store(lane, clamped_gate(splat(x), splat(x / 2 - 1), 7, 1.702f));
        near(lane[1], scalar::clamped_gate(x, x / 2 - 1, 7, 1.702f), 1e-4, "clamped gate", int64_t(x), 0);
    }
    for (int count = -2; count < kLanes + 2; count++) {
        alignas(64) float lane[kLanes];
        store(lane, first_lanes(splat(1), count, 2));
        for (int i = 0; i < kLanes; i++) near(lane[i], i < count ? 1 : 2, 0, "first_lanes", count, i);
    }
}

static void test_norm_and_quantisation(int64_t cols) {
    const int64_t padded = round_up(cols, kPad);
    std::vector<float> x = noise(cols), weight = noise(cols), got(static_cast<size_t>(padded)), want(got);
    x.resize(static_cast<size_t>(padded));
    weight.resize(static_cast<size_t>(padded));
    rms_norm(x.data(), weight.data(), padded, cols, 1e-5f, got.data());
    scalar::rms_norm(x.data(), weight.data(), cols, 1e-5f, want.data());
    for (int64_t k = 0; k < padded; k++) near(got[size_t(k)], want[size_t(k)], 1e-5, "rms_norm", cols, k);
    std::vector<float> bias = noise(cols);
    bias.resize(static_cast<size_t>(padded));
    layer_norm(x.data(), weight.data(), bias.data(), padded, cols, 1e-5f, got.data());
    scalar::layer_norm(x.data(), weight.data(), bias.data(), cols, 1e-5f, want.data());
    for (int64_t k = 0; k < padded; k++) near(got[size_t(k)], want[size_t(k)], 2e-5, "layer_norm", cols, k);
    for (int format : {KVL_INT8, KVL_INT4, KVL_INT8_CHANNEL}) {
        const int group = is_whole(format) ? int(padded) : group_size(format);
        const size_t run = is_whole(format) ? size_t(padded) : size_t(run_size(format));
        std::vector<int8_t> data(static_cast<size_t>(padded));
        std::vector<float> scale(static_cast<size_t>(padded / group));
        std::vector<int32_t> sums(size_t(padded) / run);
        store_activations({data.data(), scale.data(), sums.data()}, 0, x.data(), padded, format);
        for (int64_t k = 0; k < padded; k++)
            near(float(data[size_t(k)]) * scale[size_t(k / group)], x[size_t(k)],
                 1.001 * double(scalar::half_step(x.data(), k, group)), "quantize", group, k);
        for (size_t g = 0; g < sums.size(); g++)
            near(sums[g], std::accumulate(&data[g * run], &data[(g + 1) * run], 0), 0, "sum", group, 0);
    }
}
