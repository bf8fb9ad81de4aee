// bf16 linears on the tile unit of Intel's processors (AMX). tile_bf16 adds in the unit's order, so both give a row the
// same bits.
//
// In memory a stretch of a panel already has the layout of two tiles: 16 channels each, one pair of k per tile row.
// There are no scales, so sums stay in tiles from the first stretch to the last.
#pragma once

#include "isa/tile_unit.hpp"
#include "linear/gemm.hpp"

namespace kvl {

#ifdef KVL_HAS_TILES

// Rows of a block: two tiles of rows times the panel's two tiles of channels keep sums in four of the eight tiles.
constexpr int kBf16BlockRows = 32;
// Fewer rows are as fast on vector instructions, which then reach the memory's bandwidth (measured).
constexpr int kBf16TilesFrom = 4;

// A block of rows whose sums were stored from tiles; `finished` of them have been through their epilogue.
struct Bf16Block {
    // Starts the block at row `first` of a pass of `of_pass` rows.
    void begin(const Pass& of, int first, int of_pass) {
        epilogue = of.end().from(first);
        rows = min_of(of_pass - first, kBf16BlockRows);
        behind = of_pass - first - rows;
        finished = 0;
    }
    // Applies the epilogue to the next `count` rows.
    template <Sort SORT>
    void finish(int count) {
        const int until = min_of(finished + count, rows);
        for (int r = finished; r < until; r++) {
            if (r < behind) epilogue.ask(r + kBf16BlockRows);
            epilogue.apply<SORT>(r, load(sums + r * kPanel), load(sums + r * kPanel + kLanes));
        }
        finished = until;
    }
    Epilogue epilogue;  // with rows counted from the block's first
    int rows = 0, finished = 0, behind = 0;  // behind: rows of the pass after this block
    alignas(64) float sums[kBf16BlockRows * kPanel];
};

// Multiplies a block of 17 to 32 rows (IS_WIDE) or at most 16, for which the tiles are configured. Between the tile
// instructions it applies the epilogue of block `before`. is_first: prefetches the panel, which is not cached yet.
template <bool IS_WIDE, Sort SORT>
KVL_IN_ALL_TILES void multiply_bf16_block(const uint16_t* x, const Pass& pass, float* sums, Bf16Block& before, bool is_first) {
    const uint16_t* weights = reinterpret_cast<const uint16_t*>(pass.panel);
    const int64_t stride = pass.cols * 2, others = kLanes * pass.cols;
    const int each = int((kBf16BlockRows * kBf16Stretch + pass.cols - 1) / pass.cols);
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
        if (IS_WIDE) {
            _tile_loadd(5, x + k + others, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        before.finish<SORT>(each);
    }
    float* rest = sums + kLanes * kPanel;
    _tile_stored(0, sums, kPanel * 4);
    _tile_stored(1, sums + kLanes, kPanel * 4);
    if (IS_WIDE) _tile_stored(2, rest, kPanel * 4);
    if (IS_WIDE) _tile_stored(3, rest + kLanes, kPanel * 4);
}

template <Sort SORT>
KVL_IN_ALL_TILES void multiply_bf16_pass(const Pass& pass, int rows) {
    asm volatile("" ::: "memory");  // compilers do not know what memory tile loads and stores access
    Bf16Block blocks[2];
    int turn = 0;
    for (int r = 0; r < rows; r += kBf16BlockRows, turn = 1 - turn) {
        Bf16Block &block = blocks[turn], &before = blocks[1 - turn];
        block.begin(pass, r, rows);
        if (r == 0 || block.rows < kBf16BlockRows) {
            const BlockShapes shapes(block.rows);
            shapes.load();
        }
        if (r == 0) pass.ask(0, block.rows);
        const uint16_t* const x = reinterpret_cast<const uint16_t*>(pass.x.data) + (pass.row + r) * pass.cols;
        block.rows > kLanes ? multiply_bf16_block<true, SORT>(x, pass, block.sums, before, r == 0)
                            : multiply_bf16_block<false, SORT>(x, pass, block.sums, before, r == 0);
        asm volatile("" ::: "memory");
    }
    blocks[1 - turn].finish<SORT>(kBf16BlockRows);
    _tile_release();  // saves the system from keeping 8 KB of tiles when the thread is switched out
}

// Multiplies any number of rows by one panel. No memory after the last row is read or written.
inline void multiply_bf16_in_tiles(const Pass& pass, int rows) {
    switch (pass.end().sort()) {
        case Sort::kStores: return multiply_bf16_pass<Sort::kStores>(pass, rows);
        case Sort::kAdds: return multiply_bf16_pass<Sort::kAdds>(pass, rows);
        case Sort::kSwiglu: return multiply_bf16_pass<Sort::kSwiglu>(pass, rows);
        default: return multiply_bf16_pass<Sort::kAny>(pass, rows);
    }
}

#else

constexpr int kBf16TilesFrom = 1 << 30;
inline void multiply_bf16_in_tiles(const Pass&, int) {}

#endif

}  // namespace kvl
