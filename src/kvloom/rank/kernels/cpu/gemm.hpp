// Micro-kernels: a few rows of activations times one panel of 32 output channels.
//
// A row's result is the same bits whatever the other rows of the pass are: sums within a group are exact integers, and
// the groups (for bf16: the even and the odd pairs) are added in one fixed order.
#pragma once

#include "quant.hpp"

namespace kvl {

// One pass: rows of `x` from `row` on, `cols` each, times `panel`, into out [rows][kPanel].
struct Pass {
    Activations x;
    int64_t row, cols;
    const uint8_t* panel;
    float* out;
};

using Tile = void (*)(const Pass&);

// How far ahead of the multiplication the weight stream is asked for: DRAM latency at 20 GB/s a core.
constexpr int kPrefetchBytes = 4096;

inline int32_t quad_at(const int8_t* from) {
    int32_t quad;
    std::memcpy(&quad, from, 4);
    return quad;
}

// Independent integer sums a row: one chain of dot products would wait for its own latency when rows are few.
constexpr int sums_per_row(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

// Adds the integer sums of one row up into sums[0].
template <int SUMS>
inline I32 total(I32 (&sums)[SUMS]) {
    for (int s = 1; s < SUMS; s++) sums[0] = add(sums[0], sums[s]);
    return sums[0];
}

template <int ROWS>
void tile_int8(const Pass& pass) {
    constexpr int kSums = sums_per_row(ROWS);
    constexpr int kQuads = kInt8Group / 4;
    const int64_t groups = pass.cols / kInt8Group;
    const int8_t* x = pass.x.data + pass.row * pass.cols;
    const float* scale = pass.x.scale + pass.row * groups;
    const int32_t* sums = pass.x.sum + pass.row * groups;
    const uint8_t* weights = pass.panel;
    F32 lo[ROWS], hi[ROWS];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) lo[m] = hi[m] = splat(0);
    for (int64_t g = 0; g < groups; g++, x += kInt8Group) {
        const uint16_t* scales = reinterpret_cast<const uint16_t*>(weights);
        weights += kPanel * 2;
        I32 a[ROWS][kSums], b[ROWS][kSums];
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) {
            a[m][0] = b[m][0] = splat_int(-kByteZero * sums[m * groups + g]);
#pragma GCC unroll 4
            for (int s = 1; s < kSums; s++) a[m][s] = b[m][s] = splat_int(0);
        }
#pragma GCC unroll 1
        for (int quad = 0; quad < kQuads; quad += kSums) {
#pragma GCC unroll 4
            for (int s = 0; s < kSums; s++, weights += kPanel * 4) {
                prefetch(weights + kPrefetchBytes);
                prefetch(weights + kPrefetchBytes + 64);
                const Bytes wa = load_bytes(weights), wb = load_bytes(weights + kLanes * 4);
#pragma GCC unroll 8
                for (int m = 0; m < ROWS; m++) {
                    const int32_t xs = quad_at(x + m * pass.cols + (quad + s) * 4);
                    a[m][s] = dot_weights(a[m][s], wa, xs);
                    b[m][s] = dot_weights(b[m][s], wb, xs);
                }
            }
        }
        const F32 scale_a = load_fp16(scales), scale_b = load_fp16(scales + kLanes);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) {
            const F32 row_scale = splat(scale[m * groups + g]);
            lo[m] = fma(to_float(total(a[m])), mul(scale_a, row_scale), lo[m]);
            hi[m] = fma(to_float(total(b[m])), mul(scale_b, row_scale), hi[m]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) {
        store(pass.out + m * kPanel, lo[m]);
        store(pass.out + m * kPanel + kLanes, hi[m]);
    }
}

// value = nibble * scale + minimum, so a group adds scale * (nibbles . x) + minimum * (sum of x), both exact integers.
template <int ROWS>
void tile_int4(const Pass& pass) {
    constexpr int kOctets = kInt4Group / 8;
    const int64_t groups = pass.cols / kInt4Group;
    const int8_t* x = pass.x.data + pass.row * pass.cols;
    const float* scale = pass.x.scale + pass.row * groups;
    const int32_t* sums = pass.x.sum + pass.row * groups;
    const uint8_t* weights = pass.panel;
    F32 lo[ROWS], hi[ROWS];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) lo[m] = hi[m] = splat(0);
    for (int64_t g = 0; g < groups; g++, x += kInt4Group) {
        const uint16_t* scales = reinterpret_cast<const uint16_t*>(weights);
        weights += kPanel * 4;
        I32 a[ROWS], b[ROWS];
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) a[m] = b[m] = splat_int(0);
#pragma GCC unroll 2
        for (int octet = 0; octet < kOctets; octet++, weights += kPanel * 4) {
            prefetch(weights + kPrefetchBytes);
            prefetch(weights + kPrefetchBytes + 64);
            const Bytes la = low_nibbles(weights), lb = low_nibbles(weights + kLanes * 4);
            const Bytes ha = high_nibbles(weights), hb = high_nibbles(weights + kLanes * 4);
#pragma GCC unroll 8
            for (int m = 0; m < ROWS; m++) {
                const int8_t* at = x + m * pass.cols + octet * 8;
                const int32_t first = quad_at(at), second = quad_at(at + 4);
                a[m] = dot_nibbles(dot_nibbles(a[m], la, first), ha, second);
                b[m] = dot_nibbles(dot_nibbles(b[m], lb, first), hb, second);
            }
        }
        const F32 scale_a = load_fp16(scales), scale_b = load_fp16(scales + kLanes);
        const F32 min_a = load_fp16(scales + kPanel), min_b = load_fp16(scales + kPanel + kLanes);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) {
            const F32 row_scale = splat(scale[m * groups + g]);
            const F32 row_sum = splat(float(sums[m * groups + g]));
            const F32 part_a = fma(to_float(a[m]), scale_a, mul(row_sum, min_a));
            const F32 part_b = fma(to_float(b[m]), scale_b, mul(row_sum, min_b));
            lo[m] = fma(part_a, row_scale, lo[m]);
            hi[m] = fma(part_b, row_scale, hi[m]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) {
        store(pass.out + m * kPanel, lo[m]);
        store(pass.out + m * kPanel + kLanes, hi[m]);
    }
}

