// Low-rank adapters (Hu et al. 2021): y += B h with h = scale * A x, for the rows of a step that have one.
//
// h is made of the activations as the linear itself reads them, and B h is added to a row's sums where its epilogue is done, in
// registers. A and B are held as the activations are: bf16, or int8 with a scale for each rank of A and each channel of B, and then
// h is int8 too, with a scale for each module (decision 086). Sums of integers are exact and all others have an order that only
// the adapter's own shape fixes: a row's bits never depend on the others.
//
// Ranks come in tiles of 16, one a lane; a module's last is filled with zeros:
//   A, a tile:           16 floats, scales | bf16: [cols / 2][16][2], int8: [cols / 4][16][4] bytes, value = byte - 128
//   B, of 16 channels:   bf16: [ranks][16]; int8: 16 bf16, scales | [ranks / 4][16][4] bytes; ranks = the module's, rounded up to 8
//   h, of a module:      bf16: float [tiles][16]; int8: an IntHead, then bytes [tiles][16]
#pragma once

#include <algorithm>
#include <vector>

#include "memory.hpp"
#include "quant.hpp"

namespace kvl {

constexpr int kLoraTokens = kRowsOnce;  // tokens of one adapter that share each load of A
constexpr int kExpandRows = 16;         // whose sums B is added to at a time: bits of a word
constexpr int kMostRanks = 512;         // of a module
constexpr int kRankPad = 8;             // ranks of B come in so many: two chains of quads, or of ranks
constexpr int kAskedBytes = 2048;       // of A, before they are multiplied
constexpr int kLine = 64;               // bytes of a line of the cache

inline void prefetch(const uint8_t* at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += kLine) prefetch(at + i);
}

// What stands before a module's h in int8.
struct IntHead {
    float scale;
    int32_t start;  // of sums: what bytes that are 128 too large add to them, taken off
    int32_t unused[2];
};

// What tokens read, and how: `format` is that of the linear's activations.
struct LoraInput {
    Activations x;
    int64_t cols;
    int format;

    bool is_bf16() const { return format == KVL_BF16; }
    int64_t tile_bytes() const { return kLanes * (4 + cols * (is_bf16() ? 2 : 1)); }
};

// One module: tiles of A, and B for `count` halves of panels from `first` on, every other one if `skips`. That is all that says
// where B is, for a list of its pieces would come from memory before them.
struct LoraPart {
    const uint8_t *a, *b;
    int32_t h;             // byte of a token's h where the module's begins
    int32_t tiles, ranks;  // of A; of B
    int32_t half_bytes;    // of B for 16 channels
    int32_t first, count;
    int32_t skips;         // 0 or 1

    // B of half `index` of the linear's panels; null = it is no half of this module.
    const uint8_t* half(int64_t index) const {
        const uint32_t at = uint32_t(index - first), own = at >> skips;
        return own < uint32_t(count) && own << skips == at ? b + own * uint32_t(half_bytes) : nullptr;
    }
};

// What an adapter adds to one linear; nothing when it has no parts.
struct LoraLinear {
    bool is_bf16 = false;
    int64_t h_bytes = 0;  // of all parts together
    std::vector<LoraPart> parts;

    // Asks for B of a panel.
    void prefetch_b(int64_t panel) const {
        for (const LoraPart& part : parts)
            for (int64_t half = 2 * panel; half < 2 * panel + 2; half++)
                if (const uint8_t* b = part.half(half)) prefetch(b, part.half_bytes);
    }
};

struct Adapter {
    std::vector<LoraLinear> linears;  // as the model's
    int64_t widest = 0;               // most bytes of h of a linear

    // Room for `bytes`, zeros, behind those before: a step reads them in the order in which they came. Throws std::bad_alloc.
    uint8_t* take(int64_t bytes);

  private:
    std::vector<HugeBuffer> memory_;
    uint8_t* next_ = nullptr;
    int64_t left_ = 0;  // bytes
};

