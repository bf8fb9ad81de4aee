// The tile unit, where this processor has one: every number of rows, against the same rows one by one by dot products.
#include <algorithm>

#include "check.hpp"
#include "model.hpp"
#include "tiles.hpp"

using namespace kvl;

// The same bits of each row, and nothing written behind the block that the last one is in.
static void test_in_tiles(const Linear& linear) {
    constexpr int kMost = 41;
    const int format = linear.format(0);
    if (!has_tiles() || format == KVL_BF16) return;
    const int64_t cols = linear.padded_cols, rows = kMost + kRowsBehind;
    std::vector<int8_t> data(static_cast<size_t>(rows * cols));
    std::vector<float> scale(static_cast<size_t>(rows * cols / group_size(format))), want(static_cast<size_t>(kMost * kPanel));
    std::vector<int32_t> sums(static_cast<size_t>(rows * cols / run_size(format)));
    const Activations x{data.data(), scale.data(), sums.data()};
    for (int m = 0; m < kMost; m++) {
        store_activations(x, m, noise(cols).data(), cols, format);
        tile_for(format, 1)({x, m, cols, linear.panel(0), want.data() + m * kPanel});
    }
    for (int first : {0, 1})
        for (int count = 1; count <= kMost - first; count += count < 14 ? 1 : 9) {
            const int held = (count + kRowsBehind - 1) / kRowsBehind * kRowsBehind;
            std::vector<float> out(size_t(held * kPanel), 3.0f);
            multiply_in_tiles(format, {x, first, cols, linear.panel(0), out.data()}, count);
            for (int i = 0; i < count * kPanel; i++)
                near(out[size_t(i)], want[size_t(first * kPanel + i)], 0, "in tiles", count, i);
        }
}
