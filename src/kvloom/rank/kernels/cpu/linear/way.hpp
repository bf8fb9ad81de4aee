// Chooses how rows are multiplied by the panels of a linear: by the tile unit or by vector instructions, and in how
// many passes. Only way.cpp instantiates the micro-kernels, so they are compiled once.
#pragma once

#include "linear/gemm.hpp"

namespace kvl {

constexpr int kTileRows = 516;  // most rows of a pass that unpacks a panel, once for all; a multiple of kBlockRows
constexpr int kUnpackFrom = 12;  // fewest rows for which vector instructions unpack one (measured)
// Most rows of a strip (step/fused.cpp) in formats that need no unpacking: its inputs and outputs then stay in the
// second-level cache.
constexpr int kStripRows = 256;
constexpr int kStripBlock = 32;  // a strip is a multiple of this: rows of a block of the tile unit
constexpr int kLeastStrip = 128;  // fewest rows of a strip: with fewer, reading all panels for each strip costs more
constexpr int64_t kStripFloats = 400 << 10;  // most floats of a strip's outputs, which fit that cache

// How `rows` rows are multiplied by panels of one format.
struct Way {
    Way(int format, int64_t rows, int unit);  // unit: KVL_NO_UNIT, KVL_TILES or KVL_PAIRS

    // Prefetch distance in bytes of pass `index` over a panel of `cols` columns: the first pass prefetches the panel
    // itself, the second the next panel. Later passes find theirs in the cache.
    int64_t ahead(int64_t index, int64_t cols) const;
    // Whether weights bypass the last-level cache (docs/decisions/kernel-speed.md), on AMD's processors: where a step
    // reads them once for many rows. With fewer rows the cache keeps a part of them for the next step.
    bool is_passing() const { return is_in_pairs && passes.count == 1 && passes.rows >= kBusyRows; }
    // Runs one pass and its epilogue. `out` must have room for kTileRows rows.
    void multiply(const Pass& pass, int rows) const { multiply(&pass, 1, rows); }
    // Multiplies the same rows by `count` panels of the format. The passes may share one `out` if each has an epilogue.
    void multiply(const Pass* passes, int64_t count, int rows) const;

    const int format;
    const bool is_in_tiles, is_in_pairs, is_unpacked;
    const Passes passes;
};

}  // namespace kvl
