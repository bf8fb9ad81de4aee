// Input activations of a linear: RMSNorm or LayerNorm, then quantisation to int8 or conversion to bf16.
#pragma once

#include <cmath>

#include "isa/simd.hpp"

namespace kvl {

// Rows of memory that must follow the last row, of any content: kernels on tiles read a whole tile of rows.
constexpr int kRowsBehind = 12;

// Quantised rows. cols is padded to kPad.
//   bf16:   data = bf16 [rows][cols]; scale and sum unused
//   others: data = int8 [rows][cols], scale float [rows][num_scales], sum (of the int8 values) int32 [rows][num_sums]
struct Activations {
    int8_t* data;
    float* scale;
    int32_t* sum;
};

// Largest magnitude of `count` floats, which need not be a multiple of kLanes.
inline float peak_of(const float* values, int64_t count) {
    float peak = 0;
    for (int64_t k = 0; k < count; k++) peak = max_of(peak, std::fabs(values[k]));
    return peak;
}

// Whether an instruction produces the activations of the linears that follow it.
constexpr bool is_quantising(int kind) {
    return kind == KVL_NORM_QUANT || kind == KVL_QUANT || kind == KVL_ROWS_NORM_QUANT || kind == KVL_ROUTE;
}

// out[k] = x[k] * weight[k] / rms(x). count: elements with padding, which must be zero; `real`: elements without it,
// over which the mean is taken. x and out may be the same.
inline void rms_norm(const float* x, const float* weight, int64_t count, int64_t real, float eps, float* out) {
    F32 squares = splat(0);
    for (int64_t k = 0; k < count; k += kLanes) {
        const F32 value = load(x + k);
        squares = fma(value, value, squares);
    }
    const F32 factor = splat(1.0f / std::sqrt(sum(squares) / float(real) + eps));
    for (int64_t k = 0; k < count; k += kLanes) store(out + k, mul(mul(load(x + k), factor), load(weight + k)));
}

// out[k] = (x[k] - mean) / deviation * weight[k] + bias[k]. count: elements with padding, which must be zero; `real`:
// elements without it, over which the means are taken. x and out may be the same.
inline void layer_norm(const float* x, const float* weight, const float* bias, int64_t count, int64_t real, float eps, float* out) {
    F32 total = splat(0), squares = splat(0);
    for (int64_t k = 0; k < count; k += kLanes) total = add(total, load(x + k));
    const F32 mean = splat(sum(total) / float(real));
    for (int64_t k = 0; k < count; k += kLanes) {
        const F32 value = first_lanes(sub(load(x + k), mean), int(real - k < kLanes ? (real > k ? real - k : 0) : kLanes), 0.0f);
        squares = fma(value, value, squares);
    }
    const F32 factor = splat(1.0f / std::sqrt(sum(squares) / float(real) + eps));
    for (int64_t k = 0; k < count; k += kLanes)
        store(out + k, fma(mul(sub(load(x + k), mean), factor), load(weight + k), load(bias + k)));
}

// Quantises x[count] into row `row` of `to`: int8, one scale per group, which maps the largest magnitude to 127 (0 for
// a group of zeros), and one sum of the int8 values per run.
template <int GROUP, int RUN>
void quantize_row(const Activations& to, int64_t row, const float* x, int64_t count) {
    int8_t* data = to.data + row * count;
    float* scale = to.scale + row * (count / GROUP);
    int32_t* sums = to.sum + row * (count / RUN);
    for (int64_t g = 0; g < count / GROUP; g++, x += GROUP, data += GROUP) {
        F32 peak = splat(0);
        for (int k = 0; k < GROUP; k += kLanes) peak = max(peak, abs(load(x + k)));
        const float top = largest(peak);
        const F32 inverse = splat(top > 0 ? 127.0f / top : 0.0f);
        I32 total = splat_int(0);
        for (int k = 0; k < GROUP; k += kLanes) {
            const I32 value = to_int(mul(load(x + k), inverse));
            total = add(total, value);
            store_bytes(data + k, value);
            if ((k + kLanes) % RUN) continue;
            *sums++ = sum(total);
            total = splat_int(0);
        }
        scale[g] = top / 127.0f;
    }
}

// Quantises x[count] into row `row` of `to`: int8, one scale, which maps the row's largest magnitude to 127 (0 for a
// row of zeros), and one sum of the int8 values.
inline void quantize_whole_row(const Activations& to, int64_t row, const float* x, int64_t count) {
    constexpr int kChains = kPad / kLanes;  // independent maxima: a single chain would be bound by its latency
    int8_t* data = to.data + row * count;
    F32 peaks[kChains];
#pragma GCC unroll 4
    for (int i = 0; i < kChains; i++) peaks[i] = splat(0);
    for (int64_t k = 0; k < count; k += kPad)
#pragma GCC unroll 4
        for (int i = 0; i < kChains; i++) peaks[i] = max(peaks[i], abs(load(x + k + i * kLanes)));
    for (int i = 1; i < kChains; i++) peaks[0] = max(peaks[0], peaks[i]);
    const float top = largest(peaks[0]);
    const F32 inverse = splat(top > 0 ? 127.0f / top : 0.0f);
    I32 total = splat_int(0);
    for (int64_t k = 0; k < count; k += kLanes) {
        const I32 value = to_int(mul(load(x + k), inverse));
        total = add(total, value);
        store_bytes(data + k, value);
    }
    to.scale[row] = top / 127.0f;
    to.sum[row] = sum(total);
}

// Stores float x[count] as row `row` of `to`, in the form that a linear of weight format `format` reads.
inline void store_activations(const Activations& to, int64_t row, const float* x, int64_t count, int format) {
    if (format == KVL_BF16) {
        uint16_t* data = reinterpret_cast<uint16_t*>(to.data) + row * count;
        for (int64_t k = 0; k < count; k += kLanes) store_bf16(data + k, load(x + k));
        return;
    }
    if (is_whole(format)) return quantize_whole_row(to, row, x, count);
    format == KVL_INT8 ? quantize_row<group_size(KVL_INT8), run_size(KVL_INT8)>(to, row, x, count)
                       : quantize_row<kFileGroup, kRun>(to, row, x, count);
}

}  // namespace kvl
