// Some groups of a panel, unpacked once for many rows of activations: a byte a weight, scales and minimums as floats;
// and the micro-kernels on vector instructions that read them.
#pragma once

#include "linear/gemm.hpp"
#include "linear/point_rows.hpp"

namespace kvl {

// Columns of a panel that are unpacked at a time: their weights take half of a first-level cache, or 3/4 of a small one.
constexpr int kUnpackedCols = 768;
constexpr int unpacked_cols(int format) { return has_grid(format) ? kSuper : kUnpackedCols; }  // the grid is there, too

// Number of consecutive weights of a channel that share a scale, a group at most.
constexpr int part_size(int format) { return has_runs(format) ? kRun : group_size(format); }

// Objects, not pointers to functions, which compilers would call for every 64 weights.
struct PutBytes {
    void operator()(int8_t* to, Bytes weights) const { put_bytes(to, weights); }
};

// Groups, in parts that have a scale each; scales of a part come before its minimums.
struct Unpacked {
    // Unpacks `groups` groups, which are whole blocks that begin at `block`; returns their end. `put` stores 64 weights,
    // which quad_of or load_bytes gives.
    // Without weights only scales are unpacked.
    template <int FORMAT, bool HAS_WEIGHTS = true, class Put>
    const uint8_t* fill(const uint8_t* block, int64_t groups, const Table& table, Put put) {
        constexpr int kParts = group_size(FORMAT) / part_size(FORMAT);
        static_assert(kUnpackedCols % block_size(FORMAT) == 0);
        int8_t* to = weights;
        float* scale = scales;
        for (int64_t g = 0; g < groups; g += block_groups(FORMAT), block += block_bytes(FORMAT)) {
            for (int at = 0; HAS_WEIGHTS && at < block_bytes(FORMAT); at += 64) prefetch(block + kPrefetchBytes + at);
            const BlockScales<FORMAT> of_block(block);
            for (int i = 0; i < block_groups(FORMAT); i++, to += group_size(FORMAT) * kPanel) {
                for (int part = 0; part < kParts; part++, scale += decoded_floats(FORMAT)) of_block.of(i, part).store_floats(scale);
                if constexpr (has_grid(FORMAT)) fill_points<FORMAT>(block, i, to, table, put);
                else if constexpr (HAS_WEIGHTS) fill_weights<FORMAT>(block + front_bytes(FORMAT) + i * group_bytes(FORMAT), to, table, put);
            }
        }
        return block;
    }

    template <int FORMAT, class Put>
    static void fill_weights(const uint8_t* group, int8_t* to, const Table& table, Put put) {
#pragma GCC unroll kQuadsUnrolled
        for (int quad = 0; quad < group_size(FORMAT) / 4; quad++) {
#pragma GCC unroll 2
            for (int at = 0; at < kPanel * 4; at += kLanes * 4, to += kLanes * 4) {
                if constexpr (has_bytes(FORMAT)) put(to, load_bytes(group + quad * kPanel * 4 + at));
                else put(to, quad_of<FORMAT>(group + at, quad, table));
            }
        }
    }

