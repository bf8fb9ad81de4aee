#include "linear/way.hpp"

#include "linear/tiles.hpp"
#include "linear/unpacked.hpp"

namespace kvl {
namespace {

bool pays_in_tiles(int format, int64_t rows) {
    if (format == KVL_BF16) return rows >= kBf16TilesFrom && has_bf16_tiles();
    return rows >= tiles_from(format);
}

bool pays_unpacked(int format, int64_t rows) { return has_grid(format) || (unpacks(format) && rows >= kUnpackFrom); }

Passes passes_of(int format, int64_t rows, bool is_unpacked) {
    if (is_unpacked) return Passes(rows, kTileRows, kTileRows);
    return Passes(rows, rows_once(format), rows_many(format));
}

}  // namespace

Way::Way(int format, int64_t rows, int unit)
    : format(format), is_in_tiles(unit == KVL_TILES && pays_in_tiles(format, rows)), is_in_pairs(unit == KVL_PAIRS),
      is_unpacked(!is_in_tiles && pays_unpacked(format, rows)), passes(passes_of(format, rows, is_in_tiles || is_unpacked)) {}

int64_t Way::ahead(int64_t index, int64_t cols) const {
    if (index == 1) return panel_bytes(format, cols);
    return index == 0 && passes.begin(1) >= kBusyRows ? kPrefetchBytesBusy : kPrefetchBytes;
}

void Way::multiply(const Pass* passes, int64_t count, int rows) const {
    if (is_in_tiles && is_whole(format)) return multiply_channel_in_tiles(passes, count, rows);
    for (const Pass* pass = passes; pass < passes + count; pass++) {
        if (is_in_tiles) {
            format == KVL_BF16 ? multiply_bf16_in_tiles(*pass, rows) : multiply_in_tiles(format, *pass, rows);
            continue;
        }
        if (is_unpacked) {
            multiply_unpacked(format, *pass, rows);
            continue;
        }
        pass->ask(0, rows);
        tile_for(format, rows, is_in_pairs)(*pass, table_of(format));
        pass->finish(0, rows);
    }
}

}  // namespace kvl
