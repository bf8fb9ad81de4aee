// Micro-kernels on vector instructions: they multiply a few rows of activations by one panel of 32 output channels.
//
// A row's result has the same bits whichever rows share its pass: sums within a group are exact integers, and groups,
// like products of bf16, are added in one fixed order.
#pragma once

#include "isa/pairs.hpp"
#include "linear/pass.hpp"

namespace kvl {

// Formats of one byte per weight, with groups.
template <int ROWS, int FORMAT>
void tile_bytes(const Pass& pass, const Table&) {
    constexpr int kSums = sums_per_row(ROWS), kGroup = group_size(FORMAT), kRuns = kGroup / run_size(FORMAT);
    const int64_t groups = pass.cols / kGroup;
    const int8_t* x = pass.x.data + pass.row * pass.cols;
    const float* scale = pass.x.scale + pass.row * groups;
    const int32_t* sums = pass.x.sum + pass.row * groups * kRuns;
    const int64_t ahead = pass.ahead_of<ROWS>();
    const bool passing = ROWS >= kBusyRows && pass.is_passing;
    const uint8_t* weights = pass.panel;
    F32 lo[ROWS], hi[ROWS];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) lo[m] = hi[m] = splat(0);
    for (int64_t g = 0; g < groups; g++, x += kGroup, sums += kRuns) {
        const uint16_t* scales = reinterpret_cast<const uint16_t*>(weights);
        weights += scale_bytes(FORMAT);
        I32 a[ROWS][kSums], b[ROWS][kSums];
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) {
            a[m][0] = b[m][0] = splat_int(-kByteZero * group_sum<FORMAT>(sums + m * groups * kRuns));
#pragma GCC unroll 4
            for (int s = 1; s < kSums; s++) a[m][s] = b[m][s] = splat_int(0);
        }
#pragma GCC unroll 1
        for (int quad = 0; quad < kGroup / 4; quad += kSums) {
#pragma GCC unroll 4
            for (int s = 0; s < kSums; s++, weights += kPanel * 4) {
                prefetch_weights(weights + ahead, passing);
                prefetch_weights(weights + ahead + 64, passing);
                const Bytes wa = load_bytes(weights), wb = load_bytes(weights + kLanes * 4);
#pragma GCC unroll 8
                for (int m = 0; m < ROWS; m++) {
                    const int32_t xs = word_at(x + m * pass.cols + (quad + s) * 4);
                    a[m][s] = dot_weights(a[m][s], wa, xs);
                    b[m][s] = dot_weights(b[m][s], wb, xs);
                }
            }
        }
        const auto of_group = ScalesOf<FORMAT>::of_halves(scales);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) {
            const int32_t sum = has_min(FORMAT) ? group_sum<FORMAT>(sums + m * groups * kRuns) : 0;
            of_group.add_to(lo[m], hi[m], to_float(total(a[m])), to_float(total(b[m])), scale[m * groups + g], sum);
        }
    }
    store_rows(lo, hi, pass.out);
}