// A tile of A times some rows: sums[m] = what is 16 ranks of h of row rows[m]. `next`: what is read behind the tile.
template <int ROWS>
inline void shrink_bytes(const uint8_t* a, const LoraInput& input, const int32_t* rows, const uint8_t* next, F32 (&h)[ROWS]) {
    constexpr int kChains = ROWS == 1 ? 4 : ROWS <= 4 ? 2 : 1;  // of dot products: one would wait for its own latency
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

// h of a module of one token in int8: the largest -> 127.
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

// Rows of one adapter at a time.
struct LoraRows {
    int count = 0;  // at most kLoraTokens
    int32_t rows[kLoraTokens];
    uint8_t* h[kLoraTokens];  // of each: [linear.h_bytes]
};

// h of 1 to kLoraTokens rows; `then`: what is read next.
template <int ROWS = kLoraTokens>
inline void shrink(const LoraLinear& linear, const LoraInput& input, const LoraRows& of, const uint8_t* then) {
    if constexpr (ROWS > 1)
        if (of.count < ROWS) return shrink<ROWS - 1>(linear, input, of, then);
    shrink_rows<ROWS>(linear, input, of.rows, of.h, then);
}

// sums + B h of 16 channels, of one token; two chains, because one would wait for its own latency.
inline F32 expand_bytes(const uint8_t* b, int ranks, const uint8_t* h, F32 sums) {
    IntHead head;
    std::memcpy(&head, h, sizeof head);
    const int8_t* const x = reinterpret_cast<const int8_t*>(h + sizeof head);
    const F32 scales = mul(load_bf16(reinterpret_cast<const uint16_t*>(b)), splat(head.scale));
    I32 even = splat_int(head.start), odd = splat_int(0);
    b += kLanes * 2;
    for (int r = 0; r < ranks; r += kRankPad, b += kRankPad * kLanes) {
        even = dot_weights(even, load_bytes(b), word_at(x + r));
        odd = dot_weights(odd, load_bytes(b + kLanes * 4), word_at(x + r + 4));
    }
    return fma(to_float(add(even, odd)), scales, sums);
}

inline F32 expand_bf16(const uint8_t* b, int ranks, const uint8_t* h, F32 sums) {
    const float* const x = reinterpret_cast<const float*>(h);
    const uint16_t* at = reinterpret_cast<const uint16_t*>(b);
    F32 odd = splat(0);
    for (int r = 0; r < ranks; r += 2, at += 2 * kLanes) {
        sums = fma(splat(x[r]), load_bf16(at), sums);
        odd = fma(splat(x[r + 1]), load_bf16(at + kLanes), odd);
    }
    return add(sums, odd);
}

inline F32 expand(const LoraLinear& linear, const LoraPart& part, const uint8_t* b, const uint8_t* h, F32 sums) {
    if (linear.is_bf16) return expand_bf16(b, part.ranks, h + part.h, sums);
    return expand_bytes(b, part.ranks, h + part.h, sums);
}

// To the sums of a panel of one token what its adapter adds; h: all that it has for the linear.
inline void expand(const LoraLinear& linear, int64_t panel, const uint8_t* h, F32& lo, F32& hi) {
    for (const LoraPart& part : linear.parts) {
        const uint8_t *const first = part.half(2 * panel), *const second = part.half(2 * panel + 1);
        if (first != nullptr) lo = expand(linear, part, first, h, lo);
        if (second != nullptr) hi = expand(linear, part, second, h, hi);
    }
}

// What adapters add to the sums of one panel.
struct LowRank {
    void add_to(int64_t row, F32& lo, F32& hi) const {
        if (adapters[row] == nullptr) return;
        expand(adapters[row]->linears[size_t(linear)], panel, h + row * stride, lo, hi);
    }
    // The same of rows [row, row + count), whose sums [count][kPanel] are in memory.
    void add_to(int64_t row, int count, float* sums) const {
        for (int first = 0; first < count; first += kExpandRows)
            add_some(row + first, min_of(count - first, kExpandRows), sums + first * kPanel);
    }
    // The same of the rows from `row` on.
    LowRank from(int64_t row) const { return {adapters ? adapters + row : nullptr, h + row * stride, stride, panel, linear}; }

    const Adapter* const* adapters = nullptr;  // [rows] of each, null = none; null = no row has one that changes the linear
    const uint8_t* h = nullptr;                // [rows][stride]
    int64_t stride = 0, panel = 0;
    int32_t linear = 0;

  private:
    // At most kExpandRows; those of one adapter together, so that its B is looked for once.
    void add_some(int64_t row, int count, float* sums) const {
        uint32_t done = 0;
        for (int first = 0; first < count; first++) {
            const Adapter* const adapter = adapters[row + first];
            if (adapter == nullptr || (done >> first & 1)) continue;
            int same[kExpandRows], num_same = 0;
            for (int m = first; m < count; m++)
                if (adapters[row + m] == adapter) same[num_same++] = m, done |= uint32_t(1) << m;
            const LoraLinear& of = adapter->linears[size_t(linear)];
            for (const LoraPart& part : of.parts)
                for (int half = 0; half < 2; half++)
                    if (const uint8_t* const b = part.half(2 * panel + half))
                        for (int i = 0; i < num_same; i++) {
                            float* const at = sums + same[i] * kPanel + half * kLanes;
                            store(at, expand(of, part, b, h + (row + same[i]) * stride, load(at)));
                        }
        }
    }
};

}  // namespace kvl
