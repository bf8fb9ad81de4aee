// Vectors of 16 lanes in plain C++, for processors without a variant of their own. It documents the operations: the
// other variants define the same functions.
#pragma once

#include <algorithm>
#include <cmath>

#include "layout.hpp"

namespace kvl {

constexpr const char* kIsaName = "portable";
constexpr int kRowsOnce = 2;      // most rows of a pass over a panel, if one pass covers all rows of the step
constexpr int kRowsMany = 2;      // most rows of a pass, if the step needs several
constexpr int kRowsPlain = 2;     // most rows of any pass in formats without groups
constexpr int kAttentionRows = 4; // query rows of a group: they share each load of a key or value tile
// whether the softmax of attention is compiled for each number of rows: no gain here, and it takes long to compile
constexpr bool kUnrollsRows = false;
constexpr int kAttentionGroups = 1;  // most groups of query rows in a task: a chunk is read once for all of them
constexpr int kTilesOnce = 1;     // key tiles, or vectors of values, that share each load of a query's factors
// offset of an int8 weight's byte that the caller must subtract from sums; none: load_bytes subtracts 128 itself
constexpr int kByteZero = 0;
constexpr bool kRaisesTables = false;  // whether products want bytes that are not negative (raise_of)
// quads of nibbles whose loop is unrolled; not here, where each operation is a loop: it would compile for minutes
constexpr int kQuadsUnrolled = 1;
constexpr int kFewQuads = 1;      // most quads whose products are added up as Few

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

// The first `count` lanes of a; `other` in the remaining lanes. count may be negative or above kLanes.
inline F32 first_lanes(F32 a, int count, float other) {
    return each([&](int i) { return i < count ? a.lane[i] : other; });
}

// b * 2^a for integer-valued a.
inline F32 scale_by_power(F32 b, F32 a) {
    return each([&](int i) { return b.lane[i] * bits_to_float(uint32_t(int32_t(a.lane[i]) + 127) << 23); });
}
inline F32 round_even(F32 a) {
    return each([&](int i) { return std::nearbyint(a.lane[i]); });
}
// fraction: a - floor(a). scale_by_floor: b * 2^floor(a) for b in [1, 2]; 0 if that is below the normal floats. a <= 0.
inline F32 fraction(F32 a) {
    return each([&](int i) { return a.lane[i] - std::floor(a.lane[i]); });
}
inline F32 scale_by_floor(F32 b, F32 a) {
    return each([&](int i) { return a.lane[i] < -126.0f ? 0.0f : std::ldexp(b.lane[i], int(std::floor(a.lane[i]))); });
}
// Lane m of the result is the sum (the largest lane) of rows[m].
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

// Two bits of each of 64 bytes, from bit `shift` on.
inline Bytes two_bits(const uint8_t* from, int shift) {
    return each_byte([&](int i) { return from[i] >> shift & 3; });
}

// One bit of each of 64 bytes, doubled: 0 or 2.
inline Bytes one_bit(const uint8_t* from, int bit) {
    return each_byte([&](int i) { return (from[i] >> bit & 1) * 2; });
}
inline void put_bytes(int8_t* to, Bytes bytes) { std::memcpy(to, bytes.of, sizeof bytes.of); }
inline Bytes get_bytes(const int8_t* from) {
    return each_byte([&](int i) { return from[i]; });
}

// The table's entries for 64 numbers below 16.
inline Bytes entries(Bytes numbers, const Table& table) {
    return each_byte([&](int i) { return table[numbers.of[i]]; });
}

// Indices of 16 channels into a table of points: a byte of each at `low`, above it the bits of the byte at `upper` under
// `mask`, from bit `shift` on; mask 0 = none.
struct Indices {
    uint16_t of[kLanes];
};
inline Indices indices_of(const uint8_t* low, const uint8_t* upper, int shift, int mask) {
    Indices result;
    for (int i = 0; i < kLanes; i++) result.of[i] = uint16_t(low[i] | (mask == 0 ? 0 : upper[i] >> shift & mask) << 8);
    return result;
}
// Points of 16 channels, of eight bytes: the first four of each, and the others.
struct BytesPair {
    Bytes first, second;
};
inline BytesPair points(const uint64_t* table, Indices index) {
    BytesPair result;
    for (int i = 0; i < kLanes; i++) {
        const uint64_t point = table[index.of[i]];
        const uint32_t first = uint32_t(point), second = uint32_t(point >> 32);
        std::memcpy(result.first.of + 4 * i, &first, 4);
        std::memcpy(result.second.of + 4 * i, &second, 4);
    }
    return result;
}

// 16 small integers as floats.
inline F32 small_floats(const int8_t* from) {
    return each([&](int i) { return float(from[i]); });
}

// Adds upper bits to weights: the bits of a plane, shifted left by `shift` (right if negative), under `mask`.
inline Bytes with_bits(Bytes low, const uint8_t* plane, int shift, int mask) {
    return each_byte([&](int i) { return low.of[i] | ((shift < 0 ? plane[i] >> -shift : plane[i] << shift) & mask); });
}

// Adds to each of 16 channels the dot product of its four weights with four activations (`quad`, int8 packed in an
// int).
inline I32 dot_weights(I32 acc, Bytes weights, int32_t quad) {
    int8_t x[4];
    std::memcpy(x, &quad, 4);
    for (int i = 0; i < kLanes; i++)
        for (int j = 0; j < 4; j++) acc.lane[i] += x[j] * weights.of[4 * i + j];
    return acc;
}
inline I32 dot_nibbles(I32 acc, Bytes weights, int32_t quad) { return dot_weights(acc, weights, quad); }

// Sums of a few quads, which may have fewer bits than I32: begin_few, then dot_weights or dot_nibbles for each quad, then
// end_few with the same `acc`, which adds them to it.
using Few = I32;
inline Few begin_few(I32 acc) { return acc; }
inline I32 end_few(I32, Few few) { return few; }

// The first and the second elements of 16 pairs of bf16, widened to floats.
struct PairHalves {
    F32 first, second;
};
inline PairHalves load_halves(const uint16_t* from) {
    return {each([&](int i) { return bf16_to_float(from[2 * i]); }), each([&](int i) { return bf16_to_float(from[2 * i + 1]); })};
}
inline F32 round_bf16(F32 a) {
    return each([&](int i) { return bf16_to_float(float_to_bf16(a.lane[i])); });
}

// Stores 16 elements to to[0], to[2], to[4], ...; the elements between are not written.
template <class T>
void store_apart(T* to, const T* from) {
    for (int i = 0; i < kLanes; i++) to[2 * i] = from[i];
}

// dot_words adds to each lane the dot product of two pairs of 16-bit words: the lane's own, widened from int8 in
// memory, and `pair`, which all lanes share.
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
