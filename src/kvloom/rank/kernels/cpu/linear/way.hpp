// How the rows of a step are multiplied by the panels of a linear. The kernels are compiled once, in way.cpp.
#pragma once

#include "linear/gemm.hpp"

namespace kvl {

constexpr int kTileRows = 516;  // of one pass, whole blocks: a panel is unpacked once for all of them
// the same where nothing is unpacked: inputs and outputs of so many rows stay in a second-level cache (fused.cpp)
constexpr int kStripRows = 256;
constexpr int kStripBlock = 32;  // rows that the tile unit takes at a time there
constexpr int kLeastStrip = 128;  // fewer rows are not worth reading all panels
constexpr int64_t kStripFloats = 400 << 10;  // of a strip, in that cache

// Of one form: by the tile unit or without it, so many rows in each pass.
struct Way {
    Way(int format, int64_t rows, int unit);  // KVL_TILES, ...

    // Prefetch distance in bytes of pass `index` over a panel of `cols` columns: the first pass prefetches the panel
    // itself, the second the next panel. Later passes find theirs in the cache.
    int64_t ahead(int64_t index, int64_t cols) const;
    // One pass, and its epilogue. `out` has room for kTileRows rows.
    void multiply(const Pass& pass, int rows) const { multiply(&pass, 1, rows); }
    // The same rows times some panels of the form; all passes may have one `out`, if each has an epilogue.
    void multiply(const Pass* passes, int64_t count, int rows) const;

    const int format;
    const bool is_in_tiles, is_in_pairs;
    const Passes passes;
};

}  // namespace kvl
