// Micro-kernels on the tile unit of Intel's processors (AMX): many rows of int8 activations times one panel.
//
// A part, which is the weights of a panel that share a scale, is unpacked into two tiles: 16 channels each, one quad of
// k per tile row. Sums of a part are exact integers and are scaled as in the micro-kernels on vectors, so both give a
// row the same bits.
#pragma once

#include "linear/bf16_tiles.hpp"
#include "linear/channel_tiles.hpp"
#include "linear/way.hpp"

namespace kvl {

#ifdef KVL_HAS_TILES

// Rows whose float sums stay in vector registers: 24 of the 32; scales and the sums of a part need the others.
constexpr int kBlockRows = 12;
// Columns of a panel that are unpacked at a time: 24 KB, half of a first-level cache.
constexpr int kTileCols = 768;

static_assert(kTileRows % kBlockRows == 0 && kBlockRows <= kRowsBehind);

// Fewest rows for which tiles are used. Fewer rows are faster on vector instructions, which read weights while they
// multiply instead of unpacking them first (measured in whole steps).
constexpr int tiles_from(int format) { return is_whole(format) ? kChannelTilesFrom : format == KVL_INT8 || format == KVL_INT8_32 ? 24 : 48; }

// Number of consecutive weights of a channel that share a scale.
constexpr int part_size(int format) { return has_runs(format) ? kRun : group_size(format); }

// Some groups of a panel, unpacked for the tile unit: weights as signed bytes, scales (and minimums) as floats.
template <int FORMAT>
struct Unpacked {
    static constexpr int kGroup = group_size(FORMAT), kPart = part_size(FORMAT), kParts = kGroup / kPart;
    static constexpr int kScales = (has_min(FORMAT) ? 2 : 1) * kParts * kPanel;  // and minimums, of a group

    // Unpacks `groups` groups, of which the first is group `first` of a panel and begins at `panel`; returns their end.
    const uint8_t* fill(const uint8_t* panel, int64_t first, int64_t groups, const Table& table) {
        for (int64_t g = 0; g < groups; g++, panel += group_bytes(FORMAT)) {
            for (int at = 0; at < group_bytes(FORMAT); at += 64) prefetch(panel + kPrefetchBytes + at);
            fill_scales(panel, first + g, scales + g * kScales);
            fill_weights(panel + scale_bytes(FORMAT), weights + g * kGroup * kPanel, table);
        }
        return panel;
    }

    // Unpacks the scales (and minimums) of the parts of group `number` of a panel.
    static void fill_scales(const uint8_t* group, int64_t number, float* to) {
        if constexpr (FORMAT == KVL_INT2) {
            for (int run = 0; run < kParts; run++, to += 2 * kPanel) {
                const Scales<FORMAT> of_run(group, number, run);
                store(to, of_run.scale_a), store(to + kLanes, of_run.scale_b);
                store(to + kPanel, of_run.min_a), store(to + kPanel + kLanes, of_run.min_b);
            }
        } else {
            for (int i = 0; i < kScales; i += kLanes) store(to + i, load_fp16(reinterpret_cast<const uint16_t*>(group) + i));
        }
    }

    // Unpacks the weights of one group; `planes` is where its planes, or without any its weights, begin.
    static void fill_weights(const uint8_t* planes, int8_t* to, const Table& table) {
        constexpr int kQuads = kPart / 4, kZero = has_bytes(FORMAT) ? kByteZero : zero_of(FORMAT);
        const uint8_t* from = planes + plane_bytes(FORMAT);
        const uint8_t* third = planes + kParts * kPanel * 4;
        for (int part = 0; part < kParts; part++, planes += kPanel * 4) {
#pragma GCC unroll 16
            for (int quad = 0; quad < kQuads; quad++) {
#pragma GCC unroll 2
                for (int at = 0; at < kPanel * 4; at += 64, to += 64) {
                    Bytes bytes;
                    if constexpr (has_bytes(FORMAT)) bytes = load_bytes(from + at);
                    else if constexpr (is_thin(FORMAT)) bytes = thin_quad_of<FORMAT>(planes + at, third + at, part * kQuads, quad, table);
                    else bytes = quad_of<FORMAT>(from + at, planes + at, quad, table);
                    _mm512_store_si512(to, _mm512_sub_epi8(bytes.v, _mm512_set1_epi8(char(kZero))));
                }
                if (has_bytes(FORMAT) || quad % 2) from += kPanel * 4;
            }
        }
    }

