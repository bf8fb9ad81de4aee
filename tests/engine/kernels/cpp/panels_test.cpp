// Panels of every format: their weights as packed, and the micro-kernels over them, beside the scalar reference.
#include "bf16_test.cpp"
#include "check.hpp"
#include "linear/gemm.hpp"
#include "linear/way.hpp"
#include "model/model.hpp"
#include "scalar.hpp"
#include "tiles_test.cpp"

using namespace kvl;

// The first `rows` rows over one packed panel, as a step multiplies as many.
static void multiply(int format, int64_t rows, const Pass& all) {
    const Way way(format, rows, KVL_NO_UNIT);
    for (int64_t i = 0; i < way.passes.count; i++) {
        const int64_t begin = way.passes.begin(i);
        way.multiply(Pass{all.x, begin, all.cols, all.panel, all.out + begin * kPanel}, int(way.passes.begin(i + 1) - begin));
    }
}

// Every number of rows of a micro-kernel over one packed panel.
static void test_tile(const Linear& linear) {
    const int format = linear.format(0);
    const int64_t padded = linear.padded_cols;
    for (int rows = 1; rows <= rows_once(format); rows++) {
        std::vector<float> scale(static_cast<size_t>(rows * num_scales(format, padded)));
        std::vector<int8_t> data(static_cast<size_t>(rows * padded));
        std::vector<int32_t> sums(static_cast<size_t>(rows * num_sums(format, padded)));
        const Activations x{data.data(), scale.data(), sums.data()};
        std::vector<float> values(static_cast<size_t>(padded), 1), out(static_cast<size_t>(rows * kPanel));  // the largest first
        for (int m = 0; m < rows; m++, values = noise(padded)) store_activations(x, m, values.data(), padded, format);
        multiply(format, rows, {x, 0, padded, linear.panel(0), out.data()});
        for (int m = 0; m < rows; m++)
            for (int c = 0; c < kPanel; c++)
                near(out[size_t(m * kPanel + c)], scalar::dot(x, m, padded, format, linear.panel(0), c), 2e-3, "tile", rows, c);
    }
}

// Rows that are multiplied together have the bits of each one alone, in passes and where the panel is unpacked for all.
static void test_many_rows(const Linear& linear) {
    const int format = linear.format(0);
    const int64_t cols = linear.padded_cols, most = 3 * kUnpackFrom;
    std::vector<float> scale(static_cast<size_t>(most * num_scales(format, cols))), out(static_cast<size_t>(most * kPanel)), alone(kPanel);
    std::vector<int8_t> data(static_cast<size_t>(most * cols));
    std::vector<int32_t> sums(static_cast<size_t>(most * num_sums(format, cols)));
    const Activations x{data.data(), scale.data(), sums.data()};
    for (int64_t m = 0; m < most; m++) store_activations(x, m, (m == 0 ? std::vector<float>(size_t(cols), 1) : noise(cols)).data(), cols, format);
    for (int64_t rows : {int64_t(kRowsOnce), int64_t(kUnpackFrom - 1), int64_t(kUnpackFrom), int64_t(kUnpackFrom + 1), most}) {
        multiply(format, rows, {x, 0, cols, linear.panel(0), out.data()});
        for (int64_t m = 0; m < rows; m++) {
            Way(format, 1, KVL_NO_UNIT).multiply({x, m, cols, linear.panel(0), alone.data()}, 1);
            for (int64_t c = 0; c < kPanel; c++) near(out[size_t(m * kPanel + c)], alone[size_t(c)], 0, "many rows", rows, m);
        }
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
    test_many_rows(panel.linear());
    test_in_tiles(panel.linear());
}

// The value of a number of a format, before scale and minimum.
static int level_of_number(int format, int number) {
    if (has_table(format)) return table_of(format)[number];
    switch (format) {
        case KVL_INT1: return number == 0 ? -1 : 1;
        case KVL_INT2:
        case KVL_INT2_256: return number - 1;
        case KVL_INT3_K: return number - 4;
        case KVL_INT6_K: return number - 32;
        default: return number - (number_bits(format) == 8 ? 128 : 0);
    }
}

// Replaces the sizes of numbers by those of points of the grid; all neighbours of a point that moves move alike.
static void on_grid(const GridShape& grid, std::vector<uint8_t>& numbers) {
    for (size_t k = 0; k < numbers.size(); k++) {
        const size_t point = k / kPoint;
        const int sign = numbers[grid.has_move ? point * kPoint : k] >> 2;
        numbers[k] = uint8_t((grid.points[point % size_t(grid.count())] >> k % kPoint * 2 & 3) | sign << 2);
    }
}

// The number of a format whose value, as micro-kernels multiply it, is the largest in size.
static int largest_number(int format) {
    int largest = (1 << number_bits(format)) - 1;
    for (int i = 0; has_table(format) && i < 16; i++)
        if (std::abs(table_of(format)[i]) > std::abs(table_of(format)[largest & 15])) largest = i;
    return largest;
}

// A panel packed from a file's numbers: every number of the format, scales of both signs, with and without minimums.
// The first channel has the largest number everywhere, so that its sums are the largest that occur.
// Those of super-blocks are small integers, from `least` to `most`, times factors.
static void test_kept(int format, int64_t cols, int64_t run, bool has_minimums, int least = 0, int most = 0) {
    const OnePanel panel(cols, format);
    const int64_t runs = (cols + run - 1) / run, blocks = cols / kSuper;
    std::vector<uint8_t> numbers(static_cast<size_t>(kPanel * cols));
    for (uint8_t& number : numbers) number = uint8_t(generator() & ((1u << number_bits(format)) - 1));
    std::fill_n(numbers.begin(), cols, uint8_t(largest_number(format)));
    if (has_grid(format)) on_grid(grid_of(format), numbers);
    const float size = 1.0f / float(scaling_of(format) == Scaling::kOdd ? 64 : 1 << number_bits(format)) / float(is_super(format) ? most : 1);
    std::vector<float> scales = noise(kPanel * runs, size), minimums = noise(kPanel * runs), want;
    std::vector<float> factors = noise(kPanel * blocks, size), others = noise(kPanel * blocks, 1.0f / 16);
    for (std::vector<float>* part : {&scales, &minimums, &factors, &others})
        for (float& value : *part) value = fp16_to_float(float_to_fp16(value));
    for (std::vector<float>* part : {&scales, &minimums})
        for (float& value : *part) value = is_super(format) ? float(least + int(generator() % unsigned(most - least + 1)) * (scaling_of(format) == Scaling::kOdd ? 2 : 1)) : value;
    for (int64_t i = 0; i < kPanel * cols; i++) {
        const size_t at = size_t(i / cols * runs + i % cols / run), block = is_super(format) ? size_t(i / kSuper) : 0;
        const float factor = is_super(format) ? factors[block] : 1, other = is_super(format) ? others[block] : 1;
        want.push_back(float(level_of_number(format, numbers[size_t(i)])) * (scales[at] * factor) + (has_minimums ? minimums[at] * other : 0));
    }
    const float *scale_factors = is_super(format) ? factors.data() : nullptr, *minimum_factors = is_super(format) && has_minimums ? others.data() : nullptr;
    const kvl_numbers from{numbers.data(), scales.data(), has_minimums ? minimums.data() : nullptr, run, scale_factors, minimum_factors};
    kvl_fill_numbers(panel.model, 0, &from, kPanel, 0, -1);
    panel.check(want, is_super(format) ? 0 : 1e-6);
    test_tile(panel.linear());
    test_many_rows(panel.linear());
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
