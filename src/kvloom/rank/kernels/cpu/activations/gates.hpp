// Activation functions that combine the gate and up projections of an MLP.
#pragma once

#include "isa/simd.hpp"

namespace kvl {

// KVL_CLAMPED (gpt-oss): g sigmoid(alpha g) (clip(up, -limit, limit) + 1) with g = min(gate, limit).
inline F32 clamped_gate(F32 gate, F32 up, float limit, float alpha) {
    gate = min(gate, splat(limit));
    up = max(min(up, splat(limit)), splat(-limit));
    const F32 share = div(gate, add(splat(1.0f), exp2(mul(gate, splat(-alpha * kLog2E)))));
    return mul(share, add(up, splat(1.0f)));
}

inline bool is_gate(int epilogue) { return epilogue == KVL_SWIGLU || epilogue == KVL_GEGLU || epilogue == KVL_CLAMPED; }

// Whether an epilogue changes each channel alone, in an MLP without a gate.
inline bool is_pointwise(int epilogue) { return epilogue == KVL_GELU || epilogue == KVL_RELU2; }

inline F32 pointwise(int epilogue, F32 x) {
    if (epilogue == KVL_GELU) return gelu_erf(x);
    x = max(x, splat(0));
    return mul(x, x);
}

inline F32 gated(int epilogue, const kvl_shape& shape, F32 gate, F32 up) {
    if (epilogue == KVL_CLAMPED) return clamped_gate(gate, up, shape.glu_limit, shape.glu_alpha);
    return mul(epilogue == KVL_SWIGLU ? silu(gate) : gelu_tanh(gate), up);
}

// Combines a row of `cols` gates and as many ups into to[cols, padded to kPad with zeros]; returns `to`. For linears
// that hold gate and up in different formats and therefore in separate panels: ups begin at gate + (cols padded to
// kPanel).
inline const float* activate(int epilogue, const kvl_shape& shape, const float* gate, int64_t cols, float* to) {
    const int64_t width = round_up(cols, kPanel), padded = round_up(cols, kPad);
    for (int64_t k = 0; k < width; k += kLanes)
        store(to + k, gated(epilogue, shape, load(gate + k), load(gate + width + k)));
    for (int64_t k = width; k < padded; k += kLanes) store(to + k, splat(0));
    return to;
}

}  // namespace kvl