    alignas(64) int8_t weights[kUnpackedCols * kPanel];
    alignas(64) float scales[kUnpackedCols / kRun * 2 * kPanel];
};

// Multiplies ROWS rows by `groups` unpacked groups, from group `first` of the panel on, and adds the results to `out`
// (first == 0: stores them).
template <int ROWS, int PARTS, bool HAS_MIN, bool IS_SIGNED, int FEW>
void multiply_unpacked_rows(const Pass& pass, int64_t first, int64_t groups, int zero, const Unpacked& unpacked) {
    constexpr int kRuns = kFileGroup / kRun, kQuads = kFileGroup / 4 / PARTS;
    constexpr int kAtOnce = FEW == 1 && kFewQuads > 1 ? kQuads : FEW;
    const int64_t all = pass.cols / kFileGroup;
    const int8_t *x = pass.x.data + pass.row * pass.cols + first * kFileGroup, *weights = unpacked.weights;
    const float *scale = pass.x.scale + pass.row * all + first, *scales = unpacked.scales;
    const int32_t* sums = pass.x.sum + (pass.row * all + first) * kRuns;
    F32 lo[ROWS], hi[ROWS];
    load_rows(lo, hi, first == 0 ? nullptr : pass.out);
    for (int64_t g = 0; g < groups; g++, sums += kRuns, scale++) {
        for (int part = 0; part < PARTS; part++, scales += kPanel * (HAS_MIN ? 2 : 1)) {
            I32 a[ROWS], b[ROWS];
            int32_t sum[ROWS];
#pragma GCC unroll 8
            for (int m = 0; m < ROWS; m++) {
                const int32_t* runs = sums + m * all * kRuns;
                sum[m] = PARTS == 1 ? runs[0] + runs[1] : runs[part];
                a[m] = b[m] = splat_int(-zero * sum[m]);
            }
#pragma GCC unroll 1
            for (int begin = 0; begin < kQuads; begin += kAtOnce) {
                decltype(begin_sum<FEW>(I32{})) few_a[ROWS], few_b[ROWS];
#pragma GCC unroll 8
                for (int m = 0; m < ROWS; m++) few_a[m] = begin_sum<FEW>(a[m]), few_b[m] = begin_sum<FEW>(b[m]);
#pragma GCC unroll 8
                for (int quad = 0; quad < kAtOnce; quad++, x += 4, weights += kPanel * 4) {
                    const Bytes wa = get_bytes(weights), wb = get_bytes(weights + kLanes * 4);
#pragma GCC unroll 8
                    for (int m = 0; m < ROWS; m++) {
                        const int32_t xs = word_at(x + m * pass.cols);
                        few_a[m] = dot_quad<IS_SIGNED>(few_a[m], wa, xs);
                        few_b[m] = dot_quad<IS_SIGNED>(few_b[m], wb, xs);
                    }
                }
#pragma GCC unroll 8
                for (int m = 0; m < ROWS; m++) a[m] = end_few(a[m], few_a[m]), b[m] = end_few(b[m], few_b[m]);
            }
            const auto of_part = Scales<HAS_MIN>::of_floats(scales);
#pragma GCC unroll 8
            for (int m = 0; m < ROWS; m++) of_part.add_to(lo[m], hi[m], to_float(a[m]), to_float(b[m]), scale[m * all], sum[m]);
        }
    }
    store_rows(lo, hi, pass.out);
}

using UnpackedRows = void (*)(const Pass&, int64_t first, int64_t groups, int zero, const Unpacked&);

// The kernel for 1 <= rows <= kRowsMany.
template <int FORMAT, int ROWS = kRowsMany>
UnpackedRows unpacked_rows(int rows) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return unpacked_rows<FORMAT, ROWS - 1>(rows);
    constexpr int kParts = group_size(FORMAT) / part_size(FORMAT);
    return &multiply_unpacked_rows<ROWS, kParts, has_min(FORMAT), has_signs(FORMAT), quads_of_few(FORMAT)>;
}

// Whether weights are unpacked for many rows, or scales alone, or nothing. Where two rows share a pass, unpacking once
// saves a lot; where six do, products take as long with weights that are unpacked on the way. Points of grids are looked up
// in memory, for one row already.
constexpr bool unpacks_weights(int format) { return has_grid(format) || (number_bits(format) < 8 && kRowsMany <= 2); }
constexpr bool unpacks(int format) { return unpacks_weights(format) || is_super(format); }

// Multiplies 1 <= rows <= kRowsMany rows, from row `begin` of the pass on, by unpacked groups.
template <int FORMAT, int ROWS = kRowsMany>
void multiply_some(const Pass& pass, int rows, int64_t first, int64_t count, const Table& table, const Unpacked& unpacked) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return multiply_some<FORMAT, ROWS - 1>(pass, rows, first, count, table, unpacked);
    multiply_groups<ROWS, FORMAT, true>(pass, first, count, table, unpacked.scales);
}

