// Compares adapters with their scalar reference, in every format and for every remainder of their ranks.
#include "check.hpp"
#include "model/model.hpp"
#include "scalar.hpp"

using namespace kvl;

// Some rows of activations for a linear of a format.
struct Inputs {
    Inputs(int format, int64_t cols, int64_t padded, int64_t rows)
        : data(static_cast<size_t>(rows * padded * 2)), scale(static_cast<size_t>(rows * num_scales(KVL_INT4, padded))),
          sums(static_cast<size_t>(rows * num_sums(KVL_INT4, padded))), of{{data.data(), scale.data(), sums.data()}, padded, format} {
        for (int64_t m = 0; m < rows; m++) {
            std::vector<float> x = noise(cols);
            x.resize(static_cast<size_t>(padded));
            store_activations(of.x, m, x.data(), padded, format);
        }
    }
    std::vector<int8_t> data;
    std::vector<float> scale;
    std::vector<int32_t> sums;
    const LoraInput of;
};

// B h of a channel of a row, with h from `shrink`.
static float expanded(const LoraLinear& linear, const std::vector<uint8_t>& h, int64_t c) {
    alignas(64) float lanes[kPanel];
    F32 lo = splat(3), hi = splat(3);
    expand(linear, c / kPanel, h.data(), lo, hi);
    store(lanes, lo);
    store(lanes + kLanes, hi);
    return lanes[c % kPanel];
}

// Tokens that are computed together get the same bits as each one alone, whatever their order.
static void test_adapter_tiles(const LoraLinear& linear, const Inputs& inputs) {
    for (int count = 1; count <= kLoraTokens; count++) {
        std::vector<std::vector<uint8_t>> together, alone;
        LoraRows rows;
        rows.count = count;
        for (int m = 0; m < count; m++) together.emplace_back(size_t(linear.h_bytes)), alone.emplace_back(size_t(linear.h_bytes));
        for (int m = 0; m < count; m++) {
            rows.rows[m] = count - 1 - m, rows.h[m] = together[size_t(m)].data();
            LoraRows one;
            one.count = 1, one.rows[0] = count - 1 - m, one.h[0] = alone[size_t(m)].data();
            shrink(linear, inputs.of, one, linear.parts[0].a);
        }
        shrink(linear, inputs.of, rows, linear.parts[0].a);
        near(together == alone, 1, 0, "tokens of an adapter together", count, linear.h_bytes);
    }
}

// Three modules of one linear through the C interface, at every remainder of the ranks; the last channels have no
// module.
static void test_adapters(int format, int64_t cols, int64_t rank, int64_t count) {
    kvl_shape shape{};
    shape.num_threads = 1;
    kvl_model* model = kvl_new(&shape);
    kvl_add_linear(model, 4 * kPanel, cols, format);
    const int32_t id = kvl_adapter_new(model);
    const int64_t ranks[] = {rank, rank + 1, 1}, firsts[] = {0, kPanel, 2 * kPanel};
    std::vector<std::vector<float>> as, bs;
    for (int m = 0; m < 3; m++) {
        as.push_back(noise(ranks[m] * cols));
        bs.push_back(noise(count * ranks[m]));
        kvl_adapter_add(model, id, 0, as[size_t(m)].data(), bs[size_t(m)].data(), ranks[m], count, 0.5f * float(m + 1), firsts[m], -1);
    }
    const LoraLinear& linear = model->adapters[size_t(id)]->linears[0];
    const int64_t padded = model->linears[0].padded_cols;
    const Inputs inputs(format, cols, padded, kLoraTokens);
    std::vector<uint8_t> h(static_cast<size_t>(linear.h_bytes));
    LoraRows one;
    one.count = 1, one.rows[0] = 1, one.h[0] = h.data();
    shrink(linear, inputs.of, one, linear.parts[0].a);
    for (int64_t c = 0; c < 4 * kPanel; c++) {
        const double got = double(expanded(linear, h, c)) - 3;
        const scalar::LowRankSum want = scalar::low_rank(linear, inputs.of, 1, c);
        near(got, want.value, 1e-5 * double(cols) + 1.01 * want.most_off, "adapter", rank, c);
        const int64_t m = c / kPanel, own = c % kPanel;
        double exact = 0;  // of the values before they were rounded
        for (int64_t r = 0; m < 3 && own < count && r < ranks[m]; r++)
            for (int64_t k = 0; k < cols; k++)
                exact += 0.5 * double(m + 1) * double(bs[size_t(m)][size_t(own * ranks[m] + r)]) *
                         double(as[size_t(m)][size_t(r * cols + k)]) *
                         double(scalar::activation_at(inputs.of.x, 1, padded, format, k));
        const double off = (linear.is_bf16 ? 0.02 : 0.05) * double(m + 1);
        near(got, exact, off * std::sqrt(double(cols * (rank + 1))), "adapter, unrounded", rank, c);
    }
    test_adapter_tiles(linear, inputs);
    kvl_adapter_free(model, id);
    near(kvl_adapter_new(model), id, 0, "a free adapter's id", id, 0);
    kvl_free(model);
}
