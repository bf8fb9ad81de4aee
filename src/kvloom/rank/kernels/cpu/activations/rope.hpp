// Rotary position embedding (RoPE) of one head, or of its first dimensions.
#pragma once

#include "isa/simd.hpp"

namespace kvl {

// Rotates head[dim] in place, elements i and i + dim / 2 together. table: dim / 2 cosines, then as many sines.
inline void rotate(float* head, const float* table, int dim) {
    const int half = dim / 2;
    for (int i = 0; i < half; i += kLanes) {
        const F32 a = load(head + i), b = load(head + half + i);
        const F32 cosine = load(table + i), sine = load(table + half + i);
        store(head + i, sub(mul(a, cosine), mul(b, sine)));
        store(head + half + i, add(mul(b, cosine), mul(a, sine)));
    }
}

}  // namespace kvl
