// Micro-kernels on vector instructions for weights of two and three bits, which lie in planes alone.
#pragma once

#include "linear/pass.hpp"

namespace kvl {

// Quad `quad` of a run for 16 channels, from the run's plane of two bits, and in three bits the group's plane of third
// ones, in which `first` is the bit of the run's first quad.
template <int FORMAT>
inline Bytes thin_quad_of(const uint8_t* plane, const uint8_t* third, int first, int quad, const Table& table) {
    const Bytes low = two_bits(plane, 2 * quad);
    if constexpr (FORMAT == KVL_INT2) return low;
    return entries(with_bits(low, third, 2 - first - quad, 4), table);
}

// Scales of one run of a group, in formats with two runs.
template <int FORMAT>
inline Scales<FORMAT> scales_of(const uint8_t* group, int64_t number, int run) {
    if constexpr (FORMAT == KVL_INT2) return {group, number, run};
    else return Scales<FORMAT>(reinterpret_cast<const uint16_t*>(group) + run * kPanel);
}

// Formats of two and three bits, whose groups are two runs with a scale each.
template <int ROWS, int FORMAT>
void tile_thin(const Pass& pass, const Table& table) {
    constexpr int kRuns = kFileGroup / kRun, kQuads = kRun / 4;
    const int64_t groups = pass.cols / kFileGroup;
    const int8_t* x = pass.x.data + pass.row * pass.cols;
    const float* scale = pass.x.scale + pass.row * groups;
    const int32_t* sums = pass.x.sum + pass.row * groups * kRuns;
    const int64_t ahead = pass.ahead_of<ROWS>();
    const bool passing = ROWS >= kBusyRows && pass.is_passing;
    const uint8_t* group = pass.panel;
    F32 lo[ROWS], hi[ROWS];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) lo[m] = hi[m] = splat(0);
    for (int64_t g = 0; g < groups; g++, sums += kRuns, group += group_bytes(FORMAT)) {
        for (int at = 0; at < group_bytes(FORMAT); at += 64) prefetch_weights(group + ahead + at, passing);
        const uint8_t* third = group + scale_bytes(FORMAT) + kRuns * kPanel * 4;
#pragma GCC unroll 2
        for (int run = 0; run < kRuns; run++) {
            const uint8_t* plane = group + scale_bytes(FORMAT) + run * kPanel * 4;
            I32 a[ROWS], b[ROWS];
#pragma GCC unroll 8
            for (int m = 0; m < ROWS; m++) a[m] = b[m] = splat_int(-zero_of(FORMAT) * sums[m * groups * kRuns + run]);
#pragma GCC unroll 4
            for (int quad = 0; quad < kQuads; quad++, x += 4) {
                const Bytes wa = thin_quad_of<FORMAT>(plane, third, run * kQuads, quad, table);
                const Bytes wb = thin_quad_of<FORMAT>(plane + kLanes * 4, third + kLanes * 4, run * kQuads, quad, table);
#pragma GCC unroll 8
                for (int m = 0; m < ROWS; m++) {
                    const int32_t xs = word_at(x + m * pass.cols);
                    a[m] = dot_quad<FORMAT>(a[m], wa, xs);
                    b[m] = dot_quad<FORMAT>(b[m], wb, xs);
                }
            }
            const Scales<FORMAT> of_run = scales_of<FORMAT>(group, g, run);
#pragma GCC unroll 8
            for (int m = 0; m < ROWS; m++)
                of_run.add_to(lo[m], hi[m], to_float(a[m]), to_float(b[m]), scale[m * groups + g], sums[m * groups * kRuns + run]);
        }
    }
    store_rows(lo, hi, pass.out);
}

}  // namespace kvl