// Multiplies many rows by one panel; one row where weights are points of a grid.
template <int FORMAT>
void multiply_unpacked(const Pass& pass, int rows, const Table& table) {
    if constexpr (multiplies_points(FORMAT))
        if (rows == 1) {
            pass.ask(0, 1);
            multiply_points<FORMAT>(pass);
            return pass.finish(0, 1);
        }
    constexpr int64_t kChunk = unpacked_cols(FORMAT) / kFileGroup;
    constexpr bool kHasWeights = unpacks_weights(FORMAT);
    const Passes parts(rows, kRowsMany, kRowsMany);
    const int64_t groups = pass.cols / kFileGroup;
    const uint8_t *blocks = pass.panel, *end = nullptr;
    Unpacked unpacked;
    for (int64_t g = 0; g < groups; g += kChunk, blocks = end) {
        const int64_t count = min_of(groups - g, kChunk);
        end = unpacked.fill<FORMAT, kHasWeights>(blocks, count, table, PutBytes{});
        for (int64_t i = 0; i < parts.count; i++) {
            const int begin = int(parts.begin(i)), rows_of_part = int(parts.begin(i + 1)) - begin;
            if (g + count == groups) pass.ask(begin, begin + rows_of_part);
            const Pass part{pass.x, pass.row + begin, pass.cols, blocks, pass.out + begin * kPanel};
            if constexpr (kHasWeights) unpacked_rows<FORMAT>(rows_of_part)(part, g, count, zero_of(FORMAT), unpacked);
            else multiply_some<FORMAT>(part, rows_of_part, g, count, table, unpacked);
        }
    }
    pass.finish(0, rows);
}

inline void multiply_unpacked(int format, const Pass& pass, int rows) {
    const Table& table = table_of(format);
    switch (kernel_of(format)) {
        case KVL_INT1: return multiply_unpacked<KVL_INT1>(pass, rows, table);
        case KVL_INT2: return multiply_unpacked<KVL_INT2>(pass, rows, table);
        case KVL_INT2_256: return multiply_unpacked<KVL_INT2_256>(pass, rows, table);
        case KVL_INT2_K: return multiply_unpacked<KVL_INT2_K>(pass, rows, table);
        case KVL_INT3_K: return multiply_unpacked<KVL_INT3_K>(pass, rows, table);
        case KVL_INT4: return multiply_unpacked<KVL_INT4>(pass, rows, table);
        case KVL_INT4_K: return multiply_unpacked<KVL_INT4_K>(pass, rows, table);
        case KVL_INT5: return multiply_unpacked<KVL_INT5>(pass, rows, table);
        case KVL_INT5_K: return multiply_unpacked<KVL_INT5_K>(pass, rows, table);
        case KVL_INT6_K: return multiply_unpacked<KVL_INT6_K>(pass, rows, table);
        case KVL_IQ1_S: return multiply_unpacked<KVL_IQ1_S>(pass, rows, table);
        case KVL_IQ1_M: return multiply_unpacked<KVL_IQ1_M>(pass, rows, table);
        case KVL_IQ2_XXS: return multiply_unpacked<KVL_IQ2_XXS>(pass, rows, table);
        case KVL_IQ2_XS: return multiply_unpacked<KVL_IQ2_XS>(pass, rows, table);
        case KVL_IQ2_S: return multiply_unpacked<KVL_IQ2_S>(pass, rows, table);
        case KVL_IQ3_XXS: return multiply_unpacked<KVL_IQ3_XXS>(pass, rows, table);
        case KVL_IQ3_S: return multiply_unpacked<KVL_IQ3_S>(pass, rows, table);
        case KVL_FP4_16: return multiply_unpacked<KVL_FP4_16>(pass, rows, table);
        default: return multiply_unpacked<KVL_IQ4>(pass, rows, table);
    }
}

}  // namespace kvl
