// Panels of every format: their weights as packed, and the micro-kernels over them, beside the scalar reference.
#include "bf16_test.cpp"
#include "check.hpp"
#include "linear/gemm.hpp"
#include "model/model.hpp"
#include "scalar.hpp"
#include "tiles_test.cpp"

using namespace kvl;

// Every number of rows of a micro-kernel over one packed panel.
static void test_tile(const Linear& linear) {
    const int format = linear.format(0);
    const int64_t padded = linear.padded_cols;
    for (int rows = 1; rows <= rows_once(format); rows++) {
        std::vector<float> scale(static_cast<size_t>(rows * num_scales(format, padded)));
        std::vector<int8_t> data(static_cast<size_t>(rows * padded));
        std::vector<int32_t> sums(static_cast<size_t>(rows * num_sums(format, padded)));
        const Activations x{data.data(), scale.data(), sums.data()};
        std::vector<float> values = noise(padded), out(static_cast<size_t>(rows * kPanel));
        for (int m = 0; m < rows; m++, values = noise(padded)) store_activations(x, m, values.data(), padded, format);
        tile_for(format, rows)({x, 0, padded, linear.panel(0), out.data()}, table_of(format));
        for (int m = 0; m < rows; m++)
            for (int c = 0; c < kPanel; c++)
                near(out[size_t(m * kPanel + c)], scalar::dot(x, m, padded, format, linear.panel(0), c), 2e-3, "tile", rows, c);
    }
}

// A linear of one panel, through the C interface.
struct OnePanel {
    OnePanel(int64_t cols, int format) : model(kvl_new(&shape)), cols(cols) {
        kvl_add_linear(model, kPanel, cols, format);
        kvl_allocate(model);
    }
    ~OnePanel() { kvl_free(model); }
    const Linear& linear() const { return model->linears[0]; }
    // Compares the packed weights with `want`, read by the scalar reference and as an embedding.
    void check(const std::vector<float>& want, double tolerance) const {
        std::vector<float> row(static_cast<size_t>(cols));
        for (int c = 0; c < kPanel; c++) {
            read_row(linear(), c, row.data());
            for (int64_t k = 0; k < cols; k++) {
                const float held = scalar::weight_at(linear().panel(0), linear().format(0), k, c);
                near(held, want[size_t(c * cols + k)], tolerance, "weight", c, k);
                near(row[size_t(k)], held, 0, "row", c, k);
            }
        }
    }
    const kvl_shape shape{0, 0, 0, 2, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0};
    kvl_model* model;
    const int64_t cols;
};

// A panel packed from floats of this magnitude.
static void test_quantised(int format, int64_t cols, float size = 1) {
    const OnePanel panel(cols, format);
    const std::vector<float> weights = noise(kPanel * cols, size);
    kvl_fill_f32(panel.model, 0, weights.data(), kPanel, 0, -1);
    panel.check(weights, double(size) * (format == KVL_INT4 ? 0.3 : format == KVL_BF16 ? 0.02 : 0.03));
    if (format == KVL_BF16) return test_bf16(panel.linear(), size);
    test_tile(panel.linear());
    test_in_tiles(panel.linear());
}

// A panel packed from a file's numbers: every number of the format, scales of both signs, with and without minimums.
static void test_kept(int format, int64_t cols, int64_t run, bool has_minimums) {
    const OnePanel panel(cols, format);
    const int64_t runs = (cols + run - 1) / run;
    const int bits = has_bytes(format) ? 8 : is_thin(format) ? plane_bits(format) : 4 + high_bits(format);
    std::vector<uint8_t> numbers(static_cast<size_t>(kPanel * cols));
    for (size_t i = 0; i < numbers.size(); i++) numbers[i] = uint8_t(generator() & ((1u << bits) - 1));
    std::vector<float> scales = noise(kPanel * runs, 1.0f / float(1 << bits)), minimums = noise(kPanel * runs), want;
    for (std::vector<float>* half : {&scales, &minimums})
        for (float& value : *half) value = fp16_to_float(float_to_fp16(value));
    for (int64_t i = 0; i < kPanel * cols; i++) {
        const int number = numbers[size_t(i)];
        const int level = has_table(format) ? table_of(format)[number] : number - (has_bytes(format) ? 128 : format == KVL_INT6 ? 32 : 0);
        const size_t at = size_t(i / cols * runs + i % cols / run);
        want.push_back(float(level) * scales[at] + (has_minimums ? minimums[at] : 0));
    }
    const kvl_numbers from{numbers.data(), scales.data(), has_minimums ? minimums.data() : nullptr, run, nullptr, nullptr};
    kvl_fill_numbers(panel.model, 0, &from, kPanel, 0, -1);
    panel.check(want, 1e-6);
    test_tile(panel.linear());
    test_in_tiles(panel.linear());
}

// A panel packed from numbers of two bits, whose scales and minimums are multiples of factors.
static void test_two_bits(int64_t cols) {
    const OnePanel panel(cols, KVL_INT2);
    std::vector<uint8_t> numbers(static_cast<size_t>(kPanel * cols));
    for (uint8_t& number : numbers) number = uint8_t(generator() & 3);
    std::vector<float> scales(numbers.size() / kRun), minimums(scales.size()), want;
    for (std::vector<float>* part : {&scales, &minimums})
        for (float& value : *part) value = float(generator() & 15);
    std::vector<float> factors = noise(kPanel * cols / kFactorRun, 0.03f), others = noise(kPanel * cols / kFactorRun, 0.1f);
    for (std::vector<float>* part : {&factors, &others})
        for (float& value : *part) value = fp16_to_float(float_to_fp16(value));
    for (size_t i = 0; i < numbers.size(); i++)
        want.push_back(float(numbers[i]) * (scales[i / kRun] * factors[i / kFactorRun]) + minimums[i / kRun] * others[i / kFactorRun]);
    const kvl_numbers from{numbers.data(), scales.data(), minimums.data(), kRun, factors.data(), others.data()};
    kvl_fill_numbers(panel.model, 0, &from, kPanel, 0, -1);
    panel.check(want, 1e-6);
    test_tile(panel.linear());
    test_in_tiles(panel.linear());
}

// The largest numbers in the widest channels that the format allows: integer sums do not overflow.
static void test_largest_sums() {
    const int64_t cols = kMostChannelCols;
    const OnePanel panel(cols, KVL_INT8_CHANNEL);
    const std::vector<uint8_t> lowest(size_t(kPanel * cols), 0);
    const std::vector<float> ones(kPanel, 1.0f), x(size_t(cols), -3.0f);
    const kvl_numbers from{lowest.data(), ones.data(), nullptr, cols, nullptr, nullptr};
    kvl_fill_numbers(panel.model, 0, &from, kPanel, 0, -1);
    constexpr int kRows = 1 + kRowsBehind;
    std::vector<int8_t> data(size_t(kRows * cols));
    float scale[kRows];
    int32_t sums[kRows];
    alignas(64) float out[kRows * kPanel];
    const Activations to{data.data(), scale, sums};
    store_activations(to, 0, x.data(), cols, KVL_INT8_CHANNEL);
    tile_for(KVL_INT8_CHANNEL, 1)({to, 0, cols, panel.linear().panel(0), out}, table_of(KVL_INT8_CHANNEL));
    for (int c = 0; c < kPanel; c++) near(out[c] / (128.0f * 3.0f * float(cols)), 1, 1e-6, "largest sums", cols, c);
}
