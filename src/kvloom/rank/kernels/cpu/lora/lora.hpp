// LoRA, low-rank adapters (Hu et al. 2021): y += B h with h = scale * A x, for the rows of a step that have an adapter.
//
// h is computed from the activations as the linear itself reads them, and B h is added to a row's sums before the
// epilogue stores them. A and B have the type of these activations: bf16, or int8 with one scale per rank of A and per
// channel of B; then h is int8 too, with one scale per module (docs/decisions/kernel-speed.md). Integer sums are exact,
// and the order of all other sums depends only on the adapter's shape, so a row's bits do not depend on other rows.
//
// Ranks are stored in tiles of 16, one per lane; a module's last tile is padded with zeros:
//   A, a tile:           16 floats, scales | bf16: [cols / 2][16][2], int8: [cols / 4][16][4] bytes, value = byte - 128
//   B, of 16 channels:   bf16: [ranks][16]; int8: 16 bf16, scales | [ranks / 4][16][4] bytes; ranks = the module's,
//                        rounded up to 8
//   h, of a module:      bf16: float [tiles][16]; int8: an IntHead, then bytes [tiles][16]
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "activations/quant.hpp"
#include "runtime/memory.hpp"

namespace kvl {

constexpr int kLoraTokens = kRowsOnce;  // tokens of one adapter that share each load of A or B
constexpr int kMostRanks = 512;         // of a module
constexpr int kRankPad = 8;             // ranks of B are padded to a multiple of it: two quads
constexpr int kAskedBytes = 4096;       // distance at which A is prefetched
constexpr int kLine = 64;               // bytes of a cache line

inline void prefetch(const uint8_t* at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += kLine) prefetch(at + i);
}

// Header of a module's h in int8.
struct IntHead {
    float scale;
    int32_t start;  // start value of sums: minus what weight bytes that are kByteZero too large add to them
    int32_t unused[2];
};

// The input activations of a linear [rows][cols]; `format`: the linear's format that determines their type.
struct LoraInput {
    Activations x;
    int64_t cols;
    int format;

    bool is_bf16() const { return format == KVL_BF16; }
    int64_t tile_bytes() const { return kLanes * (4 + cols * (is_bf16() ? 2 : 1)); }
};

// One module: tiles of A, and B for `count` half panels (16 channels) from `first` on, or for every other one if
// `skips`. The address of B is computed: a list of addresses would have to be read from memory first.
struct LoraPart {
    const uint8_t *a, *b;
    int32_t h;             // offset in bytes of the module's h in a token's h
    int32_t tiles, ranks;  // tiles of A; ranks of B, padded
    int32_t half_bytes;    // bytes of B for a half panel
    int32_t first, count;
    int32_t skips;         // 0 or 1

    // B for half panel `index` of the linear; null = the module does not change it.
    const uint8_t* half(int64_t index) const {
        const uint32_t at = uint32_t(index - first), own = at >> skips;
        return own < uint32_t(count) && own << skips == at ? b + own * uint32_t(half_bytes) : nullptr;
    }
};

// An adapter's modules for one linear. Without parts it changes nothing.
struct LoraLinear {
    bool is_bf16 = false;
    int64_t h_bytes = 0;  // bytes of a token's h for all parts
    std::vector<LoraPart> parts;

    // Prefetches B of a panel.
    void prefetch_b(int64_t panel) const {
        for (const LoraPart& part : parts)
            for (int64_t half = 2 * panel; half < 2 * panel + 2; half++)
                if (const uint8_t* b = part.half(half)) prefetch(b, part.half_bytes);
    }
};

struct Adapter {
    std::vector<LoraLinear> linears;  // indexed like the model's
    int64_t widest = 0;               // largest h_bytes of its linears

    // Allocates `bytes` of zeros after those of earlier calls: a step reads them in the order of allocation. The
    // adapter owns them. Throws std::bad_alloc.
    uint8_t* take(int64_t bytes);

  private:
    std::vector<HugeBuffer> memory_;
    uint8_t* next_ = nullptr;
    int64_t left_ = 0;  // bytes
};

