// A pass over a panel, and what the micro-kernels of all formats with groups share: scales, and quads of weights as bytes.
#pragma once

#include "activations/quant.hpp"
#include "linear/epilogue.hpp"

namespace kvl {

// Prefetch distance in the weight stream, in bytes: what arrives during one DRAM latency at 20 GB/s per core. From
// kBusyRows rows on it is longer, because the core is busy with them and the hardware prefetcher then runs too late.
constexpr int kPrefetchBytes = 4096;
constexpr int kPrefetchBytesBusy = 8192, kBusyRows = 5;

// One pass over a panel: rows of `x` from `row` on, `cols` columns each, times `panel`. Sums go to out [rows][kPanel]
// and then through the epilogue, or directly through the epilogue, without `out` (Way::multiply).
struct Pass {
    Activations x{};
    int64_t row = 0, cols = 0;
    const uint8_t* panel = nullptr;
    float* out = nullptr;
    const Epilogue* epilogue = nullptr;  // its rows are counted as those of `x`; null = sums stay in `out`
    int64_t ahead = kPrefetchBytes;      // prefetch distance in bytes; ignored for a single row (ahead_of)
    bool is_passing = false;             // weights bypass the last-level cache (Way::is_passing)

    // The epilogue, its rows counted from the first one of the pass; without one, an epilogue that stores sums in `out`.
    Epilogue end() const {
        Epilogue end;
        if (epilogue != nullptr) return epilogue->from(row);
        end.to = out, end.stride = kPanel;
        return end;
    }
    template <int ROWS>
    int64_t ahead_of() const { return ROWS == 1 ? kPrefetchBytes : ahead; }
    Pass without_epilogue() const { return {x, row, cols, panel, out, nullptr, ahead, is_passing}; }
    void ask(int begin, int end) const {
        for (int r = begin; epilogue != nullptr && r < end; r++) epilogue->ask(row + r);
    }
    // Applies the epilogue to rows [begin, end) of the pass, whose sums are in `out`.
    void finish(int begin, int end) const {
        if (epilogue != nullptr) epilogue->apply(row + begin, end - begin, out + begin * kPanel);
    }
};

// A micro-kernel. The table is that of formats that have one.
using Tile = void (*)(const Pass&, const Table&);

// Independent integer sums per row: with few rows a single chain of dot products would be bound by its latency.
constexpr int sums_per_row(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

// Adds the independent integer sums of one row into sums[0], and returns it.
template <int SUMS>
inline I32 total(I32 (&sums)[SUMS]) {
    for (int s = 1; s < SUMS; s++) sums[0] = add(sums[0], sums[s]);
    return sums[0];
}

// Scales (and minimums) of a group of a panel. add_to adds the group's contribution to a row: scale * (weights . x) +
// minimum * (sum of x), times the scale of x; a and b are weights . x of channels 0-15 and 16-31. Integer sums are
// exact, so rounding happens only here.
template <int FORMAT>
struct Scales {
    explicit Scales(const uint16_t* at) : scale_a(load_fp16(at)), scale_b(load_fp16(at + kLanes)) {
        if constexpr (has_min(FORMAT)) min_a = load_fp16(at + kPanel), min_b = load_fp16(at + kPanel + kLanes);
    }
    // KVL_INT2: of run `run` of group `number` of a panel, which is at `group`.
    Scales(const uint8_t* group, int64_t number, int run) {
        const auto factor = [&](int which, int lane) {
            return load_fp16(reinterpret_cast<const uint16_t*>(group + factors_at(number, which)) + lane);
        };
        const uint8_t* both = group + kPanel * 2 + run * kPanel;
        scale_a = mul(factor(0, 0), low_floats(both)), scale_b = mul(factor(0, kLanes), low_floats(both + kLanes));
        min_a = mul(factor(1, 0), high_floats(both)), min_b = mul(factor(1, kLanes), high_floats(both + kLanes));
    }
    explicit Scales(const float* at) : scale_a(load(at)), scale_b(load(at + kLanes)) {
        if constexpr (has_min(FORMAT)) min_a = load(at + kPanel), min_b = load(at + kPanel + kLanes);
    }
    void add_to(F32& lo, F32& hi, F32 a, F32 b, float x_scale, int32_t x_sum) const {
        const F32 row_scale = splat(x_scale);
        if constexpr (has_min(FORMAT)) {
            const F32 row_sum = splat(float(x_sum));
            lo = fma(fma(a, scale_a, mul(row_sum, min_a)), row_scale, lo);
            hi = fma(fma(b, scale_b, mul(row_sum, min_b)), row_scale, hi);
        } else {
            lo = fma(a, mul(scale_a, row_scale), lo);
            hi = fma(b, mul(scale_b, row_scale), hi);
        }
    }
    F32 scale_a, scale_b, min_a, min_b;
};

// KVL_INT8_CHANNEL: scales of the 32 channels of a panel, and the float results of a row's integer sums; vector and
// tile kernels share it.
struct ChannelScales {
    explicit ChannelScales(const uint8_t* panel)
        : scale_a(load(reinterpret_cast<const float*>(panel))), scale_b(load(reinterpret_cast<const float*>(panel) + kLanes)) {}
    F32 lo(I32 a, F32 x_scale) const { return mul(to_float(a), mul(scale_a, x_scale)); }
    F32 hi(I32 b, F32 x_scale) const { return mul(to_float(b), mul(scale_b, x_scale)); }
    F32 scale_a, scale_b;
};

// Sum of the activations of a group, from the sums of its runs.
template <int FORMAT>
inline int32_t group_sum(const int32_t* runs) {
    int32_t sum = 0;
    for (int r = 0; r < group_size(FORMAT) / run_size(FORMAT); r++) sum += runs[r];
    return sum;
}

template <int ROWS>
inline void store_rows(const F32 (&lo)[ROWS], const F32 (&hi)[ROWS], float* out) {
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++) {
        store(out + m * kPanel, lo[m]);
        store(out + m * kPanel + kLanes, hi[m]);
    }
}

// Quad `quad` of a run for 16 channels, from its nibbles (two quads share a byte) and the run's plane of upper bits.
template <int FORMAT>
inline Bytes quad_of(const uint8_t* nibbles, const uint8_t* plane, int quad, const Table& table) {
    const Bytes low = quad % 2 == 0 ? low_nibbles(nibbles) : high_nibbles(nibbles);
    if constexpr (has_table(FORMAT)) return entries(low, table);
    if constexpr (FORMAT == KVL_INT5) return with_bits(low, plane, 4 - quad, 0x10);
    if constexpr (FORMAT == KVL_INT6) return with_bits(low, plane, 4 - 2 * quad, 0x30);
    return low;
}

// Offset that quad_of leaves in the weights of a format; it must be subtracted from them, or from sums of products.
constexpr int zero_of(int format) { return format == KVL_INT6 ? 32 : has_table(format) ? kByteZero : 0; }

template <int FORMAT>
inline I32 dot_quad(I32 acc, Bytes weights, int32_t quad) {
    return has_table(FORMAT) ? dot_weights(acc, weights, quad) : dot_nibbles(acc, weights, quad);
}

}  // namespace kvl