// Two chains a channel (even and odd pairs of k) for every number of rows: the order of additions is part of the result.
template <int ROWS>
void tile_bf16(const Pass& pass) {
    const uint16_t* x = reinterpret_cast<const uint16_t*>(pass.x.data) + pass.row * pass.cols;
    const uint16_t* weights = reinterpret_cast<const uint16_t*>(pass.panel);
    F32 a[ROWS][2], b[ROWS][2];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) a[m][0] = a[m][1] = b[m][0] = b[m][1] = splat(0);
#pragma GCC unroll 1
    for (int64_t k = 0; k < pass.cols; k += 4) {
#pragma GCC unroll 2
        for (int s = 0; s < 2; s++, weights += kPanel * 2) {
            prefetch(weights + kPrefetchBytes / 2);
            prefetch(weights + kPrefetchBytes / 2 + kPanel);
            const Pairs wa = load_pairs(weights), wb = load_pairs(weights + kLanes * 2);
#pragma GCC unroll 8
            for (int m = 0; m < ROWS; m++) {
                const int32_t pair = quad_at(reinterpret_cast<const int8_t*>(x + m * pass.cols + k + 2 * s));
                a[m][s] = dot_pairs(a[m][s], wa, pair);
                b[m][s] = dot_pairs(b[m][s], wb, pair);
            }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) {
        store(pass.out + m * kPanel, add(a[m][0], a[m][1]));
        store(pass.out + m * kPanel + kLanes, add(b[m][0], b[m][1]));
    }
}

// The micro-kernel of `format` for 1 <= rows <= kRowsOnce.
template <int ROWS = kRowsOnce>
Tile tile_for(int format, int rows) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return tile_for<ROWS - 1>(format, rows);
    return format == KVL_INT8 ? &tile_int8<ROWS> : format == KVL_INT4 ? &tile_int4<ROWS> : &tile_bf16<ROWS>;
}

// Rows of each pass over a panel: one pass when all fit, else passes of nearly equal size, at most kRowsMany.
struct Passes {
    explicit Passes(int64_t rows) : rows(rows), count(rows <= kRowsOnce ? 1 : (rows + kRowsMany - 1) / kRowsMany) {}
    int64_t begin(int64_t pass) const { return rows * pass / count; }
    const int64_t rows, count;
};

}  // namespace kvl