// Formats of fewer than eight bits: `count` groups, from group `first` of the panel on, whose blocks begin at pass.panel.
// A group is one part, or two parts with a scale each. decoded: scales as Unpacked has them; null = those of the blocks.
template <int ROWS, int FORMAT, bool IS_DECODED>
void multiply_groups(const Pass& pass, int64_t first, int64_t count, const Table& table, const float* decoded) {
    constexpr int kParts = has_runs(FORMAT) ? 2 : 1, kRuns = kFileGroup / kRun, kQuads = kFileGroup / 4 / kParts;
    constexpr int kFew = quads_of_few(FORMAT);
    const int64_t groups = pass.cols / kFileGroup;
    const int8_t* x = pass.x.data + pass.row * pass.cols + first * kFileGroup;
    const float* scale = pass.x.scale + pass.row * groups + first;
    const int32_t* sums = pass.x.sum + (pass.row * groups + first) * kRuns;
    const int64_t ahead = pass.ahead_of<ROWS>();
    const bool passing = ROWS >= kBusyRows && pass.is_passing;
    const uint8_t* group = pass.panel;
    F32 lo[ROWS], hi[ROWS];
    load_rows(lo, hi, first == 0 ? nullptr : pass.out);
    for (int64_t left = count; left > 0; left -= block_groups(FORMAT)) {
        const BlockScales<FORMAT, is_super(FORMAT) && !IS_DECODED> scales(group);
        for (int at = 0; at < scale_bytes(FORMAT); at += 64) prefetch_weights(group + ahead + at, passing);
        group += scale_bytes(FORMAT);
        for (int g = 0; g < block_groups(FORMAT); g++, group += group_bytes(FORMAT), sums += kRuns, scale++) {
            for (int at = 0; at < plane_bytes(FORMAT); at += 64) prefetch_weights(group + ahead + at, passing);
#pragma GCC unroll kQuadsUnrolled
            for (int part = 0; part < kParts; part++) {
                I32 a[ROWS], b[ROWS];
#pragma GCC unroll 8
                for (int m = 0; m < ROWS; m++) {
                    const int32_t* runs = sums + m * groups * kRuns;
                    const int32_t sum = zero_of(FORMAT) == 0 ? 0 : kParts == 1 ? group_sum<FORMAT>(runs) : runs[part];
                    a[m] = b[m] = splat_int(-zero_of(FORMAT) * sum);
                }
#pragma GCC unroll kQuadsUnrolled
                for (int begin = 0; begin < kQuads; begin += kFew) {
                    decltype(begin_sum<kFew>(I32{})) few_a[ROWS], few_b[ROWS];
#pragma GCC unroll 8
                    for (int m = 0; m < ROWS; m++) few_a[m] = begin_sum<kFew>(a[m]), few_b[m] = begin_sum<kFew>(b[m]);
#pragma GCC unroll kQuadsUnrolled
                    for (int in_few = 0; in_few < kFew; in_few++, x += 4) {
                        const int quad = part * kQuads + begin + in_few;
                        if (plane_bytes(FORMAT) < group_bytes(FORMAT) && quad % 2 == 0) {
                            const uint8_t* nibbles = group + plane_bytes(FORMAT) + quad / 2 * kPanel * 4;
                            prefetch_weights(nibbles + ahead, passing);
                            prefetch_weights(nibbles + ahead + 64, passing);
                        }
                        const Bytes wa = quad_of<FORMAT>(group, quad, table);
                        const Bytes wb = quad_of<FORMAT>(group + kLanes * 4, quad, table);
#pragma GCC unroll 8
                        for (int m = 0; m < ROWS; m++) {
                            const int32_t xs = word_at(x + m * pass.cols);
                            few_a[m] = dot_quad<has_signs(FORMAT)>(few_a[m], wa, xs);
                            few_b[m] = dot_quad<has_signs(FORMAT)>(few_b[m], wb, xs);
                        }
                    }
#pragma GCC unroll 8
                    for (int m = 0; m < ROWS; m++) a[m] = end_few(a[m], few_a[m]), b[m] = end_few(b[m], few_b[m]);
                }
                ScalesOf<FORMAT> of_part;
                if constexpr (IS_DECODED) of_part = ScalesOf<FORMAT>::of_floats(decoded), decoded += decoded_floats(FORMAT);
                else of_part = scales.of(g, part);
#pragma GCC unroll 8
                for (int m = 0; m < ROWS; m++) {
                    const int32_t* runs = sums + m * groups * kRuns;
                    const int32_t sum = !has_min(FORMAT) ? 0 : kParts == 1 ? group_sum<FORMAT>(runs) : runs[part];
                    of_part.add_to(lo[m], hi[m], to_float(a[m]), to_float(b[m]), scale[m * groups], sum);
                }
            }
        }
    }
    store_rows(lo, hi, pass.out);
}

template <int ROWS, int FORMAT>
void tile_numbers(const Pass& pass, const Table& table) {
    multiply_groups<ROWS, FORMAT, false>(pass, 0, pass.cols / kFileGroup, table, nullptr);
}