// Multiplies a tile of A by ROWS rows, in int8: h[m] = 16 ranks of A x of row rows[m], without the scales of A. `next`:
// the memory to prefetch after this tile.
template <int ROWS>
inline void shrink_bytes(const uint8_t* a, const LoraInput& input, const int32_t* rows, const uint8_t* next, F32 (&h)[ROWS]) {
    // independent dot products per row: a single chain would be bound by its latency
    constexpr int kChains = ROWS == 1 ? 4 : ROWS <= 4 ? 2 : 1;
    const int64_t group = is_whole(input.format) ? input.cols : group_size(input.format), groups = input.cols / group;
    const int64_t runs = num_sums(input.format, input.cols) / groups;
    const uint8_t *weights = a + kLanes * 4, *ahead = weights + kAskedBytes, *const end = a + input.tile_bytes();
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) h[m] = splat(0);
    for (int64_t g = 0; g < groups; g++) {
        I32 sums[ROWS][kChains];
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) {
            int32_t total = 0;
            for (int64_t r = 0; r < runs; r++) total += input.x.sum[(rows[m] * groups + g) * runs + r];
            sums[m][0] = splat_int(-kByteZero * total);
#pragma GCC unroll 4
            for (int s = 1; s < kChains; s++) sums[m][s] = splat_int(0);
        }
        for (int64_t k = g * group; k < (g + 1) * group; k += 4 * kChains) {
            if (ahead >= end) ahead = next + (ahead - end);
#pragma GCC unroll 4
            for (int s = 0; s < kChains; s++, weights += kLanes * 4, ahead += kLanes * 4) {
                prefetch(ahead);
                const Bytes own = load_bytes(weights);
#pragma GCC unroll 8
                for (int m = 0; m < ROWS; m++)
                    sums[m][s] = dot_weights(sums[m][s], own, word_at(input.x.data + rows[m] * input.cols + k + 4 * s));
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) {
#pragma GCC unroll 4
            for (int s = 1; s < kChains; s++) sums[m][0] = add(sums[m][0], sums[m][s]);
            h[m] = fma(to_float(sums[m][0]), splat(input.x.scale[rows[m] * groups + g]), h[m]);
        }
    }
}

template <int ROWS>
inline void shrink_bf16(const uint8_t* a, const LoraInput& input, const int32_t* rows, const uint8_t* next, F32 (&h)[ROWS]) {
    const uint16_t *x[ROWS], *weights = reinterpret_cast<const uint16_t*>(a + kLanes * 4);
    const uint8_t *ahead = a + kAskedBytes, *const end = a + input.tile_bytes();
    F32 odd[ROWS];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) {
        x[m] = reinterpret_cast<const uint16_t*>(input.x.data) + rows[m] * input.cols;
        h[m] = odd[m] = splat(0);
    }
    for (int64_t k = 0; k < input.cols; k += 2, weights += 2 * kLanes, ahead += 4 * kLanes) {
        if (ahead >= end) ahead = next + (ahead - end);
        prefetch(ahead);
        const PairHalves own = load_halves(weights);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) {
            h[m] = fma(own.first, splat(bf16_to_float(x[m][k])), h[m]);
            odd[m] = fma(own.second, splat(bf16_to_float(x[m][k + 1])), odd[m]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) h[m] = add(h[m], odd[m]);
}

// Quantises h of a module of one token to int8, the largest magnitude to 127, and stores it with its IntHead.
inline void quantize_h(const float* h, int64_t tiles, uint8_t* to) {
    F32 peak = splat(0);
    for (int64_t r = 0; r < tiles * kLanes; r += kLanes) peak = max(peak, abs(load(h + r)));
    const float top = largest(peak);
    const F32 inverse = splat(top > 0 ? 127.0f / top : 0.0f);
    I32 total = splat_int(0);
    for (int64_t r = 0; r < tiles * kLanes; r += kLanes) {
        const I32 value = to_int(mul(load(h + r), inverse));
        total = add(total, value);
        store_bytes(reinterpret_cast<int8_t*>(to + sizeof(IntHead)) + r, value);
    }
    const IntHead head{top / 127.0f, -kByteZero * sum(total), {}};
    std::memcpy(to, &head, sizeof head);
}

