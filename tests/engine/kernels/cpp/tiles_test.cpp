// The tile unit, if this processor has one: every number of rows, compared with the same rows one by one on vectors.
#include <algorithm>

#include "attention/attention_tiles.hpp"
#include "check.hpp"
#include "linear/tiles.hpp"
#include "model/model.hpp"

using namespace kvl;

// Every row has the same bits, and no memory after the last row's block is written.
static void test_in_tiles(const Linear& linear) {
    constexpr int kMost = 77;
    const int format = linear.format(0);
    if (!has_tiles()) return;
    const int64_t cols = linear.padded_cols, rows = kMost + kRowsBehind;
    std::vector<int8_t> data(static_cast<size_t>(rows * cols));
    std::vector<float> scale(static_cast<size_t>(rows * num_scales(format, cols))), want(static_cast<size_t>(kMost * kPanel));
    std::vector<int32_t> sums(static_cast<size_t>(rows * num_sums(format, cols)));
    const Activations x{data.data(), scale.data(), sums.data()};
    for (int m = 0; m < kMost; m++) {
        store_activations(x, m, noise(cols).data(), cols, format);
        tile_for(format, 1)({x, m, cols, linear.panel(0), want.data() + m * kPanel}, table_of(format));
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

// Query rows of a few tokens with three heads each: in tiles together they have the same bits as each one alone on
// vectors.
template <class Cache, class Tiles>
static void test_attention_in_tiles(const PagedHead& head, int64_t length, int64_t window) {
    if (!can_attend_in_tiles(Cache::kFormat)) return;
    const TinyIsZero as_in_a_step;
    const int key_dim = head.key_dim, dim = head.value_dim;
    for (int rows : {1, 2, 3, 4, 7, 15, 16, 17, 31, 32}) {
        std::vector<typename Cache::Stored> q(size_t(kTileQueries * key_dim));  // as many rows as are read
        std::vector<float> together(size_t(rows * dim)), alone(together);
        std::vector<Query> queries;
        Partials of_all[kTileGroups];
        for (int g = 0; g < kTileGroups; g++) of_all[g].sums = together.data() + g * kLanes * dim;
        for (int m = 0; m < rows; m++) {
            const float scale = Cache::store_query(q.data() + m * key_dim, noise(key_dim).data(), key_dim, 1.0f / std::sqrt(float(key_dim)));
            const int64_t until = std::max<int64_t>(1, length - (rows - 1 - m) / 3);
            queries.push_back({q.data() + m * key_dim, scale, window ? std::max<int64_t>(0, until - window) : 0, until});
        }
        attend_in_tiles<Tiles>(head, queries.data(), rows, queries[0].from, length, of_all);
        for (int m = 0; m < rows; m++) {
            const Query& query = queries[size_t(m)];
            Partials own;
            own.sums = alone.data() + m * dim;
            attend_rows<Cache, Tiles>(head, &query, 1, query.from, query.until, false, &own);
            const Partials& group = of_all[m / kLanes];
            near(group.weight[m % kLanes], own.weight[0], 0, "weight in tiles", rows, m);
            near(group.peak[m % kLanes], own.peak[0], 0, "peak in tiles", rows, m);
            for (int d = 0; d < dim; d++) near(together[size_t(m * dim + d)], alone[size_t(m * dim + d)], 0, "sum in tiles", rows, d);
        }
    }
}
