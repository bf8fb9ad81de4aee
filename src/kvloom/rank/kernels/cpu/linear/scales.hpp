// Scales of the groups of a panel, decoded from their blocks, and what they do to integer sums.
#pragma once

#include "isa/simd.hpp"

namespace kvl {

// Scales (and minimums) of a group, or of one of its runs. add_to adds its contribution to a row: scale * (weights . x)
// + minimum * (sum of x), times the scale of x; a and b are weights . x of channels 0-15 and 16-31. Integer sums are
// exact, so rounding happens only here.
template <bool HAS_MIN>
struct Scales {
    static Scales of_halves(const uint16_t* at) {
        Scales of;
        of.scale_a = load_fp16(at), of.scale_b = load_fp16(at + kLanes);
        if constexpr (HAS_MIN) of.min_a = load_fp16(at + kPanel), of.min_b = load_fp16(at + kPanel + kLanes);
        return of;
    }
    static Scales of_floats(const float* at) {
        Scales of;
        of.scale_a = load(at), of.scale_b = load(at + kLanes);
        if constexpr (HAS_MIN) of.min_a = load(at + kPanel), of.min_b = load(at + kPanel + kLanes);
        return of;
    }
    void store_floats(float* to) const {
        store(to, scale_a), store(to + kLanes, scale_b);
        if constexpr (HAS_MIN) store(to + kPanel, min_a), store(to + kPanel + kLanes, min_b);
    }
    void add_to(F32& lo, F32& hi, F32 a, F32 b, float x_scale, int32_t x_sum) const {
        const F32 row_scale = splat(x_scale);
        if constexpr (HAS_MIN) {
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
constexpr int decoded_floats(int format) { return kPanel * (has_min(format) ? 2 : 1); }  // of store_floats
template <int FORMAT>
using ScalesOf = Scales<has_min(FORMAT)>;

// The scales of a block, whose bytes begin at `at`: of() gives those of a run of a group, or of the whole group.
template <int FORMAT, bool IS_SUPER = is_super(FORMAT)>
struct BlockScales {
    explicit BlockScales(const uint8_t* at) : halves(reinterpret_cast<const uint16_t*>(at)) {}
    ScalesOf<FORMAT> of(int, int run) const { return ScalesOf<FORMAT>::of_halves(halves + run * kPanel); }
    const uint16_t* halves;
};

// Of a super-block: small integers, decoded for all groups at once, times factors. Products are exact: they have at most
// 11 + 8 bits.
template <int FORMAT>
struct BlockScales<FORMAT, true> {
    static constexpr int kRows = kSuper / (has_runs(FORMAT) ? kRun : kFileGroup);
    static constexpr Scaling kScaling = scaling_of(FORMAT);
    static constexpr int kVector = kLanes * 4;  // bytes

    explicit BlockScales(const uint8_t* at) {
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(at);
        for (int i = 0; i < factor_bytes(FORMAT) / 2 / kLanes; i++) factors[i] = load_fp16(halves + i * kLanes);
        at += factor_bytes(FORMAT);
        if constexpr (kScaling == Scaling::kBytes) bytes = reinterpret_cast<const int8_t*>(at);
        if constexpr (kScaling == Scaling::kNibbles || kScaling == Scaling::kOdd)
            for (int i = 0; i < kRows * kPanel / (kScaling == Scaling::kOdd ? 2 : 1); i += kVector) {
                put_bytes(first + i, low_nibbles(at + i));
                put_bytes(second + i, high_nibbles(at + i));
            }
        if constexpr (kScaling == Scaling::kPairs) decode_pairs(at);
    }
    void decode_pairs(const uint8_t* at) {
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; pair++) {  // of groups
            const uint8_t *low = at + pair * kVector, *high = at + pair_plane(2 * pair, 0);
            put_bytes(first + pair * kVector, with_bits(low_nibbles(low), high, 4 - pair_shift(2 * pair, 0), 0x30));
            put_bytes(second + pair * kVector, with_bits(high_nibbles(low), high, 4 - pair_shift(2 * pair, 1), 0x30));
        }
    }
    ScalesOf<FORMAT> of(int group, int run) const {
        ScalesOf<FORMAT> found;
        if constexpr (FORMAT == KVL_INT3_K) {  // integers are 32 too large
            const int8_t* from = (run == 0 ? first : second) + group * kPanel;
            const F32 off = splat(-32);
            found.scale_a = fma(small_floats(from), factors[0], mul(off, factors[0]));
            found.scale_b = fma(small_floats(from + kLanes), factors[1], mul(off, factors[1]));
        } else if constexpr (kScaling == Scaling::kOdd) {  // integers stand for twice and one more
            const int at = has_runs(FORMAT) ? group * 2 + run : group;
            const int8_t* from = (at % 2 == 0 ? first : second) + at / 2 * kPanel;
            const F32 one = splat(unit_of(FORMAT)), two = splat(2 * unit_of(FORMAT));
            found.scale_a = mul(fma(small_floats(from), two, one), factors[0]);
            found.scale_b = mul(fma(small_floats(from + kLanes), two, one), factors[1]);
        } else {
            const int at = (has_runs(FORMAT) ? group * 2 + run : group) * kPanel;
            const int8_t* from = kScaling == Scaling::kBytes ? bytes : first;
            found.scale_a = times(from + at, 0), found.scale_b = times(from + at + kLanes, 1);
            if constexpr (has_min(FORMAT)) found.min_a = times(second + at, 2), found.min_b = times(second + at + kLanes, 3);
        }
        return found;
    }
    F32 times(const int8_t* integers, int factor) const { return mul(small_floats(integers), factors[factor]); }

    F32 factors[has_min(FORMAT) ? 4 : 2];
    const int8_t* bytes;
    alignas(64) int8_t first[kScaling == Scaling::kBytes ? 1 : kSuper / kRun * kPanel];
    alignas(64) int8_t second[kScaling == Scaling::kBytes ? 1 : kSuper / kRun * kPanel];
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

}  // namespace kvl
