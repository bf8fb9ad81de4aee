// Selects the vector types of this build (one of simd_*.hpp), and defines functions that use only their operations.
#pragma once

#if defined(__AVX512VNNI__) && defined(__AVX512BF16__) && !defined(KVL_PORTABLE)
#include "isa/simd_avx512.hpp"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(KVL_PORTABLE)
#include "isa/simd_avx2.hpp"
#else
#include "isa/simd_portable.hpp"
#endif

namespace kvl {

constexpr float kLog2E = 1.44269504f;
constexpr float kMasked = -1e30f;  // score of a key that a query must not see

template <class T>
constexpr T min_of(T a, decltype(a) b) {
    return a < b ? a : b;
}
template <class T>
constexpr T max_of(T a, decltype(a) b) {
    return a > b ? a : b;
}

// 2^x, relative error below 3e-7, x clamped to the exponents of normal floats. Taylor polynomial on [-0.5, 0.5].
inline F32 exp2(F32 x) {
    x = min(max(x, splat(-126.0f)), splat(126.0f));
    const F32 whole = round_even(x), part = sub(x, whole);
    F32 p = splat(1.5403530e-4f);
    p = fma(p, part, splat(1.3333558e-3f));
    p = fma(p, part, splat(9.6181291e-3f));
    p = fma(p, part, splat(5.5504109e-2f));
    p = fma(p, part, splat(2.4022651e-1f));
    p = fma(p, part, splat(6.9314718e-1f));
    p = fma(p, part, splat(1.0f));
    return scale_by_power(p, whole);
}

// 2^x for x <= 0, relative error below 4e-6, which is smaller than the error of rounding a probability. 2^0 is exactly
// 1; results below 2^-126 are 0. Minimax polynomial on [0, 1].
inline F32 exp2_share(F32 x) {
    const F32 part = fraction(x);
    F32 p = splat(1.3425155e-2f);
    p = fma(p, part, splat(5.2245375e-2f));
    p = fma(p, part, splat(2.4127856e-1f));
    p = fma(p, part, splat(6.9304514e-1f));
    p = fma(p, part, splat(1.0f));
    return scale_by_floor(p, x);
}

// 1 / (1 + e^-x)
inline F32 sigmoid(F32 x) { return div(splat(1.0f), add(splat(1.0f), exp2(mul(x, splat(-kLog2E))))); }

// x / (1 + e^-x)
inline F32 silu(F32 x) { return div(x, add(splat(1.0f), exp2(mul(x, splat(-kLog2E))))); }

// log(1 + e^x): max(x, 0) + log(1 + u) with u = e^-|x|, where log(1 + u) = 2 atanh(s) with s = u / (2 + u) <= 1/3, by the
// series of atanh. Relative error below 1e-6 from -10 on, and below 4e-6 before, where e^x has such an error, too.
inline F32 softplus(F32 x) {
    const F32 u = exp2(mul(abs(x), splat(-kLog2E))), s = div(u, add(splat(2.0f), u)), z = mul(s, s);
    F32 p = splat(1.0f / 13);
    for (int n = 11; n > 0; n -= 2) p = fma(p, z, splat(1.0f / float(n)));
    return fma(add(s, s), p, max(x, splat(0.0f)));
}

// GELU in its tanh approximation, computed as x * sigmoid(2u) with u = sqrt(2/pi) (x + 0.044715 x^3).
inline F32 gelu_tanh(F32 x) {
    const F32 cube = mul(mul(x, x), x);
    const F32 twice_u = mul(splat(2 * 0.7978845608f), fma(splat(0.044715f), cube, x));
    return div(x, add(splat(1.0f), exp2(mul(twice_u, splat(-kLog2E)))));
}

// GELU by the normal distribution, x Phi(x), computed as max(x, 0) - |x| tail / 2 with tail = erfc(|x| / sqrt 2) by
// Abramowitz and Stegun 7.1.26, whose error is at most 1.5e-7.
inline F32 gelu_erf(F32 x) {
    const F32 size = abs(x), t = div(splat(1.0f), fma(size, splat(0.3275911f * 0.70710678f), splat(1.0f)));
    F32 p = splat(1.061405429f);
    p = fma(p, t, splat(-1.453152027f));
    p = fma(p, t, splat(1.421413741f));
    p = fma(p, t, splat(-0.284496736f));
    p = fma(p, t, splat(0.254829592f));
    const F32 tail = mul(mul(p, t), exp2(mul(mul(x, x), splat(-0.5f * kLog2E))));
    return sub(max(x, splat(0.0f)), mul(mul(size, splat(0.5f)), tail));
}

// cap * tanh(x / cap), with tanh y computed as 1 - 2 / (1 + e^2y).
inline F32 softcap(F32 x, float cap) {
    const F32 power = exp2(mul(x, splat(2 * kLog2E / cap)));
    return mul(splat(cap), sub(splat(1.0f), div(splat(2.0f), add(power, splat(1.0f)))));
}

// exp2 of a scalar, computed by the vector polynomial: a factor has the same bits in scalar and in vector code.
inline float exp2_scalar(float x) {
    alignas(64) float lane[kLanes];
    store(lane, exp2(splat(x)));
    return lane[0];
}

// Lane by lane: `value` if `score` is that of a visible key, 0 if it is masked (kMasked).
inline F32 zero_where_masked(F32 value, F32 score) {
    const F32 visible = max(min(sub(score, splat(kMasked / 2)), splat(1.0f)), splat(0.0f));
    return mul(value, visible);
}

inline void prefetch(const void* at) { __builtin_prefetch(at, 0, 2); }

// `is_passing`: what is not read again before the next step bypasses the last-level cache and displaces nothing there.
inline void prefetch_weights(const void* at, bool is_passing) { is_passing ? __builtin_prefetch(at, 0, 0) : prefetch(at); }

// Prefetches for writing: requests the cache line exclusively, which invalidates other cores' copies.
inline void prefetch_to_write(void* at) {
#if defined(__x86_64__)
    // as assembly: without -mprfchw compilers emit an ordinary prefetch for the builtin
    asm volatile("prefetchw %0" : : "m"(*static_cast<char*>(at)));
#else
    __builtin_prefetch(at, 1, 2);
#endif
}

}  // namespace kvl
