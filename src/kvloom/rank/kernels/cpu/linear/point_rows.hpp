// One row times weights that are points of a grid: points are multiplied as they are looked up, the eight neighbours of a
// channel side by side, and not put in the order of quads, which pays for many rows only.
#pragma once

#include "linear/points.hpp"

namespace kvl {

#ifdef KVL_HAS_LOOK_UP

constexpr bool multiplies_points(int format) { return has_grid(format); }

// The points of a format's grid: a byte for the size of each neighbour. Those of IQ1, without their move, are kMoved more than
// in the table, so that none is negative.
constexpr int kMoved = 7;
template <int FORMAT>
struct PointSizes {
    static constexpr GridShape kGrid = grid_of(FORMAT);
    constexpr PointSizes() : at{} {
        for (int index = 0; index < kGrid.count(); index++)
            for (int i = 0; i < kPoint; i++) {
                const int size = table_of(FORMAT)[kGrid.points[index] >> 2 * i & 3] + (kGrid.has_move ? kMoved : 0);
                at[index] |= uint64_t(size) << 8 * i;
            }
    }
    alignas(64) uint64_t at[kGrid.count()];
};
template <int FORMAT>
inline constexpr PointSizes<FORMAT> kPointSizes;

// The indices of a block, a word each, if some of their bits lie apart. All are written before the first is read: words
// that were stored together are slow to load one by one until they are in the cache.
template <int FORMAT, bool HAS_UPPER = (grid_of(FORMAT).upper_bits() > 0)>
struct BlockIndices {
    explicit BlockIndices(const uint8_t* block) {
        constexpr int kMask = (1 << grid_of(FORMAT).upper_bits()) - 1;
        for (int k = 0; k < kSuper; k += kPoint) {
            const uint8_t* low = group_of(block, FORMAT, k) + k % kFileGroup / kPoint * kPanel;
            put_indices(words + k / kPoint * kPanel, low, block + upper_offset(FORMAT, k, 0), upper_shift(FORMAT, k), kMask);
        }
    }
    const uint16_t* of(int group) const { return words + group * kIndexBytes; }
    alignas(64) uint16_t words[kSuper / kPoint * kPanel];
};
template <int FORMAT>
struct BlockIndices<FORMAT, false> {
    const uint8_t* of(int group) const { return group_of(block, FORMAT, group * kFileGroup); }
    const uint8_t* block;
};

// Makes of the sums of sizes of 16 channels those of IQ1's points: -kMoved for each activation, two less with bit BIT, their move.
template <int BIT>
inline void move(const uint16_t* index, const int8_t* x, const int32_t* runs, I32 (&sums)[2]) {
    __m256i moved[2];
    sums_with_bit<BIT, -2>(index, x, moved);
    for (int run = 0; run < 2; run++) {
        const __m256i first = _mm256_cvtepi16_epi32(_mm256_castsi256_si128(moved[run]));
        const __m256i second = _mm256_cvtepi16_epi32(_mm256_extracti128_si256(moved[run], 1));
        sums[run] = add(add(sums[run], ints_of(first, second)), splat_int(-kMoved * runs[run]));
    }
}

// Multiplies one row by a panel. Its sums have the bits of multiply_unpacked.
template <int FORMAT>
void multiply_points(const Pass& pass) {
    constexpr GridShape kGrid = grid_of(FORMAT);
    constexpr int kMask = kGrid.has_move ? kGrid.count() - 1 : 0xffff;  // of what else an index holds
    const int8_t* x = pass.x.data + pass.row * pass.cols;
    const float* scale = pass.x.scale + pass.row * (pass.cols / kFileGroup);
    const int32_t* runs = pass.x.sum + pass.row * (pass.cols / kRun);
    const uint8_t* block = pass.panel;
    F32 lo[1] = {splat(0)}, hi[1] = {splat(0)};
    for (int64_t left = pass.cols; left > 0; left -= kSuper, block += block_bytes(FORMAT)) {
        for (int at = 0; at < block_bytes(FORMAT); at += 64) prefetch(block + kPrefetchBytes + at);
        const BlockScales<FORMAT> scales(block);
        const BlockIndices<FORMAT> indices{block};
        for (int g = 0; g < kSuper / kFileGroup; g++, x += kFileGroup, scale++, runs += 2) {
            const auto* index = indices.of(g);
            const uint8_t* signs = group_of(block, FORMAT, g * kFileGroup) + kIndexBytes;
            __m256i eights[4];
            for (int p = 0; p < 4; p++) eights[p] = _mm256_castpd_si256(_mm256_broadcast_sd((const double*)(x + p * kPoint)));
            RunSums sums[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
                sums[i] = eight_channels<kMask, !kGrid.has_move>(kPointSizes<FORMAT>.at, index + i * 8, signs + i * 32, eights);
            I32 a[2] = {ints_of(sums[0].first, sums[1].first), ints_of(sums[0].second, sums[1].second)};
            I32 b[2] = {ints_of(sums[2].first, sums[3].first), ints_of(sums[2].second, sums[3].second)};
            if constexpr (kGrid.has_move) move<kGrid.bits>(index, x, runs, a), move<kGrid.bits>(index + kLanes, x, runs, b);
            if constexpr (has_runs(FORMAT)) {
                for (int run = 0; run < 2; run++) scales.of(g, run).add_to(lo[0], hi[0], to_float(a[run]), to_float(b[run]), *scale, 0);
            } else {
                scales.of(g, 0).add_to(lo[0], hi[0], to_float(add(a[0], a[1])), to_float(add(b[0], b[1])), *scale, 0);
            }
        }
    }
    store_rows(lo, hi, pass.out);
}

#else

constexpr bool multiplies_points(int) { return false; }
template <int FORMAT>
void multiply_points(const Pass&) {}

#endif

}  // namespace kvl
