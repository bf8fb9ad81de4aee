// int8 linears with one scale per channel and one per row (KVL_INT8_CHANNEL) on the tile unit of Intel's processors
// (AMX). Sums over all of K are exact integers and are scaled as in tile_channel, so both give a row the same bits.
// In memory a group of a panel already has the layout of two tiles: 16 channels each, one quad of k per tile row. Sums
// stay in tiles from the first group to the last. Weight bytes are unsigned, 128 too large; ChannelBlock corrects the
// sums.
#pragma once

#include "isa/tile_unit.hpp"
#include "linear/gemm.hpp"

namespace kvl {

#ifdef KVL_HAS_TILES

// Rows of a block: two tiles of rows times the panel's two tiles of channels keep sums in four of the eight tiles.
constexpr int kChannelRows = 32;
// Fewer rows are as fast on vector instructions, which then reach the memory's bandwidth (measured in whole steps).
constexpr int kChannelTilesFrom = 12;

// A block of rows whose sums were stored from tiles; `finished` of them have been through their epilogue.
struct ChannelBlock {
    ChannelBlock() : scales(kNoScales) {}
    // Starts the block at row `first` of a pass of `of_pass` rows.
    void begin(const Pass& of, int first, int of_pass) {
        pass = &of;
        scales = ChannelScales(of.panel);
        epilogue = of.end().from(first);
        x_scale = of.x.scale + of.row + first;
        rows = min_of(of_pass - first, kChannelRows);
        behind = of_pass - first - rows;
        finished = 0;
        for (int r = 0; r < rows; r++) starts[r] = -kByteZero * of.x.sum[of.row + first + r];
    }
    // Scales the sums of the next `count` rows and applies the epilogue.
    template <Sort SORT>
    void finish(int count) {
        const int until = min_of(finished + count, rows);
        const ChannelScales own = scales;
        for (int r = finished; r < until; r++) {
            const I32 start = splat_int(starts[r]), a{_mm512_load_si512(sums + r * kPanel)}, b{_mm512_load_si512(sums + r * kPanel + kLanes)};
            const F32 of_row = splat(x_scale[r]);
            if (r < behind) epilogue.ask(r + kChannelRows);
            epilogue.apply<SORT>(r, own.lo(add(a, start), of_row), own.hi(add(b, start), of_row));
        }
        finished = until;
    }
    const Pass* pass = nullptr;
    ChannelScales scales;
    Epilogue epilogue;  // with rows counted from the block's first
    const float* x_scale = nullptr;
    int rows = 0, finished = 0, behind = 0;  // behind: rows of the pass after this block
    int32_t starts[kChannelRows];
    alignas(64) int32_t sums[kChannelRows * kPanel];
    static constexpr uint8_t kNoScales[kPanel * 4] = {};
};

// The part of the next panel that is prefetched while a block is multiplied: `lines` cache lines of each group, from
// `at` on.
struct NextPanel {
    void ask(int64_t step) const {
        for (int line = 0; line < lines; line++) prefetch(at + step * kInt8Group * kPanel + line * 64);
    }
    const uint8_t* at;
    int lines;
};

// Multiplies a block of 17 to 32 rows (IS_WIDE) or at most 16, for which the tiles are configured. Between the tile
// instructions, which leave the vector unit idle, it applies the epilogue of block `before`.
template <bool IS_WIDE, Sort SORT>
KVL_IN_TILES void multiply_channel_block(const int8_t* x, const Pass& pass, int32_t* sums, ChannelBlock& before, NextPanel next) {
    const int64_t cols = pass.cols, steps = cols / kInt8Group;
    const uint8_t* weights = pass.panel + head_bytes(KVL_INT8_CHANNEL);
    const int each = int((kChannelRows + steps - 1) / steps);
    _tile_zero(0);
    _tile_zero(1);
    if (IS_WIDE) _tile_zero(2);
    if (IS_WIDE) _tile_zero(3);
    for (int64_t step = 0; step < steps; step++, x += kInt8Group, weights += kInt8Group * kPanel) {
        next.ask(step);
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
        before.finish<SORT>(each);
    }
    int32_t* others = sums + kLanes * kPanel;
    _tile_stored(0, sums, kPanel * 4);
    _tile_stored(1, sums + kLanes, kPanel * 4);
    if (IS_WIDE) _tile_stored(2, others, kPanel * 4);
    if (IS_WIDE) _tile_stored(3, others + kLanes, kPanel * 4);
}

// Runs passes over several panels with the same rows; SORT fits the epilogue of every pass.
template <Sort SORT>
KVL_IN_TILES void multiply_channel_passes(const Pass* passes, int64_t count, int rows) {
    asm volatile("" ::: "memory");  // compilers do not know what memory tile loads and stores access
    ChannelBlock blocks[2];
    const int num_blocks = (rows + kChannelRows - 1) / kChannelRows;
    // per block, so that together the blocks prefetch the kChannelRows lines of each group
    const int lines = (kChannelRows + num_blocks - 1) / num_blocks;
    int turn = 0, shaped = 0;
    for (const Pass* pass = passes; pass < passes + count; pass++) {
        const uint8_t* const next = pass->panel + panel_bytes(KVL_INT8_CHANNEL, pass->cols) + head_bytes(KVL_INT8_CHANNEL);
        for (int r = 0, b = 0; r < rows; r += kChannelRows, b++, turn = 1 - turn) {
            ChannelBlock &block = blocks[turn], &before = blocks[1 - turn];
            block.begin(*pass, r, rows);
            if (block.rows != shaped) {
                shaped = block.rows;
                const BlockShapes shapes(shaped);
                shapes.load();
            }
            if (r == 0) pass->ask(0, block.rows);
            const NextPanel part{next + b * lines * 64, min_of(lines, kChannelRows - b * lines)};
            const int8_t* const x = pass->x.data + (pass->row + r) * pass->cols;
            shaped > kLanes ? multiply_channel_block<true, SORT>(x, *pass, block.sums, before, part)
                            : multiply_channel_block<false, SORT>(x, *pass, block.sums, before, part);
            asm volatile("" ::: "memory");
        }
    }
    blocks[1 - turn].finish<SORT>(kChannelRows);
    _tile_release();  // saves the system from keeping 8 KB of tiles when the thread is switched out
}

// Multiplies any number of rows, which all passes share, by the passes' panels. No memory after the last row is read or
// written.
inline void multiply_channel_in_tiles(const Pass* passes, int64_t count, int rows) {
    Sort sort = passes[0].end().sort();
    for (int64_t i = 1; i < count; i++) sort = passes[i].end().sort() == sort ? sort : Sort::kAny;
    switch (sort) {
        case Sort::kStores: return multiply_channel_passes<Sort::kStores>(passes, count, rows);
        case Sort::kAdds: return multiply_channel_passes<Sort::kAdds>(passes, count, rows);
        case Sort::kSwiglu: return multiply_channel_passes<Sort::kSwiglu>(passes, count, rows);
        default: return multiply_channel_passes<Sort::kAny>(passes, count, rows);
    }
}

#else

constexpr int kChannelTilesFrom = 1 << 30;
inline void multiply_channel_in_tiles(const Pass*, int64_t, int) {}

#endif

}  // namespace kvl