template <int ROWS>
inline void shrink_rows(const LoraLinear& linear, const LoraInput& input, const int32_t* rows, uint8_t* const* h, const uint8_t* then) {
    alignas(64) float room[ROWS][kMostRanks];
    const int64_t tile_bytes = input.tile_bytes();
    for (size_t p = 0; p < linear.parts.size(); p++) {
        const LoraPart& part = linear.parts[p];
        const uint8_t* const behind = p + 1 < linear.parts.size() ? linear.parts[p + 1].a : then;
        for (int64_t tile = 0; tile < part.tiles; tile++) {
            const uint8_t *const a = part.a + tile * tile_bytes, *const next = tile + 1 < part.tiles ? a + tile_bytes : behind;
            const F32 scales = load(reinterpret_cast<const float*>(a));
            F32 sums[ROWS];
            input.is_bf16() ? shrink_bf16<ROWS>(a, input, rows, next, sums) : shrink_bytes<ROWS>(a, input, rows, next, sums);
#pragma GCC unroll 8
            for (int m = 0; m < ROWS; m++) store(room[m] + tile * kLanes, mul(sums[m], scales));
        }
        for (int m = 0; m < ROWS; m++) {
            if (input.is_bf16()) std::memcpy(h[m] + part.h, room[m], size_t(part.tiles * kLanes) * sizeof(float));
            else quantize_h(room[m], part.tiles, h[m] + part.h);
        }
    }
}

// Rows of one adapter that are computed together.
struct LoraRows {
    int count = 0;  // at most kLoraTokens
    int32_t rows[kLoraTokens];
    uint8_t* h[kLoraTokens];  // output of each row: [linear.h_bytes]
};

// Computes h of 1 to kLoraTokens rows. `then`: the memory to prefetch at the end.
template <int ROWS = kLoraTokens>
inline void shrink(const LoraLinear& linear, const LoraInput& input, const LoraRows& of, const uint8_t* then) {
    if constexpr (ROWS > 1)
        if (of.count < ROWS) return shrink<ROWS - 1>(linear, input, of, then);
    shrink_rows<ROWS>(linear, input, of.rows, of.h, then);
}

// Adds B h of 16 channels to the sums of ROWS tokens, in int8; h: each token's h of the module. A single token uses two
// chains of products, because one would be bound by its latency.
template <int ROWS>
inline void expand_bytes(const uint8_t* b, int ranks, const uint8_t* const (&h)[ROWS], F32 (&sums)[ROWS]) {
    constexpr int kChains = ROWS == 1 ? 2 : 1;
    const F32 scales = load_bf16(reinterpret_cast<const uint16_t*>(b));
    I32 products[ROWS][kChains];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) {
        products[m][0] = splat_int(word_at(h[m] + offsetof(IntHead, start)));
        if constexpr (kChains > 1) products[m][1] = splat_int(0);
    }
    b += kLanes * 2;
    for (int r = 0; r < ranks; r += kRankPad, b += kRankPad * kLanes)
#pragma GCC unroll 2
        for (int quad = 0; quad < 2; quad++) {
            const Bytes own = load_bytes(b + quad * kLanes * 4);
#pragma GCC unroll 8
            for (int m = 0; m < ROWS; m++) {
                I32& sum = products[m][quad % kChains];
                sum = dot_weights(sum, own, word_at(h[m] + sizeof(IntHead) + r + 4 * quad));
            }
        }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) {
        if constexpr (kChains > 1) products[m][0] = add(products[m][0], products[m][1]);
        float scale;
        std::memcpy(&scale, h[m] + offsetof(IntHead, scale), sizeof scale);
        sums[m] = fma(to_float(products[m][0]), mul(scales, splat(scale)), sums[m]);
    }
}

template <int ROWS>
inline void expand_bf16(const uint8_t* b, int ranks, const uint8_t* const (&h)[ROWS], F32 (&sums)[ROWS]) {
    const uint16_t* at = reinterpret_cast<const uint16_t*>(b);
    const float* x[ROWS];
    F32 odd[ROWS];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) x[m] = reinterpret_cast<const float*>(h[m]), odd[m] = splat(0);
    for (int r = 0; r < ranks; r += 2, at += 2 * kLanes) {
        const F32 first = load_bf16(at), second = load_bf16(at + kLanes);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) {
            sums[m] = fma(splat(x[m][r]), first, sums[m]);
            odd[m] = fma(splat(x[m][r + 1]), second, odd[m]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) sums[m] = add(sums[m], odd[m]);
}

