// Sixteen lanes in plain C++: the variant of every machine without its own, and the model of what the others do.
#pragma once

#include <algorithm>
#include <cmath>

#include "layout.hpp"

namespace kvl {

constexpr const char* kIsaName = "portable";
constexpr int kRowsOnce = 2;      // rows of one pass over a panel when the whole step fits in it
constexpr int kRowsMany = 2;      // rows of a pass when there are several
constexpr int kRowsPlain = 2;     // of any pass, with weights that have no groups
constexpr int kAttentionRows = 4; // queries that share each load of a key tile
constexpr bool kUnrollsRows = false;  // in the softmax of attention: here it gains nothing, and takes long to compile
constexpr int kAttentionGroups = 1;  // of a task: a chunk is read for all of them
constexpr int kTilesOnce = 1;     // loads of keys, or of values, that share those of a query's factors
constexpr int kByteZero = 0;      // what is subtracted from an int8 weight's byte by the caller: dot_weights does it here
constexpr int kQuadsUnrolled = 1;  // loops inside loops: unrolled they take minutes to compile

struct F32 {
    float lane[kLanes];
};
struct I32 {
    int32_t lane[kLanes];
};

template <class Op>
inline F32 each(Op op) {
    F32 result;
    for (int i = 0; i < kLanes; i++) result.lane[i] = op(i);
    return result;
}

inline F32 splat(float value) {
    return each([&](int) { return value; });
}
inline F32 load(const float* from) {
    return each([&](int i) { return from[i]; });
}
inline F32 load_fp16(const uint16_t* from) {
    return each([&](int i) { return fp16_to_float(from[i]); });
}
inline F32 load_bf16(const uint16_t* from) {
    return each([&](int i) { return bf16_to_float(from[i]); });
}
inline void store(float* to, F32 a) {
    for (int i = 0; i < kLanes; i++) to[i] = a.lane[i];
}
inline void store_bf16(uint16_t* to, F32 a) {
    for (int i = 0; i < kLanes; i++) to[i] = float_to_bf16(a.lane[i]);
}
inline F32 add(F32 a, F32 b) {
    return each([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline F32 sub(F32 a, F32 b) {
    return each([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline F32 mul(F32 a, F32 b) {
    return each([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline F32 div(F32 a, F32 b) {
    return each([&](int i) { return a.lane[i] / b.lane[i]; });
}
inline F32 fma(F32 a, F32 b, F32 c) {
    return each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
}
inline F32 max(F32 a, F32 b) {
    return each([&](int i) { return std::max(a.lane[i], b.lane[i]); });
}
inline F32 min(F32 a, F32 b) {
    return each([&](int i) { return std::min(a.lane[i], b.lane[i]); });
}
inline F32 abs(F32 a) {
    return each([&](int i) { return std::fabs(a.lane[i]); });
}
inline float sum(F32 a) {
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) a.lane[i] += a.lane[i + half];
    return a.lane[0];
}
inline float largest(F32 a) { return *std::max_element(a.lane, a.lane + kLanes); }

// Lanes below `count` of a, `other` in the rest. count may be negative or above kLanes.
inline F32 first_lanes(F32 a, int count, float other) {
    return each([&](int i) { return i < count ? a.lane[i] : other; });
}

// 2 to the power of an integer-valued a, times b.
inline F32 scale_by_power(F32 b, F32 a) {
    return each([&](int i) { return b.lane[i] * bits_to_float(uint32_t(int32_t(a.lane[i]) + 127) << 23); });
}
inline F32 round_even(F32 a) {
    return each([&](int i) { return std::nearbyint(a.lane[i]); });
}
// a - floor(a); 2^floor(a) times b in [1, 2], 0 where that is below normal floats. a <= 0.
inline F32 fraction(F32 a) {
    return each([&](int i) { return a.lane[i] - std::floor(a.lane[i]); });
}
inline F32 scale_by_floor(F32 b, F32 a) {
    return each([&](int i) { return a.lane[i] < -126.0f ? 0.0f : std::ldexp(b.lane[i], int(std::floor(a.lane[i]))); });
}
// Of each row, in row m's lane.
inline F32 sums_of(const F32 (&rows)[kLanes]) {
    return each([&](int m) { return sum(rows[m]); });
}
inline F32 largest_of(const F32 (&rows)[kLanes]) {
    return each([&](int m) { return largest(rows[m]); });
}

inline I32 splat_int(int32_t value) {
    I32 result;
    std::fill(result.lane, result.lane + kLanes, value);
    return result;
}
inline I32 add(I32 a, I32 b) {
    for (int i = 0; i < kLanes; i++) a.lane[i] += b.lane[i];
    return a;
}
inline F32 to_float(I32 a) {
    return each([&](int i) { return float(a.lane[i]); });
}
inline I32 to_int(F32 a) {
    I32 result;
    for (int i = 0; i < kLanes; i++) result.lane[i] = int32_t(std::nearbyint(a.lane[i]));
    return result;
}
inline int32_t sum(I32 a) {
    int32_t total = 0;
    for (int value : a.lane) total += value;
    return total;
}
inline void store_bytes(int8_t* to, I32 a) {
    for (int i = 0; i < kLanes; i++) to[i] = int8_t(a.lane[i]);
}

// Four weights of each of 16 channels.
struct Bytes {
    int8_t of[kLanes * 4];
};
template <class Op>
inline Bytes each_byte(Op op) {
    Bytes result;
    for (int i = 0; i < kLanes * 4; i++) result.of[i] = int8_t(op(i));
    return result;
}
inline Bytes load_bytes(const uint8_t* from) {
    return each_byte([&](int i) { return from[i] - 128; });
}
inline Bytes low_nibbles(const uint8_t* from) {
    return each_byte([&](int i) { return from[i] & 15; });
}
inline Bytes high_nibbles(const uint8_t* from) {
    return each_byte([&](int i) { return from[i] >> 4; });
}

// What a table holds for each low or high nibble.
inline Bytes low_entries(const uint8_t* from, const int8_t (&table)[16]) {
    return each_byte([&](int i) { return table[from[i] & 15]; });
}
inline Bytes high_entries(const uint8_t* from, const int8_t (&table)[16]) {
    return each_byte([&](int i) { return table[from[i] >> 4]; });
}

// Weights below 16 with the bits of `mask` of a plane, which lie `shift` places lower there.
inline Bytes with_bits(Bytes low, const uint8_t* plane, int shift, int mask) {
    return each_byte([&](int i) { return low.of[i] | ((shift < 0 ? plane[i] >> -shift : plane[i] << shift) & mask); });
}

// Four activations (a quad, packed in an int) times 16 channels of weights.
inline I32 dot_weights(I32 acc, Bytes weights, int32_t quad) {
    int8_t x[4];
    std::memcpy(x, &quad, 4);
    for (int i = 0; i < kLanes; i++)
        for (int j = 0; j < 4; j++) acc.lane[i] += x[j] * weights.of[4 * i + j];
    return acc;
}
inline I32 dot_nibbles(I32 acc, Bytes weights, int32_t quad) { return dot_weights(acc, weights, quad); }

// The first and the second of each pair of bf16, as floats.
struct PairHalves {
    F32 first, second;
};
inline PairHalves load_halves(const uint16_t* from) {
    return {each([&](int i) { return bf16_to_float(from[2 * i]); }), each([&](int i) { return bf16_to_float(from[2 * i + 1]); })};
}
inline F32 round_bf16(F32 a) {
    return each([&](int i) { return bf16_to_float(float_to_bf16(a.lane[i])); });
}

// 16 elements to every other place; what is between is not written.
template <class T>
void store_apart(T* to, const T* from) {
    for (int i = 0; i < kLanes; i++) to[2 * i] = from[i];
}

// Adds, in each lane, the product of two pairs of words: the lane's own (bytes in memory) and the broadcast one.
struct Words {
    const int8_t* at;
};
inline Words load_words(const int8_t* from) { return {from}; }
inline I32 dot_words(I32 acc, Words a, int32_t pair) {
    const int32_t even = int16_t(uint32_t(pair) & 0xffff), odd = int16_t(uint32_t(pair) >> 16);
    for (int i = 0; i < kLanes; i++) acc.lane[i] += a.at[2 * i] * even + a.at[2 * i + 1] * odd;
    return acc;
}
inline void store_words(int16_t* to, I32 a) {
    for (int i = 0; i < kLanes; i++) to[i] = int16_t(a.lane[i]);
}

}  // namespace kvl