// Length in k of a stretch of bf16 products, which Intel's tile unit multiplies in one instruction (bf16_tiles.hpp).
// This kernel adds in the unit's order (Intel SDM, TDPBF16PS): products of the first elements of a stretch's pairs are
// one chain of fused multiply-adds, those of the second elements another, and the sum of both is added to that of
// earlier stretches.
constexpr int kBf16Stretch = 32;
static_assert(kPad % kBf16Stretch == 0);

template <int ROWS>
void tile_bf16(const Pass& pass, const Table&) {
    const uint16_t* x = reinterpret_cast<const uint16_t*>(pass.x.data) + pass.row * pass.cols;
    const int64_t ahead = pass.ahead_of<ROWS>() / 2;
    const bool passing = ROWS >= kBusyRows && pass.is_passing;
    const uint16_t* weights = reinterpret_cast<const uint16_t*>(pass.panel);
    alignas(64) float factors[ROWS][kBf16Stretch];  // activations, widened
    for (int64_t k = 0; k < pass.cols; k += kBf16Stretch, weights += kBf16Stretch * kPanel) {
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 2
            for (int i = 0; i < kBf16Stretch; i += kLanes) store(factors[m] + i, load_bf16(x + m * pass.cols + k + i));
#pragma GCC unroll 1
        for (int half = 0; half < kPanel; half += kLanes) {
            F32 first[ROWS], second[ROWS];
#pragma GCC unroll 16
            for (int m = 0; m < ROWS; m++) first[m] = second[m] = splat(0);
#pragma GCC unroll 4
            for (int i = 0; i < kBf16Stretch; i += 2) {
                const uint16_t* pairs = weights + i * kPanel + half * 2;
                prefetch_weights(pairs + ahead, passing);
                const PairHalves w = load_halves(pairs);
#pragma GCC unroll 16
                for (int m = 0; m < ROWS; m++) {
                    first[m] = fma(w.first, splat(factors[m][i]), first[m]);
                    second[m] = fma(w.second, splat(factors[m][i + 1]), second[m]);
                }
            }
#pragma GCC unroll 16
            for (int m = 0; m < ROWS; m++) {
                float* to = pass.out + m * kPanel + half;
                store(to, add(k == 0 ? splat(0) : load(to), add(first[m], second[m])));
            }
        }
    }
}

// bf16 in the order of vdpbf16ps, for processors on which it has the throughput of a fused multiply-add.
template <int ROWS, class Order = PairOrder>
void tile_pairs(const Pass& pass, const Table&) {
    const uint16_t* x = reinterpret_cast<const uint16_t*>(pass.x.data) + pass.row * pass.cols;
    const int64_t ahead = pass.ahead_of<ROWS>() / 2;
    const bool passing = ROWS >= kBusyRows && pass.is_passing;
    const uint16_t* weights = reinterpret_cast<const uint16_t*>(pass.panel);
    typename Order::Sum lo[ROWS], hi[ROWS];
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++) lo[m] = hi[m] = Order::zero();
#pragma GCC unroll 2
    for (int64_t k = 0; k < pass.cols; k += 2, x += 2, weights += kPanel * 2) {
        prefetch_weights(weights + ahead, passing);
        prefetch_weights(weights + ahead + kPanel, passing);
        const typename Order::Pairs a = Order::load_pairs(weights), b = Order::load_pairs(weights + kLanes * 2);
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; m++) {
            Order::add_pair(lo[m], a, x + m * pass.cols);
            Order::add_pair(hi[m], b, x + m * pass.cols);
        }
    }
    store_rows(lo, hi, pass.out);
}

// KVL_INT8_CHANNEL: one scale per channel and one per row, so sums over all of K are integers and are scaled once.
template <int ROWS>
void tile_channel(const Pass& pass, const Table&) {
    constexpr int kSums = sums_per_row(ROWS);
    const int8_t* x = pass.x.data + pass.row * pass.cols;
    const int64_t ahead = pass.ahead_of<ROWS>();
    const bool passing = ROWS >= kBusyRows && pass.is_passing;
    const uint8_t* weights = pass.panel + head_bytes(KVL_INT8_CHANNEL);
    I32 a[ROWS][kSums], b[ROWS][kSums];
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++) {
        a[m][0] = b[m][0] = splat_int(-kByteZero * pass.x.sum[pass.row + m]);
#pragma GCC unroll 4
        for (int s = 1; s < kSums; s++) a[m][s] = b[m][s] = splat_int(0);
    }
