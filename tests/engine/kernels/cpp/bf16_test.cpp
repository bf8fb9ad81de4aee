// bf16 linears: results have exactly the bits of the documented order of additions, for every number of rows, with and
// without the tile unit, and with vdpbf16ps.
#include "check.hpp"
#include "linear/tiles.hpp"
#include "model/model.hpp"
#include "scalar.hpp"

using namespace kvl;

// The sums of some rows, followed by memory that must stay unwritten.
struct Bf16Sums {
    explicit Bf16Sums(int rows) : rows(rows), values(size_t((rows + kLanes) * kPanel), kUnwritten) {}
    void check(const float* want) const {
        for (int i = 0; i < (rows + kLanes) * kPanel; i++)
            near(values[size_t(i)], i < rows * kPanel ? want[i] : kUnwritten, 0, "bf16 in order", rows, i);
    }
    static constexpr float kUnwritten = 3;
    int rows;
    std::vector<float> values;
};

// Multiplies the first `rows` rows of `x` as a step does.
static Bf16Sums multiplied(const Linear& linear, const Activations& x, int rows, int unit) {
    Bf16Sums out(rows);
    const Way way(KVL_BF16, rows, unit);
    for (int64_t i = 0; i < way.passes.count; i++) {
        const int64_t begin = way.passes.begin(i), end = way.passes.begin(i + 1);
        way.multiply({x, begin, linear.padded_cols, linear.panel(0), out.values.data() + begin * kPanel}, int(end - begin));
    }
    return out;
}

static void test_pairs(const Linear& linear, const Activations& x, int most) {
    if (!has_pairs()) return;
    std::vector<float> want;
    for (int m = 0; m < most; m++)
        for (int c = 0; c < kPanel; c++) want.push_back(scalar::dot_in_pairs(x, m, linear.padded_cols, linear.panel(0), c));
    for (int rows : {1, 2, 3, 11, 12, 13, 25, most}) multiplied(linear, x, rows, KVL_PAIRS).check(want.data());
}

// size: magnitude of weights and activations. If it is tiny, products are subnormal, and all kernels must flush them
// alike.
static void test_bf16(const Linear& linear, float size) {
    constexpr int kMost = 70;
    std::vector<int8_t> data(static_cast<size_t>(kMost * linear.padded_cols * 2));
    const Activations x{data.data(), nullptr, nullptr};
    for (int m = 0; m < kMost; m++) store_activations(x, m, noise(linear.padded_cols, size).data(), linear.padded_cols, KVL_BF16);
    std::vector<float> want;
    for (int m = 0; m < kMost; m++)
        for (int c = 0; c < kPanel; c++) {
            want.push_back(scalar::dot_in_order(x, m, linear.padded_cols, linear.panel(0), c));
            near(double(want.back()), scalar::dot(x, m, linear.padded_cols, KVL_BF16, linear.panel(0), c), 2e-3 * double(size * size), "bf16", m, c);
        }
    const TinyIsZero as_in_a_step;
    if (size < 1) want = multiplied(linear, x, kMost, KVL_NO_UNIT).values;
    for (int rows : {1, 2, 3, 4, 5, 11, 12, 13, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, kMost})
        for (int unit : {KVL_NO_UNIT, KVL_TILES}) multiplied(linear, x, rows, unit).check(want.data());
    test_pairs(linear, x, kMost);
    if (!has_bf16_tiles()) return;
    for (int rows = 1; rows <= 34; rows++) {
        Bf16Sums got(rows);
        multiply_bf16_in_tiles({x, kMost - rows, linear.padded_cols, linear.panel(0), got.values.data()}, rows);
        got.check(want.data() + (kMost - rows) * kPanel);
    }
}
