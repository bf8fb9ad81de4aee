// bf16 linears on the tile unit of Intel's processors (AMX). The order in which tile_bf16 adds is this unit's, so a row has
// the same bits here and there.
//
// A stretch of a panel is two tiles as it lies in memory: 16 channels each, a pair of k a row. There are no scales, so sums
// stay in tiles from the first stretch to the last.
#pragma once

#include "gemm.hpp"
#include "tile_unit.hpp"

namespace kvl {

#ifdef KVL_HAS_TILES

constexpr int kBf16BlockRows = 32;  // two tiles of rows times the panel's two of channels: four of the eight hold sums
constexpr int kBf16TilesFrom = 4;   // fewer rows are done as soon without the unit, at the rate of the memory (measured)

// The rows that tiles are shaped for: 17 to 32 with IS_WIDE, else 16 at most. is_first: the panel comes from memory.
template <bool IS_WIDE>
KVL_IN_ALL_TILES void multiply_bf16_block(const Pass& pass, bool is_first) {
    const uint16_t* x = reinterpret_cast<const uint16_t*>(pass.x.data) + pass.row * pass.cols;
    const uint16_t* weights = reinterpret_cast<const uint16_t*>(pass.panel);
    const int64_t stride = pass.cols * 2, others = kLanes * pass.cols;
    _tile_zero(0);
    _tile_zero(1);
    if (IS_WIDE) _tile_zero(2);
    if (IS_WIDE) _tile_zero(3);
    for (int64_t k = 0; k < pass.cols; k += kBf16Stretch, weights += kBf16Stretch * kPanel) {
        for (int i = 0; is_first && i < kBf16Stretch * kPanel; i += kPanel) prefetch(weights + kPrefetchBytes / 2 + i);
        _tile_loadd(4, x + k, stride);
        _tile_loadd(6, weights, kPanel * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + kPanel, kPanel * 4);
        _tile_dpbf16ps(1, 4, 7);
        if (!IS_WIDE) continue;
        _tile_loadd(5, x + k + others, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, pass.out, kPanel * 4);
    _tile_stored(1, pass.out + kLanes, kPanel * 4);
    if (IS_WIDE) _tile_stored(2, pass.out + kLanes * kPanel, kPanel * 4);
    if (IS_WIDE) _tile_stored(3, pass.out + kLanes * kPanel + kLanes, kPanel * 4);
}

// Any number of rows. Nothing is read or written behind the last.
KVL_IN_ALL_TILES inline void multiply_bf16_in_tiles(const Pass& pass, int rows) {
    asm volatile("" ::: "memory");  // compilers do not see what a tile is loaded of
    for (int r = 0; r < rows; r += kBf16BlockRows) {
        const Pass block{pass.x, pass.row + r, pass.cols, pass.panel, pass.out + r * kPanel};
        const int count = min_of(rows - r, kBf16BlockRows);
        if (r == 0 || count < kBf16BlockRows) {
            const BlockShapes shapes(count);
            shapes.load();
        }
        pass.ask(r, r + count);
        count > kLanes ? multiply_bf16_block<true>(block, r == 0) : multiply_bf16_block<false>(block, r == 0);
    }
    _tile_release();  // a thread that sleeps has 8 KB less to be kept
    asm volatile("" ::: "memory");
}

#else

constexpr int kBf16TilesFrom = 1 << 30;
inline void multiply_bf16_in_tiles(const Pass&, int) {}

#endif

}  // namespace kvl
