// Sums of products of bf16 pairs, in one of two orders of addition. A `Pairs` vector holds one pair per lane (a lane is
// a key, a dimension or a channel). All lanes are multiplied by the same pair of `Factor` numbers. A `Sum` accumulates
// such products; close() must be called on it at the end of each stretch.
#pragma once

#include "isa/simd.hpp"

namespace kvl {

// The order of Intel's tile unit (Intel SDM, TDPBF16PS), so that both give the same bits: within a stretch, the
// products of the first elements of the pairs are one chain of fused multiply-adds and those of the second elements
// another; then the sum of both chains is added to the sum of the earlier stretches.
struct UnitOrder {
    using Pairs = PairHalves;
    using Factor = float;  // a bf16, widened
    struct Sum {
        F32 first, second, whole;
    };
    static constexpr int kTilesOnce = (kvl::kTilesOnce + 1) / 2;  // half as many: each sum needs two registers
    static Sum zero() { return {splat(0), splat(0), splat(0)}; }
    static Pairs load_pairs(const uint16_t* from) { return load_halves(from); }
    static void add_pair(Sum& sum, const Pairs& pairs, const Factor* pair) {
        sum.first = fma(pairs.first, splat(pair[0]), sum.first);
        sum.second = fma(pairs.second, splat(pair[1]), sum.second);
    }
    static void close(Sum& sum) { sum = {splat(0), splat(0), add(sum.whole, add(sum.first, sum.second))}; }
    static F32 whole(const Sum& sum) { return sum.whole; }

    // Converts bf16 numbers to factors in `room` [count] and returns it; without conversion returns `numbers`.
    static const Factor* factors_of(const uint16_t* numbers, int count, Factor* room) {
        for (int i = 0; i < count; i += kLanes) store(room + i, load_bf16(numbers + i));
        return room;
    }
    template <int COUNT>
    static void store_factors(Factor* to, const F32 (&from)[COUNT]) {
#pragma GCC unroll 8
        for (int i = 0; i < COUNT; i++) store(to + i * kLanes, round_bf16(from[i]));
    }
};

#ifdef KVL_HAS_PAIRS

// The order of vdpbf16ps (Intel SDM; tests check that AMD's processors follow it): one chain, to which each pair adds
// first its second product, then its first one, rounding after each.
struct PairOrder {
    using Pairs = kvl::Pairs;
    using Factor = uint16_t;
    using Sum = F32;
    static constexpr int kTilesOnce = kvl::kTilesOnce;
    static Sum zero() { return splat(0); }
    static Pairs load_pairs(const uint16_t* from) { return kvl::load_pairs(from); }
    static void add_pair(Sum& sum, const Pairs& pairs, const Factor* pair) { sum = dot_pairs(sum, pairs, word_at(pair)); }
    static void close(Sum&) {}
    static F32 whole(const Sum& sum) { return sum; }
    static const Factor* factors_of(const uint16_t* numbers, int, Factor*) { return numbers; }
    template <int COUNT>
    static void store_factors(Factor* to, const F32 (&from)[COUNT]) {
#pragma GCC unroll 4
        for (int i = 0; i + 1 < COUNT; i += 2) store_bf16(to + i * kLanes, from[i], from[i + 1]);
        if (COUNT % 2) store_bf16(to + (COUNT - 1) * kLanes, from[COUNT - 1]);
    }
};

constexpr bool has_pairs() { return true; }

#else

using PairOrder = UnitOrder;
constexpr bool has_pairs() { return false; }

#endif

}  // namespace kvl