    alignas(64) int8_t weights[kTileCols * kPanel];
    alignas(64) float scales[kTileCols / kGroup * kScales];
};

// Tiles used to multiply parts: 0 and 1, or in the next part 2 and 3, hold sums; 4 activations; 6 and 7 weights.
struct PartShapes : TileConfig {
    explicit PartShapes(int part) {
        for (int tile = 0; tile < 8; tile++) {
            num_rows[tile] = uint8_t(tile >= 6 ? part / 4 : kBlockRows);
            row_bytes[tile] = uint16_t(tile == 4 ? part : 64);
        }
    }
};

// Start value of integer sums in tiles: the bits of the float 1.5 * 2^23. Adding an integer s to them gives the bits of
// the float 1.5 * 2^23 + s, so a float subtraction replaces the conversion to float. It runs on a port that
// multiplications do not need, of whose two ports the tile unit blocks one.
struct Start {
    static constexpr float kValue = 12582912.0f;
    static constexpr int32_t kBits = 0x4b400000;
    constexpr Start() : bits{} {
        for (int32_t& each : bits) each = kBits;
    }
    alignas(64) int32_t bits[kLanes];
};
inline constexpr Start kStart;
static_assert(kInt8Group * 128 * 128 < 1 << 22, "sums stay in the mantissa");

// Multiplies kBlockRows rows by one part, in the tiles that the previous part does not use. end_part stores the sums.
KVL_IN_TILES inline void begin_part(bool is_odd, const int8_t* x, int64_t cols, const int8_t* weights) {
    _tile_loadd(4, x, cols);
    _tile_loadd(6, weights, kPanel * 4);
    if (is_odd) {
        _tile_loadd(2, kStart.bits, 0);
        _tile_dpbssd(2, 4, 6);
        _tile_loadd(7, weights + 64, kPanel * 4);
        _tile_loadd(3, kStart.bits, 0);
        _tile_dpbssd(3, 4, 7);
    } else {
        _tile_loadd(0, kStart.bits, 0);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(7, weights + 64, kPanel * 4);
        _tile_loadd(1, kStart.bits, 0);
        _tile_dpbssd(1, 4, 7);
    }
}

KVL_IN_TILES inline void end_part(bool is_odd, float* dots) {
    if (is_odd) {
        _tile_stored(2, dots, kPanel * 4);
        _tile_stored(3, dots + kLanes, kPanel * 4);
    } else {
        _tile_stored(0, dots, kPanel * 4);
        _tile_stored(1, dots + kLanes, kPanel * 4);
    }
}

// Multiplies `groups` unpacked groups, from group `first` of the panel on, by the first ROWS <= kBlockRows rows of a
// pass, and adds the results to `out` (first == 0: stores them).
template <int ROWS, int FORMAT>
KVL_IN_TILES void multiply_block(const Pass& pass, int64_t first, int64_t groups, const Unpacked<FORMAT>& unpacked) {
    constexpr int kGroup = group_size(FORMAT), kPart = part_size(FORMAT), kParts = kGroup / kPart, kRuns = kGroup / run_size(FORMAT);
    constexpr int kScales = Unpacked<FORMAT>::kScales / kParts;
    const int64_t stride = pass.cols / kGroup, parts = groups * kParts;
    const int8_t* x = pass.x.data + pass.row * pass.cols + first * kGroup;
    const float* scale = pass.x.scale + pass.row * stride + first;
    const int32_t* sums = pass.x.sum + (pass.row * stride + first) * kRuns;
    alignas(64) float dots[2][kBlockRows * kPanel];
    F32 lo[ROWS], hi[ROWS];
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++) {
        lo[m] = first == 0 ? splat(0) : load(pass.out + m * kPanel);
        hi[m] = first == 0 ? splat(0) : load(pass.out + m * kPanel + kLanes);
    }
    begin_part(false, x, pass.cols, unpacked.weights);
    for (int64_t p = 0; p < parts; p++) {
        const int64_t next = p + 1;
        if (next < parts) begin_part(next % 2, x + next * kPart, pass.cols, unpacked.weights + next * kPart * kPanel);
        end_part(p % 2, dots[p % 2]);
        const Scales<FORMAT> of_part(unpacked.scales + p * kScales);
        const int64_t g = p / kParts;
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; m++) {
            const int32_t* runs = sums + (m * stride + g) * kRuns;
            const int32_t sum = !has_min(FORMAT) ? 0 : has_runs(FORMAT) ? runs[p % kParts] : group_sum<FORMAT>(runs);
            const float* from = dots[p % 2] + m * kPanel;
            const F32 a = add(load(from), splat(-Start::kValue)), b = add(load(from + kLanes), splat(-Start::kValue));
            of_part.add_to(lo[m], hi[m], a, b, scale[m * stride + g], sum);
        }
    }
    store_rows(lo, hi, pass.out);
}

