// Low-rank adapters (Hu et al. 2021): y += B h with h = scale * A x, for the rows of a step that have one.
//
// h is made of the float row that is about to be quantised, and B h is added to the sums of a panel while they are in
// registers. Both are sums in an order that only the adapter's own shape fixes: a row's bits never depend on the others.
#pragma once

#include <vector>

#include "simd.hpp"

namespace kvl {

constexpr int kShrinkRows = 4;  // rows of A that share each load of x

// A of one module; its h is [first, first + rank) of the linear's.
struct LoraPart {
    int64_t first, rank;
    float scale;
    std::vector<uint16_t> a;  // bf16 [rank][padded_cols], padded with zeros
};

// B for 16 output channels: bf16 [rank][16] at `b`. All channels of a half panel belong to one module.
struct LoraHalf {
    const uint16_t* b = nullptr;
    int64_t first = 0, rank = 0;
};

// What an adapter adds to one linear; nothing when rank is 0.
struct LoraLinear {
    int64_t rank = 0;  // of all parts together
    std::vector<LoraPart> parts;
    std::vector<LoraHalf> halves;          // [panels * 2]
    std::vector<std::vector<uint16_t>> b;  // what the halves point into
};

struct Adapter {
    std::vector<LoraLinear> linears;  // as the model's
    int64_t widest = 0;               // largest rank of a linear
};

// h[ROWS] = scale * rows of A times x[cols].
template <int ROWS>
inline void shrink_rows(const uint16_t* a, const float* x, int64_t cols, float scale, float* h) {
    F32 sums[ROWS];
#pragma GCC unroll 4
    for (int m = 0; m < ROWS; m++) sums[m] = splat(0);
    for (int64_t k = 0; k < cols; k += kLanes) {
        const F32 value = load(x + k);
#pragma GCC unroll 4
        for (int m = 0; m < ROWS; m++) sums[m] = fma(load_bf16(a + m * cols + k), value, sums[m]);
    }
#pragma GCC unroll 4
    for (int m = 0; m < ROWS; m++) h[m] = sum(sums[m]) * scale;
}

// h[linear.rank] of one row x[cols]; cols is the linear's padded width.
inline void shrink(const LoraLinear& linear, const float* x, int64_t cols, float* h) {
    for (const LoraPart& part : linear.parts) {
        float* out = h + part.first;
        int64_t r = 0;
        for (; r + kShrinkRows <= part.rank; r += kShrinkRows)
            shrink_rows<kShrinkRows>(part.a.data() + r * cols, x, cols, part.scale, out + r);
        const uint16_t* rest = part.a.data() + r * cols;
        switch (part.rank - r) {
            case 1: shrink_rows<1>(rest, x, cols, part.scale, out + r); break;
            case 2: shrink_rows<2>(rest, x, cols, part.scale, out + r); break;
            case 3: shrink_rows<3>(rest, x, cols, part.scale, out + r); break;
            default: break;
        }
    }
}

// sums + B h of 16 channels; two chains, because one would wait for its own latency.
inline F32 expand(const LoraHalf& half, const float* h, F32 sums) {
    F32 odd = splat(0);
    const float* from = h + half.first;
    const uint16_t* b = half.b;
    int64_t r = 0;
    for (; r + 2 <= half.rank; r += 2, b += 2 * kLanes) {
        sums = fma(splat(from[r]), load_bf16(b), sums);
        odd = fma(splat(from[r + 1]), load_bf16(b + kLanes), odd);
    }
    if (r < half.rank) sums = fma(splat(from[r]), load_bf16(b), sums);
    return half.rank > 0 ? add(sums, odd) : sums;
}

}  // namespace kvl
