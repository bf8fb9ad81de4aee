// int8 linears with one scale a channel and one a row on the tile unit of Intel's processors (AMX). Sums over all of K are
// the same integers that dot products give, and they are scaled in the same way, so a row has the same bits here and there.
//
// A stretch of a panel is two tiles as it lies in memory: 16 channels each, a quad of k a row. Bytes are unsigned there, and
// what that adds is taken off the sums, which stay in tiles from the first stretch to the last.
#pragma once

#include "gemm.hpp"
#include "tile_unit.hpp"

namespace kvl {

#ifdef KVL_HAS_TILES

constexpr int kChannelRows = 32;      // of a block: two tiles of rows times the panel's two of channels, four of the eight
constexpr int kChannelTilesFrom = 12;  // fewer are done as soon by dot products, at the rate of the memory (measured in whole steps)

// Sums of some rows that have left the tiles, and those of them that are scaled already.
struct ChannelBlock {
    void finish_until(int row, const ChannelScales& scales) {
        for (; finished < row; finished++) {
            const I32 start = splat_int(-kByteZero * pass.x.sum[pass.row + finished]);
            const int32_t* own = sums + finished * kPanel;
            const I32 a = add(I32{_mm512_load_si512(own)}, start), b = add(I32{_mm512_load_si512(own + kLanes)}, start);
            scales.store_row(pass.out + finished * kPanel, a, b, pass.x.scale[pass.row + finished]);
        }
    }
    Pass pass;
    int rows = 0, finished = 0;
    alignas(64) int32_t sums[kChannelRows * kPanel];
};

// The rows that tiles are shaped for: 17 to 32 with IS_WIDE, else 16 at most. Those of `before` are scaled meanwhile, which
// the unit leaves time for. is_first: the panel comes from memory.
template <bool IS_WIDE>
KVL_IN_TILES void multiply_channel_block(ChannelBlock& block, ChannelBlock& before, const ChannelScales& scales, bool is_first) {
    const int64_t cols = block.pass.cols, steps = cols / kInt8Group;
    const int8_t* x = block.pass.x.data + block.pass.row * cols;
    const uint8_t* weights = block.pass.panel + head_bytes(KVL_INT8_CHANNEL);
    _tile_zero(0);
    _tile_zero(1);
    if (IS_WIDE) _tile_zero(2);
    if (IS_WIDE) _tile_zero(3);
    for (int64_t step = 0; step < steps; step++, x += kInt8Group, weights += kInt8Group * kPanel) {
        for (int at = 0; is_first && at < kInt8Group * kPanel; at += 64) prefetch(weights + kPrefetchBytes + at);
        _tile_loadd(4, x, cols);
        _tile_loadd(6, weights, kPanel * 4);
        _tile_dpbsud(0, 4, 6);
        _tile_loadd(7, weights + 64, kPanel * 4);
        _tile_dpbsud(1, 4, 7);
        if (IS_WIDE) {
            _tile_loadd(5, x + kLanes * cols, cols);
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        }
        before.finish_until(int(before.rows * (step + 1) / steps), scales);
    }
    int32_t* others = block.sums + kLanes * kPanel;
    _tile_stored(0, block.sums, kPanel * 4);
    _tile_stored(1, block.sums + kLanes, kPanel * 4);
    if (IS_WIDE) _tile_stored(2, others, kPanel * 4);
    if (IS_WIDE) _tile_stored(3, others + kLanes, kPanel * 4);
}

// Any number of rows. Nothing is read or written behind the last.
KVL_IN_TILES inline void multiply_channel_in_tiles(const Pass& pass, int rows) {
    asm volatile("" ::: "memory");  // compilers do not see what a tile is loaded of, and what it is stored to
    ChannelBlock blocks[2];
    const ChannelScales scales(pass.panel);
    int turn = 0;
    for (int r = 0; r < rows; r += kChannelRows, turn = 1 - turn) {
        ChannelBlock &block = blocks[turn], &before = blocks[1 - turn];
        block.pass = {pass.x, pass.row + r, pass.cols, pass.panel, pass.out + r * kPanel};
        block.rows = min_of(rows - r, kChannelRows);
        block.finished = 0;
        if (r == 0 || block.rows < kChannelRows) {
            const BlockShapes shapes(block.rows);
            shapes.load();
        }
        pass.ask(r, r + block.rows);
        block.rows > kLanes ? multiply_channel_block<true>(block, before, scales, r == 0)
                            : multiply_channel_block<false>(block, before, scales, r == 0);
        asm volatile("" ::: "memory");
    }
    ChannelBlock& last = blocks[1 - turn];
    last.finish_until(last.rows, scales);
    _tile_release();  // a thread that sleeps has 8 KB less to be kept
}

#else

constexpr int kChannelTilesFrom = 1 << 30;
inline void multiply_channel_in_tiles(const Pass&, int) {}

#endif

}  // namespace kvl
