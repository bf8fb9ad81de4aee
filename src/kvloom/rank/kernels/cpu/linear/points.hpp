// Weights that are points of a grid (GridShape), looked up in memory.
#pragma once

#include "linear/pass.hpp"

namespace kvl {

// The points of a format's grid: a byte for the number of each neighbour, without its sign.
template <int FORMAT>
struct WidePoints {
    static constexpr GridShape kGrid = grid_of(FORMAT);
    constexpr WidePoints() : at{} {
        for (int index = 0; index < kGrid.count() << kGrid.has_move; index++)
            for (int i = 0; i < kPoint; i++) {
                const int size = kGrid.points[index % kGrid.count()] >> 2 * i & 3;
                at[index] |= uint64_t(size | index / kGrid.count() << 2) << 8 * i;
            }
    }
    alignas(64) uint64_t at[kGrid.count() << kGrid.has_move];
};
template <int FORMAT>
inline constexpr WidePoints<FORMAT> kWidePoints;

// Unpacks a group of a block, as Unpacked::fill describes.
template <int FORMAT, class Put>
void fill_points(const uint8_t* block, int group, int8_t* to, const Table& table, Put put) {
    constexpr GridShape kGrid = grid_of(FORMAT);
    constexpr int kQuad = kPanel * 4;
    const uint8_t *low = block + front_bytes(FORMAT) + group * group_bytes(FORMAT), *signs = low + kIndexBytes;
    const auto put_quad = [&](int quad, int at, Bytes sizes) {
        put(to + quad * kQuad + at, entries_of<FORMAT>(kGrid.has_move ? sizes : with_bits(sizes, signs + at, 2 - quad, 4), table));
    };
#pragma GCC unroll kQuadsUnrolled
    for (int p = 0; p < kFileGroup / kPoint; p++) {
        const int k = group * kFileGroup + p * kPoint;
        const uint8_t* upper = block + upper_offset(FORMAT, k, 0);
#pragma GCC unroll 2
        for (int half = 0; half < kPanel; half += kLanes) {
            const Indices index = indices_of(low + p * kPanel + half, upper + half, upper_shift(FORMAT, k), (1 << kGrid.upper_bits()) - 1);
            const BytesPair sizes = points(kWidePoints<FORMAT>.at, index);
            put_quad(2 * p, half * 4, sizes.first);
            put_quad(2 * p + 1, half * 4, sizes.second);
        }
    }
}

}  // namespace kvl
