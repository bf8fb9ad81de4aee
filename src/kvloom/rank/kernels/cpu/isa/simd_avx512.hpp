// Vectors of 16 lanes on AVX-512 with VNNI and BF16: one register each. Functions and constants as in
// simd_portable.hpp.
#pragma once

#include <immintrin.h>

#include "isa/look_up.hpp"
#include "layout.hpp"

namespace kvl {

constexpr const char* kIsaName = "avx512";
// 16 integer and 16 float sums do not fit the registers: the float sums are spilled once per group, which costs less
// than a second pass
constexpr int kRowsOnce = 8;
constexpr int kRowsMany = 6;       // 12 integer sums, 12 float sums, weights and a broadcast fit 32 registers
constexpr int kRowsPlain = 12;     // 24 sums, and both halves of a pair of weights
constexpr int kAttentionRows = 6;  // 6 queries x 4 registers of values
constexpr bool kUnrollsRows = false;  // it would gain 1 % of a step and double the time to compile
// a chunk's keys and values and the results of these groups fit the first-level cache
constexpr int kAttentionGroups = 3;
constexpr int kTilesOnce = 4;      // 24 sums with 6 queries
// vpdpbusd reads unsigned bytes: the caller starts sums at -128 * (sum of activations)
constexpr int kByteZero = 128;
constexpr bool kRaisesTables = false;  // all are, by kByteZero
constexpr int kQuadsUnrolled = 8;  // so that planes are shifted by constants
constexpr int kFewQuads = 1;

struct F32 {
    __m512 v;
};
struct I32 {
    __m512i v;
};
struct Bytes {
    __m512i v;
};
struct Pairs {
    __m512i v;
};
struct PairHalves {
    F32 first, second;
};
struct Words {
    __m512i v;
};

inline F32 splat(float value) { return {_mm512_set1_ps(value)}; }
inline F32 load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline F32 load_fp16(const uint16_t* from) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from))}; }
inline F32 load_bf16(const uint16_t* from) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline void store(float* to, F32 a) { _mm512_storeu_ps(to, a.v); }
inline void store_bf16(uint16_t* to, F32 a) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(a.v)); }
inline void store_bf16(uint16_t* to, F32 a, F32 b) { _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v)); }
inline F32 add(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32 sub(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32 mul(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32 div(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32 abs(F32 a) { return {_mm512_abs_ps(a.v)}; }
inline float sum(F32 a) { return _mm512_reduce_add_ps(a.v); }
inline float largest(F32 a) { return _mm512_reduce_max_ps(a.v); }

// Reduces each of 16 rows to one number, in lane m of the result for row m. `join` combines lanes that are 8 apart,
// then 4, 2 and 1: the order in which `sum` adds.
template <class Join>
inline F32 across(const F32 (&rows)[kLanes], Join join) {
    __m512 halves[8], quarters[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)  // of rows i, i + 8
        halves[i] = join(_mm512_shuffle_f32x4(rows[i].v, rows[i + 8].v, 0x44), _mm512_shuffle_f32x4(rows[i].v, rows[i + 8].v, 0xee));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)  // of rows i, i + 8, i + 4, i + 12
        quarters[i] = join(_mm512_shuffle_f32x4(halves[i], halves[i + 4], 0x88), _mm512_shuffle_f32x4(halves[i], halves[i + 4], 0xdd));
    const __m512 even = join(_mm512_shuffle_ps(quarters[0], quarters[2], 0x44), _mm512_shuffle_ps(quarters[0], quarters[2], 0xee));
    const __m512 odd = join(_mm512_shuffle_ps(quarters[1], quarters[3], 0x44), _mm512_shuffle_ps(quarters[1], quarters[3], 0xee));
    // in each quarter: rows 0, 2, 1, 3
    const __m512 all = join(_mm512_shuffle_ps(even, odd, 0x88), _mm512_shuffle_ps(even, odd, 0xdd));
    return {_mm512_permutexvar_ps(_mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15), all)};
}
inline F32 sums_of(const F32 (&rows)[kLanes]) {
    return across(rows, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
}
inline F32 largest_of(const F32 (&rows)[kLanes]) {
    return across(rows, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); });
}
inline F32 first_lanes(F32 a, int count, float other) {
    const __mmask16 kept = count >= kLanes ? 0xffff : count <= 0 ? 0 : __mmask16((1u << count) - 1);
    return {_mm512_mask_mov_ps(_mm512_set1_ps(other), kept, a.v)};
}
inline F32 scale_by_power(F32 b, F32 a) { return {_mm512_scalef_ps(b.v, a.v)}; }
inline F32 fraction(F32 a) { return {_mm512_reduce_ps(a.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; }
inline F32 scale_by_floor(F32 b, F32 a) { return {_mm512_scalef_ps(b.v, a.v)}; }
inline F32 round_even(F32 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

inline I32 splat_int(int32_t value) { return {_mm512_set1_epi32(value)}; }
inline I32 add(I32 a, I32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline F32 to_float(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I32 to_int(F32 a) { return {_mm512_cvtps_epi32(a.v)}; }
inline int32_t sum(I32 a) { return _mm512_reduce_add_epi32(a.v); }
inline void store_bytes(int8_t* to, I32 a) { _mm_storeu_si128((__m128i*)to, _mm512_cvtsepi32_epi8(a.v)); }

inline Bytes load_bytes(const uint8_t* from) { return {_mm512_loadu_si512(from)}; }
inline Bytes low_nibbles(const uint8_t* from) {
    return {_mm512_and_si512(_mm512_loadu_si512(from), _mm512_set1_epi8(15))};
}
inline Bytes high_nibbles(const uint8_t* from) {
    return {_mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(from), 4), _mm512_set1_epi8(15))};
}
inline Bytes two_bits(const uint8_t* from, int shift) {
    return {_mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(from), unsigned(shift)), _mm512_set1_epi8(3))};
}
inline Bytes one_bit(const uint8_t* from, int bit) {
    const __m512i bits = _mm512_loadu_si512(from);
    const __m512i moved = bit == 0 ? _mm512_slli_epi16(bits, 1) : _mm512_srli_epi16(bits, unsigned(bit - 1));
    return {_mm512_and_si512(moved, _mm512_set1_epi8(2))};
}
inline void put_bytes(int8_t* to, Bytes bytes) { _mm512_storeu_si512(to, bytes.v); }
inline Bytes get_bytes(const int8_t* from) { return {_mm512_loadu_si512(from)}; }
inline Bytes entries(Bytes numbers, const Table& table) {
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_xor_si128(_mm_loadu_si128((const __m128i*)table), _mm_set1_epi8(-128)));
    return {_mm512_shuffle_epi8(bytes, numbers.v)};
}
inline Bytes joined(__m256i lo, __m256i hi) { return {_mm512_inserti64x4(_mm512_castsi256_si512(lo), hi, 1)}; }
struct BytesPair {
    Bytes first, second;
};
inline BytesPair points(const uint64_t* table, Indices index) {
    const PointHalves lo = eight_points(table, {index, 0}), hi = eight_points(table, {index, 1});
    return {joined(lo.first, hi.first), joined(lo.second, hi.second)};
}
inline I32 ints_of(__m256i first, __m256i second) { return {_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1)}; }
inline F32 small_floats(const int8_t* from) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)))};
}
inline Bytes with_bits(Bytes low, const uint8_t* plane, int shift, int mask) {
    const __m512i bits = _mm512_loadu_si512(plane);
    const __m512i moved = shift < 0 ? _mm512_srli_epi16(bits, unsigned(-shift)) : _mm512_slli_epi16(bits, unsigned(shift));
    return {_mm512_or_si512(low.v, _mm512_and_si512(moved, _mm512_set1_epi8(char(mask))))};
}
// Written as assembly: for the intrinsics GCC copies each sum twice per loop iteration, which costs more than the
// products.
inline I32 dot_weights(I32 acc, Bytes weights, int32_t quad) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(weights.v), "v"(_mm512_set1_epi32(quad)));
    return acc;
}
inline I32 dot_nibbles(I32 acc, Bytes weights, int32_t quad) { return dot_weights(acc, weights, quad); }
using Few = I32;
inline Few begin_few(I32 acc) { return acc; }
inline I32 end_few(I32, Few few) { return few; }

