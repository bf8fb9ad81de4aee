// What happens to q, k and v between their projection and attention: optional norm a head, RoPE, into bf16 and the cache.
#pragma once

#include <vector>

#include "quant.hpp"

namespace kvl {

// Rotates head[dim] in place; partners are i and i + dim / 2; `table` holds dim / 2 cosines, then as many sines.
inline void rotate(float* head, const float* table, int dim) {
    const int half = dim / 2;
    for (int i = 0; i < half; i += kLanes) {
        const F32 a = load(head + i), b = load(head + half + i);
        const F32 cosine = load(table + i), sine = load(table + half + i);
        store(head + i, sub(mul(a, cosine), mul(b, sine)));
        store(head + half + i, add(mul(b, cosine), mul(a, sine)));
    }
}

// A query head, times `scale`, to bf16.
inline void store_query(uint16_t* to, const float* head, int dim, float scale) {
    for (int i = 0; i < dim; i += kLanes) store_bf16(to + i, mul(load(head + i), splat(scale)));
}

// A key into column `slot` of its K tile [dim / 2][16][2]: pairs of dims stay together.
inline void store_key(uint16_t* tile, const float* head, int dim, int slot) {
    alignas(64) uint16_t half[kLanes];
    for (int i = 0; i < dim; i += kLanes) {
        store_bf16(half, load(head + i));
        for (int j = 0; j < kLanes; j += 2) std::memcpy(tile + ((i + j) / 2 * kBlockTokens + slot) * 2, half + j, 4);
    }
}

// A value into its V tile [8][dim][2]: neighbouring keys are a pair.
inline void store_value(uint16_t* tile, const float* head, int dim, int slot) {
    alignas(64) uint16_t half[kLanes];
    uint16_t* row = tile + slot / 2 * dim * 2 + slot % 2;
    for (int i = 0; i < dim; i += kLanes) {
        store_bf16(half, load(head + i));
        for (int j = 0; j < kLanes; j++) row[(i + j) * 2] = half[j];
    }
}

}  // namespace kvl
