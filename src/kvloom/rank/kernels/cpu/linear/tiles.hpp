// Micro-kernels on the tile unit of Intel's processors (AMX): many rows of int8 activations times one panel.
//
// A part, which is the weights of a group that share a scale, is unpacked into two tiles: 16 channels each, one quad of
// k per tile row. Sums of a part are exact integers and are scaled as in the micro-kernels on vectors, so both give a
// row the same bits.
#pragma once

#include "linear/bf16_tiles.hpp"
#include "linear/channel_tiles.hpp"
#include "linear/unpacked.hpp"
#include "linear/way.hpp"

namespace kvl {

#ifdef KVL_HAS_TILES

// Rows whose float sums stay in vector registers: 24 of the 32; scales and the sums of a part need the others.
constexpr int kBlockRows = 12;
static_assert(kTileRows % kBlockRows == 0 && kBlockRows <= kRowsBehind);

// Fewest rows for which tiles are used. Fewer rows are faster on vector instructions, which read weights while they
// multiply instead of unpacking them first (measured in whole steps).
constexpr int tiles_from(int format) { return is_whole(format) ? kChannelTilesFrom : format == KVL_INT8 || format == KVL_INT8_32 ? 24 : 48; }

// Stores weights as signed bytes.
template <int FORMAT>
struct PutSigned {
    void operator()(int8_t* to, Bytes weights) const {
        constexpr int kZero = has_bytes(FORMAT) ? kByteZero : zero_of(FORMAT);
        _mm512_store_si512(to, _mm512_sub_epi8(weights.v, _mm512_set1_epi8(char(kZero))));
    }
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
KVL_IN_TILES void multiply_block(const Pass& pass, int64_t first, int64_t groups, const Unpacked& unpacked) {
    constexpr int kGroup = group_size(FORMAT), kPart = part_size(FORMAT), kParts = kGroup / kPart, kRuns = kGroup / run_size(FORMAT);
    constexpr int kScales = decoded_floats(FORMAT);
    const int64_t stride = pass.cols / kGroup, parts = groups * kParts;
    const int8_t* x = pass.x.data + pass.row * pass.cols + first * kGroup;
    const float* scale = pass.x.scale + pass.row * stride + first;
    const int32_t* sums = pass.x.sum + (pass.row * stride + first) * kRuns;
    alignas(64) float dots[2][kBlockRows * kPanel];
    F32 lo[ROWS], hi[ROWS];
    load_rows(lo, hi, first == 0 ? nullptr : pass.out);
    begin_part(false, x, pass.cols, unpacked.weights);
    for (int64_t p = 0; p < parts; p++) {
        const int64_t next = p + 1;
        if (next < parts) begin_part(next % 2, x + next * kPart, pass.cols, unpacked.weights + next * kPart * kPanel);
        end_part(p % 2, dots[p % 2]);
        const auto of_part = ScalesOf<FORMAT>::of_floats(unpacked.scales + p * kScales);
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
    constexpr int64_t kChunk = unpacked_cols(FORMAT) / group_size(FORMAT);
    Unpacked unpacked;
    const int64_t groups = pass.cols / group_size(FORMAT);
    const uint8_t* panel = pass.panel;
    PartShapes(part_size(FORMAT)).load();
    for (int64_t g = 0; g < groups; g += kChunk) {
        const int64_t count = groups - g < kChunk ? groups - g : kChunk;
        panel = unpacked.fill<FORMAT>(panel, count, table, PutSigned<FORMAT>{});
        asm volatile("" ::: "memory");  // compilers do not know what memory tile loads access
        for (int r = 0; r < rows; r += kBlockRows) {
            const Pass block{pass.x, pass.row + r, pass.cols, nullptr, pass.out + r * kPanel};
            if (g + count == groups) pass.ask(r, min_of(r + kBlockRows, rows));
            if (rows - r <= 4) multiply_block<4, FORMAT>(block, g, count, unpacked);
            else if (rows - r <= 8) multiply_block<8, FORMAT>(block, g, count, unpacked);
            else multiply_block<kBlockRows, FORMAT>(block, g, count, unpacked);
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
        case KVL_INT1: return multiply_panel<KVL_INT1>(pass, rows, table);
        case KVL_INT2: return multiply_panel<KVL_INT2>(pass, rows, table);
        case KVL_INT2_256: return multiply_panel<KVL_INT2_256>(pass, rows, table);
        case KVL_INT2_K: return multiply_panel<KVL_INT2_K>(pass, rows, table);
        case KVL_INT3_K: return multiply_panel<KVL_INT3_K>(pass, rows, table);
        case KVL_INT4: return multiply_panel<KVL_INT4>(pass, rows, table);
        case KVL_INT4_K: return multiply_panel<KVL_INT4_K>(pass, rows, table);
        case KVL_INT5: return multiply_panel<KVL_INT5>(pass, rows, table);
        case KVL_INT5_K: return multiply_panel<KVL_INT5_K>(pass, rows, table);
        case KVL_INT6_K: return multiply_panel<KVL_INT6_K>(pass, rows, table);
        case KVL_IQ1_S: return multiply_panel<KVL_IQ1_S>(pass, rows, table);
        case KVL_IQ1_M: return multiply_panel<KVL_IQ1_M>(pass, rows, table);
        case KVL_IQ2_XXS: return multiply_panel<KVL_IQ2_XXS>(pass, rows, table);
        case KVL_IQ2_XS: return multiply_panel<KVL_IQ2_XS>(pass, rows, table);
        case KVL_IQ2_S: return multiply_panel<KVL_IQ2_S>(pass, rows, table);
        case KVL_IQ3_XXS: return multiply_panel<KVL_IQ3_XXS>(pass, rows, table);
        case KVL_IQ3_S: return multiply_panel<KVL_IQ3_S>(pass, rows, table);
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