#define KVL_HAS_PAIRS 1
inline Pairs load_pairs(const uint16_t* from) { return {_mm512_loadu_si512(from)}; }
inline F32 dot_pairs(F32 acc, Pairs a, int32_t pair) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(acc.v) : "v"(a.v), "v"(_mm512_set1_epi32(pair)));
    return acc;
}

// The first and the second elements of 16 pairs of bf16, widened to floats.
inline PairHalves load_halves(const uint16_t* from) {
    const __m512i pairs = _mm512_loadu_si512(from);
    const __m512i second = _mm512_and_si512(pairs, _mm512_set1_epi32(int32_t(0xffff0000u)));
    return {{_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))}, {_mm512_castsi512_ps(second)}};
}
inline F32 round_bf16(F32 a) {
    const __m512i wide = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(a.v));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}

// Stores 16 elements to to[0], to[2], to[4], ...; the elements between are not written.
inline void store_apart(uint16_t* to, const uint16_t* from) {
    _mm512_mask_storeu_epi16(to, 0x55555555, _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)));
}
inline void store_apart(int8_t* to, const int8_t* from) {
    _mm256_mask_storeu_epi8(to, 0x55555555, _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)from)));
}

inline Words load_words(const int8_t* from) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from))}; }
inline I32 dot_words(I32 acc, Words a, int32_t pair) {
    asm("vpdpwssd %2, %1, %0" : "+v"(acc.v) : "v"(a.v), "v"(_mm512_set1_epi32(pair)));
    return acc;
}
inline void store_words(int16_t* to, I32 a) { _mm256_storeu_si256((__m256i*)to, _mm512_cvtsepi32_epi16(a.v)); }

}  // namespace kvl