#pragma GCC unroll 1
    for (int64_t k = 0; k < pass.cols; k += 4 * kSums, x += 4 * kSums) {
#pragma GCC unroll 4
        for (int s = 0; s < kSums; s++, weights += kPanel * 4) {
            prefetch_weights(weights + ahead, passing);
            prefetch_weights(weights + ahead + 64, passing);
            const Bytes wa = load_bytes(weights), wb = load_bytes(weights + kLanes * 4);
#pragma GCC unroll 16
            for (int m = 0; m < ROWS; m++) {
                const int32_t xs = word_at(x + m * pass.cols + s * 4);
                a[m][s] = dot_weights(a[m][s], wa, xs);
                b[m][s] = dot_weights(b[m][s], wb, xs);
            }
        }
    }
    const ChannelScales scales(pass.panel);
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++) {
        const F32 x_scale = splat(pass.x.scale[pass.row + m]);
        store(pass.out + m * kPanel, scales.lo(total(a[m]), x_scale));
        store(pass.out + m * kPanel + kLanes, scales.hi(total(b[m]), x_scale));
    }
}

// The micro-kernel of a format with groups, but of no grid, for ROWS rows.
template <int ROWS>
Tile tile_of_groups(int format) {
    switch (kernel_of(format)) {
        case KVL_INT8: return &tile_bytes<ROWS, KVL_INT8>;
        case KVL_INT8_32: return &tile_bytes<ROWS, KVL_INT8_32>;
        case KVL_INT8_MIN: return &tile_bytes<ROWS, KVL_INT8_MIN>;
        case KVL_INT1: return &tile_numbers<ROWS, KVL_INT1>;
        case KVL_INT2: return &tile_numbers<ROWS, KVL_INT2>;
        case KVL_INT2_256: return &tile_numbers<ROWS, KVL_INT2_256>;
        case KVL_INT2_K: return &tile_numbers<ROWS, KVL_INT2_K>;
        case KVL_INT3_K: return &tile_numbers<ROWS, KVL_INT3_K>;
        case KVL_INT4: return &tile_numbers<ROWS, KVL_INT4>;
        case KVL_INT4_K: return &tile_numbers<ROWS, KVL_INT4_K>;
        case KVL_INT5: return &tile_numbers<ROWS, KVL_INT5>;
        case KVL_INT5_K: return &tile_numbers<ROWS, KVL_INT5_K>;
        case KVL_INT6_K: return &tile_numbers<ROWS, KVL_INT6_K>;
        case KVL_IQ3_XXS: return &tile_numbers<ROWS, KVL_IQ3_XXS>;
        case KVL_IQ3_S: return &tile_numbers<ROWS, KVL_IQ3_S>;
        case KVL_FP4_16: return &tile_numbers<ROWS, KVL_FP4_16>;
        default: return &tile_numbers<ROWS, KVL_IQ4>;
    }
}

// Most rows of a pass, if one pass covers all rows (once), and if several are needed (many).
constexpr int rows_once(int format) { return has_groups(format) ? kRowsOnce : kRowsPlain; }
constexpr int rows_many(int format) { return has_groups(format) ? kRowsMany : kRowsPlain; }

// The micro-kernel of `format` for 1 <= rows <= rows_once(format). in_pairs: products of bf16 are added in the order of
// vdpbf16ps instead of that of the tile unit.
template <int ROWS = max_of(kRowsOnce, kRowsPlain)>
Tile tile_for(int format, int rows, bool in_pairs = false) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return tile_for<ROWS - 1>(format, rows, in_pairs);
    if constexpr (ROWS <= kRowsPlain) {
        if constexpr (has_pairs())
            if (format == KVL_BF16 && in_pairs) return &tile_pairs<ROWS>;
        if (format == KVL_BF16) return &tile_bf16<ROWS>;
        if (is_whole(format)) return &tile_channel<ROWS>;
    }
    if constexpr (ROWS <= kRowsOnce) return tile_of_groups<ROWS>(format);
    return nullptr;
}

}  // namespace kvl
