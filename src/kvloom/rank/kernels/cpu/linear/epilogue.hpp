// Epilogue of a linear: what happens to the sums of a row and panel while they are in registers or the first-level
// cache.
#pragma once

#include "activations/gates.hpp"
#include "layout.hpp"
#include "lora/lora.hpp"

namespace kvl {

// Kinds of epilogues for which kernels are compiled separately, so that they test no conditions per row. kAny tests
// them.
enum class Sort { kAny, kStores, kAdds, kSwiglu };

// Adds the adapter's contribution and the bias to the kPanel sums of row r, applies the activation, and stores the
// result at to + r * stride, or adds it to what is stored there.
struct Epilogue {
    // Applies it to a row whose sums are in registers (channels 0-15, 16-31). SORT: the value of sort(), or kAny.
    template <Sort SORT = Sort::kAny>
    void apply(int64_t row, F32 lo, F32 hi) const {
        if (SORT == Sort::kAny && low_rank.tokens != nullptr) low_rank.add_to(row, lo, hi);
        finish<SORT>(row, lo, hi);
    }

    // Applies it to rows [row, row + count), whose sums [count][kPanel] are in memory.
    void apply(int64_t row, int count, float* sums) const {
        if (low_rank.tokens != nullptr) low_rank.add_to(row, count, sums);
        finish_rows(row, count, sums);
    }

    // The same in two parts, for rows [0, count): prepare() changes only the sums, and put() changes what other threads
    // see.
    void prepare(int count, float* sums) const {
        Epilogue own = *this;
        own.to = sums, own.stride = kPanel, own.padding = 0;
        if (!adds) return own.apply(0, count, sums);
        if (low_rank.tokens != nullptr) low_rank.add_to(0, count, sums);
    }
    void put(int count, const float* sums) const {
        if (adds) return finish_rows(0, count, sums);
        const int vectors = is_gate(kind) ? 1 : 2;
        for (int m = 0; m < count; m++)
            for (int i = 0; i < vectors + padding; i++)
                store(to + m * stride + i * kLanes, i < vectors ? load(sums + m * kPanel + i * kLanes) : splat(0));
    }

    // Everything but the adapter's contribution, which is already in the sums.
    template <Sort SORT>
    void finish(int64_t row, F32 lo, F32 hi) const {
        constexpr bool kAny = SORT == Sort::kAny;
        if (kAny && bias != nullptr) {
            lo = add(lo, load(bias));
            hi = add(hi, load(bias + kLanes));
        }
        float* at = to + row * stride;
        if (SORT == Sort::kSwiglu || (kAny && is_gate(kind))) {
            store(at, gated(kAny ? kind : KVL_SWIGLU, *shape, lo, hi));
            for (int i = 1; kAny && i <= padding; i++) store(at + i * kLanes, splat(0));
            return;
        }
        if (kAny && is_pointwise(kind)) lo = pointwise(kind, lo), hi = pointwise(kind, hi);
        if (SORT == Sort::kAdds || (kAny && adds)) {
            const F32 scale = splat(kAny && shares != nullptr ? residual_scale * shares[row] : residual_scale);
            lo = fma(lo, scale, load(at));
            hi = fma(hi, scale, load(at + kLanes));
        }
        store(at, lo);
        store(at + kLanes, hi);
    }

    void finish_rows(int64_t row, int count, const float* sums) const {
        for (int m = 0; m < count; m++) finish<Sort::kAny>(row + m, load(sums + m * kPanel), load(sums + m * kPanel + kLanes));
    }

    Sort sort() const {
        if (low_rank.tokens != nullptr || bias != nullptr || shares != nullptr || padding > 0 || is_pointwise(kind)) return Sort::kAny;
        if (is_gate(kind)) return kind == KVL_SWIGLU ? Sort::kSwiglu : Sort::kAny;
        return adds ? Sort::kAdds : Sort::kStores;
    }

    // The same epilogue with rows counted from `row`.
    Epilogue from(int64_t row) const {
        Epilogue later = *this;
        later.to += row * stride;
        later.low_rank = low_rank.from(row);
        if (shares != nullptr) later.shares += row;
        return later;
    }

    // Prefetches the destination of row `row` for writing; called while other rows are multiplied.
    void ask(int64_t row) const {
        if (is_near) return;
        float* at = to + row * stride;
        prefetch_to_write(at);
        if (!is_gate(kind)) prefetch_to_write(at + kLanes);
    }

    int kind = KVL_TO_QKV;
    const kvl_shape* shape = nullptr;  // constants of gated activations
    const float* bias = nullptr;  // [kPanel] of this panel; null = none
    float* to = nullptr;
    int64_t stride = kPanel;
    bool adds = false;
    bool is_near = false;           // the destination is already in the second-level cache: not prefetched
    float residual_scale = 1;       // factor of what is added
    const float* shares = nullptr;  // [rows] further factor of each row; null = none
    LowRank low_rank;  // of this panel
    int padding = 0;                // number of zero vectors to store after each row's gates
};

}  // namespace kvl
