// Low-rank adapters (Hu et al. 2021): y += B h with h = scale * A x, for the rows of a step that have one.
//
// h is made of the float row that is about to be quantised, and B h is added to the sums of a panel while they are in
// the first-level cache. Tokens of one adapter share the loads of A and B. Both are sums in an order that only the
// adapter's own shape fixes: a row's bits never depend on the others.
#pragma once

#include <algorithm>
#include <vector>

#include "memory.hpp"
#include "simd.hpp"

namespace kvl {

constexpr int kShrinkRows = 4;  // rows of A that share each load of x
constexpr int kLoraTokens = 4;  // tokens of one adapter that share each load of A and of B
constexpr int kLine = 32;       // 16-bit elements of a line of the cache

inline void prefetch(const uint16_t* at, int64_t count) {
    for (int64_t i = 0; i < count; i += kLine) prefetch(at + i);
}

// A of one module; its h is [first, first + rank) of the linear's.
struct LoraPart {
    int64_t first, rank;
    float scale;
    const uint16_t* a;  // bf16 [rank][padded_cols], padded with zeros
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
    std::vector<LoraHalf> halves;  // [panels * 2]

    // Asks for what is read next: the first rows of A, of which the others follow; B of a panel.
    void prefetch_a(int64_t cols) const {
        for (const LoraPart& part : parts) prefetch(part.a, std::min<int64_t>(part.rank, kShrinkRows) * cols);
    }
    void prefetch_b(int64_t panel) const {
        for (size_t half = size_t(2 * panel); half < halves.size() && half < size_t(2 * panel + 2); half++)
            prefetch(halves[half].b, halves[half].rank * kLanes);
    }
};

struct Adapter {
    std::vector<LoraLinear> linears;  // as the model's
    int64_t widest = 0;               // largest rank of a linear

    // Room for `count` of its numbers, zeros, behind those before: a step reads them in the order in which they came. Throws
    // std::bad_alloc.
    uint16_t* take(int64_t count);

  private:
    std::vector<HugeBuffer> memory_;
    uint16_t* next_ = nullptr;
    int64_t left_ = 0;  // numbers
};

// h[m][0, ROWS) = scale * rows of A times x[m][cols], for some tokens m of one adapter: A is read once for all of them. What
// lies behind these rows is asked for meanwhile.
template <int ROWS, int TOKENS>
inline void shrink_tile(const uint16_t* a, const float* const* x, int64_t cols, float scale, int64_t first, float* const* h) {
    F32 sums[TOKENS][ROWS];
#pragma GCC unroll 4
    for (int m = 0; m < TOKENS; m++)
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) sums[m][r] = splat(0);
    const uint16_t* behind = a + ROWS * cols;
    for (int64_t k = 0; k < cols; k += kLanes, behind += ROWS * kLanes) {
        prefetch(behind, ROWS * kLanes);
        F32 value[TOKENS];
#pragma GCC unroll 4
        for (int m = 0; m < TOKENS; m++) value[m] = load(x[m] + k);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            const F32 weight = load_bf16(a + r * cols + k);
#pragma GCC unroll 4
            for (int m = 0; m < TOKENS; m++) sums[m][r] = fma(weight, value[m], sums[m][r]);
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < TOKENS; m++)
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) h[m][first + r] = sum(sums[m][r]) * scale;
}

template <int TOKENS>
inline void shrink_tokens(const LoraLinear& linear, const float* const* x, int64_t cols, float* const* h) {
    for (const LoraPart& part : linear.parts) {
        const uint16_t* a = part.a;
        int64_t r = 0;
        for (; r + kShrinkRows <= part.rank; r += kShrinkRows, a += kShrinkRows * cols)
            shrink_tile<kShrinkRows, TOKENS>(a, x, cols, part.scale, part.first + r, h);
        switch (part.rank - r) {
            case 1: shrink_tile<1, TOKENS>(a, x, cols, part.scale, part.first + r, h); break;
            case 2: shrink_tile<2, TOKENS>(a, x, cols, part.scale, part.first + r, h); break;
            case 3: shrink_tile<3, TOKENS>(a, x, cols, part.scale, part.first + r, h); break;
            default: break;
        }
    }
}

// h[m][linear.rank] of 1 to kLoraTokens rows x[m][cols]; cols is the linear's padded width.
inline void shrink(const LoraLinear& linear, const float* const* x, int count, int64_t cols, float* const* h) {
    switch (count) {
        case 1: return shrink_tokens<1>(linear, x, cols, h);
        case 2: return shrink_tokens<2>(linear, x, cols, h);
        case 3: return shrink_tokens<3>(linear, x, cols, h);
        default: return shrink_tokens<4>(linear, x, cols, h);
    }
}

// sums[m][16] += B h[m] of 16 channels; two chains a token, because one would wait for its own latency.
template <int TOKENS>
inline void expand_tile(const LoraHalf& half, const float* const* h, float* const* sums) {
    F32 even[TOKENS], odd[TOKENS];
#pragma GCC unroll 4
    for (int m = 0; m < TOKENS; m++) {
        even[m] = load(sums[m]);
        odd[m] = splat(0);
    }
    const uint16_t* b = half.b;
    int64_t r = half.first;
    const int64_t end = half.first + half.rank;
    for (; r + 2 <= end; r += 2, b += 2 * kLanes) {
        const F32 first = load_bf16(b), second = load_bf16(b + kLanes);
#pragma GCC unroll 4
        for (int m = 0; m < TOKENS; m++) {
            even[m] = fma(splat(h[m][r]), first, even[m]);
            odd[m] = fma(splat(h[m][r + 1]), second, odd[m]);
        }
    }
    if (r < end) {
        const F32 last = load_bf16(b);
#pragma GCC unroll 4
        for (int m = 0; m < TOKENS; m++) even[m] = fma(splat(h[m][r]), last, even[m]);
    }
#pragma GCC unroll 4
    for (int m = 0; m < TOKENS; m++) store(sums[m], add(even[m], odd[m]));
}

// The same for 1 to kLoraTokens rows.
inline void expand(const LoraHalf& half, const float* const* h, int count, float* const* sums) {
    if (half.rank == 0) return;
    switch (count) {
        case 1: return expand_tile<1>(half, h, sums);
        case 2: return expand_tile<2>(half, h, sums);
        case 3: return expand_tile<3>(half, h, sums);
        default: return expand_tile<4>(half, h, sums);
    }
}

}  // namespace kvl