// Multiplies 1 <= rows <= kTileRows rows by one panel. It reads whole blocks of kBlockRows rows of activations; `out`
// must have room for as many.
template <int FORMAT>
KVL_IN_TILES void multiply_panel(const Pass& pass, int rows, const Table& table) {
    constexpr int64_t kChunk = kTileCols / group_size(FORMAT);
    Unpacked<FORMAT> unpacked;
    const int64_t groups = pass.cols / group_size(FORMAT);
    const uint8_t* panel = pass.panel;
    PartShapes(part_size(FORMAT)).load();
    for (int64_t g = 0; g < groups; g += kChunk) {
        const int64_t count = groups - g < kChunk ? groups - g : kChunk;
        panel = unpacked.fill(panel, g, count, table);
        asm volatile("" ::: "memory");  // compilers do not know what memory tile loads access
        for (int r = 0; r < rows; r += kBlockRows) {
            const Pass block{pass.x, pass.row + r, pass.cols, nullptr, pass.out + r * kPanel};
            if (g + count == groups) pass.ask(r, min_of(r + kBlockRows, rows));
            if (rows - r <= 4) multiply_block<4>(block, g, count, unpacked);
            else if (rows - r <= 8) multiply_block<8>(block, g, count, unpacked);
            else multiply_block<kBlockRows>(block, g, count, unpacked);
        }
    }
    pass.finish(0, rows);
    _tile_release();  // saves the system from keeping 8 KB of tiles when the thread is switched out
}

inline void multiply_in_tiles(int format, const Pass& pass, int rows) {
    const Table& table = table_of(format);
    switch (kernel_of(format)) {
        case KVL_INT8: return multiply_panel<KVL_INT8>(pass, rows, table);
        case KVL_INT8_32: return multiply_panel<KVL_INT8_32>(pass, rows, table);
        case KVL_INT8_MIN: return multiply_panel<KVL_INT8_MIN>(pass, rows, table);
        case KVL_INT4: return multiply_panel<KVL_INT4>(pass, rows, table);
        case KVL_INT5: return multiply_panel<KVL_INT5>(pass, rows, table);
        case KVL_INT6: return multiply_panel<KVL_INT6>(pass, rows, table);
        case KVL_INT2: return multiply_panel<KVL_INT2>(pass, rows, table);
        case KVL_INT3: return multiply_panel<KVL_INT3>(pass, rows, table);
        case KVL_FP4_16: return multiply_panel<KVL_FP4_16>(pass, rows, table);
        case KVL_INT8_CHANNEL: return multiply_channel_in_tiles(&pass, 1, rows);
        default: return multiply_panel<KVL_IQ4>(pass, rows, table);
    }
}

#else

constexpr int tiles_from(int) { return 1 << 30; }
inline void multiply_in_tiles(int, const Pass&, int) {}

#endif

}  // namespace kvl
