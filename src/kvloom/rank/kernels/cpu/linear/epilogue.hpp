// Epilogue of one panel's sums, row by row, while they are in the first-level cache or in registers.
#pragma once

#include "activations/gates.hpp"
#include "layout.hpp"
#include "lora/lora.hpp"

namespace kvl {

// Sorts of epilogues that kernels have code of their own for: whatever one asks is decided before the first row.
enum class Sort { kAny, kStores, kAdds, kSwiglu };

// Row r's kPanel sums, what its adapter adds and the bias, activated, are stored at to + r * stride, or added to what
// is there.
struct Epilogue {
    // SORT: that of sort(), or kAny.
    template <Sort SORT = Sort::kAny>
    void apply(int64_t row, F32 lo, F32 hi) const {
        if (SORT == Sort::kAny && low_rank.tokens != nullptr) low_rank.add_to(row, lo, hi);
        finish<SORT>(row, lo, hi);
    }

    // Of rows [row, row + count), whose sums [count][kPanel] are in memory.
    void apply(int64_t row, int count, float* sums) const {
        if (low_rank.tokens != nullptr) low_rank.add_to(row, count, sums);
        for (int m = 0; m < count; m++) finish<Sort::kAny>(row + m, load(sums + m * kPanel), load(sums + m * kPanel + kLanes));
    }

    // What is done with a row's sums when its adapter has been added.
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
        if (kAny && kind == KVL_GELU) lo = gelu_erf(lo), hi = gelu_erf(hi);
        if (SORT == Sort::kAdds || (kAny && adds)) {
            const F32 scale = splat(kAny && shares != nullptr ? residual_scale * shares[row] : residual_scale);
            lo = fma(lo, scale, load(at));
            hi = fma(hi, scale, load(at + kLanes));
        }
        store(at, lo);
        store(at + kLanes, hi);
    }

    Sort sort() const {
        if (low_rank.tokens != nullptr || bias != nullptr || shares != nullptr || padding > 0 || kind == KVL_GELU) return Sort::kAny;
        if (is_gate(kind)) return kind == KVL_SWIGLU ? Sort::kSwiglu : Sort::kAny;
        return adds ? Sort::kAdds : Sort::kStores;
    }

    // The same of the rows from `row` on.
    Epilogue from(int64_t row) const {
        Epilogue later = *this;
        later.to += row * stride;
        later.low_rank = low_rank.from(row);
        if (shares != nullptr) later.shares += row;
        return later;
    }

    // Prefetches the destination of row `row` for writing: it arrives while others are multiplied.
    void ask(int64_t row) const {
        if (is_near) return;
        float* at = to + row * stride;
        prefetch_to_write(at);
        if (!is_gate(kind)) prefetch_to_write(at + kLanes);
    }

    int kind = KVL_TO_QKV;
    const kvl_shape* shape = nullptr;  // of gates
    const float* bias = nullptr;  // [kPanel] of this panel; null = none
    float* to = nullptr;
    int64_t stride = kPanel;
    bool adds = false;
    bool is_near = false;           // rows go to memory that is in the second-level cache anyway
    float residual_scale = 1;       // of what is added
    const float* shares = nullptr;  // [rows] what each row's is multiplied with, too; null = nothing
    LowRank low_rank;  // of this panel
    int padding = 0;                // vectors of zeros behind each row's gates
};

}  // namespace kvl