// Tokens of one adapter that are computed together: each one's sums of a panel, and its h for the linear.
struct LoraSums {
    int count = 0;  // at most kLoraTokens
    float* sums[kLoraTokens];
    const uint8_t* h[kLoraTokens];
};

// Adds a module's contribution to the first (half = 0) or last 16 channels (1) of the sums of 1 to kLoraTokens tokens.
template <int ROWS = kLoraTokens>
inline void expand(const LoraLinear& linear, const LoraPart& part, const uint8_t* b, int half, const LoraSums& of) {
    if constexpr (ROWS > 1)
        if (of.count < ROWS) return expand<ROWS - 1>(linear, part, b, half, of);
    const uint8_t* h[ROWS];
    F32 sums[ROWS];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) h[m] = of.h[m] + part.h, sums[m] = load(of.sums[m] + half * kLanes);
    linear.is_bf16 ? expand_bf16<ROWS>(b, part.ranks, h, sums) : expand_bytes<ROWS>(b, part.ranks, h, sums);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) store(of.sums[m] + half * kLanes, sums[m]);
}

// Adds an adapter's contribution to the sums of a panel of one token; h: the token's h for the linear, all modules.
inline void expand(const LoraLinear& linear, int64_t panel, const uint8_t* h, F32& lo, F32& hi) {
    for (const LoraPart& part : linear.parts)
        for (int half = 0; half < 2; half++)
            if (const uint8_t* const b = part.half(2 * panel + half)) {
                const uint8_t* const own[1] = {h + part.h};
                F32& sum = half == 0 ? lo : hi;
                F32 sums[1] = {sum};
                linear.is_bf16 ? expand_bf16<1>(b, part.ranks, own, sums) : expand_bytes<1>(b, part.ranks, own, sums);
                sum = sums[0];
            }
}

// A token of a step with adapters.
struct LoraToken {
    const Adapter* adapter = nullptr;    // null = it has none
    int32_t before = kFar, behind = kFar;  // distance to the previous and the next token with the same adapter
    static constexpr int32_t kFar = 1 << 30;
};

// Adds the adapters' contributions to the sums of one panel.
struct LowRank {
    void add_to(int64_t row, F32& lo, F32& hi) const {
        if (tokens[row].adapter == nullptr) return;
        expand(tokens[row].adapter->linears[size_t(linear)], panel, h + row * stride, lo, hi);
    }
    // For rows [row, row + count), whose sums [count][kPanel] are in memory. Rows of one adapter are computed together.
    void add_to(int64_t row, int count, float* sums) const {
        for (int first = 0; first < count; first++) {
            const LoraToken& token = tokens[row + first];
            if (token.adapter == nullptr || token.before <= first) continue;
            for (int m = first; m < count;) {
                LoraSums some;
                for (; m < count && some.count < kLoraTokens; m += tokens[row + m].behind) {
                    some.sums[some.count] = sums + m * kPanel;
                    some.h[some.count++] = h + (row + m) * stride;
                }
                add_some(token.adapter->linears[size_t(linear)], some);
            }
        }
    }
    // The same object with rows counted from `row`.
    LowRank from(int64_t row) const { return {tokens ? tokens + row : nullptr, h + row * stride, stride, panel, linear}; }

    const LoraToken* tokens = nullptr;  // [rows]; null = no row has an adapter that changes the linear
    const uint8_t* h = nullptr;         // [rows][stride]
    int64_t stride = 0, panel = 0;
    int32_t linear = 0;

  private:
    void add_some(const LoraLinear& of, const LoraSums& some) const {
        for (const LoraPart& part : of.parts)
            for (int half = 0; half < 2; half++)
                if (const uint8_t* const b = part.half(2 * panel + half)) {
                    prefetch(b + (2 - part.skips) * part.half_bytes, part.half_bytes);  // of the next panel
                    expand(of, part, b, half, some);
                }
    }
};

}  // namespace kvl
