// Vectors of 16 lanes on AVX2 with FMA and F16C: two registers each. Functions and constants as in simd_portable.hpp.
#pragma once

#include <immintrin.h>

#include "isa/look_up.hpp"
#include "layout.hpp"

namespace kvl {

constexpr const char* kIsaName = "avx2";
constexpr int kRowsOnce = 2;  // 8 accumulators of 16 registers
constexpr int kRowsMany = 2;
constexpr int kRowsPlain = 2;
constexpr int kAttentionRows = 2;
constexpr bool kUnrollsRows = true;
constexpr int kAttentionGroups = 1;
constexpr int kTilesOnce = 1;
constexpr int kByteZero = 0;  // load_bytes subtracts 128: vpmaddubsw would saturate with bytes above 127
constexpr bool kRaisesTables = true;  // vpmaddubsw takes one factor without a sign
constexpr int kQuadsUnrolled = 8;  // so that planes are shifted by constants
constexpr int kFewQuads = 8;

struct F32 {
    __m256 lo, hi;
};
struct I32 {
    __m256i lo, hi;
};
using Bytes = I32;
struct PairHalves {
    F32 first, second;
};
struct Words {
    __m256i lo, hi;
};

inline __m256 widen_bf16(__m128i half) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16)); }
inline __m128i half_at(const uint16_t* from) { return _mm_loadu_si128((const __m128i*)from); }

inline F32 splat(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline F32 load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline F32 load_fp16(const uint16_t* from) { return {_mm256_cvtph_ps(half_at(from)), _mm256_cvtph_ps(half_at(from + 8))}; }
inline F32 load_bf16(const uint16_t* from) { return {widen_bf16(half_at(from)), widen_bf16(half_at(from + 8))}; }
inline void store(float* to, F32 a) {
    _mm256_storeu_ps(to, a.lo);
    _mm256_storeu_ps(to + 8, a.hi);
}
inline __m256i rounded_bf16(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
}
inline void store_bf16(uint16_t* to, F32 a) {
    const __m256i packed = _mm256_packus_epi32(rounded_bf16(a.lo), rounded_bf16(a.hi));
    _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(packed, 0b11011000));
}
inline F32 add(F32 a, F32 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F32 sub(F32 a, F32 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F32 mul(F32 a, F32 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F32 div(F32 a, F32 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F32 abs(F32 a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
inline float sum(F32 a) {
    alignas(32) float lane[8];
    _mm256_store_ps(lane, _mm256_add_ps(a.lo, a.hi));
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}
inline float largest(F32 a) {
    alignas(32) float lane[8];
    _mm256_store_ps(lane, _mm256_max_ps(a.lo, a.hi));
    float result = lane[0];
    for (float value : lane) result = value > result ? value : result;
    return result;
}
inline F32 first_lanes(F32 a, int count, float other) {
    const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256 keep_lo = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), index));
    const __m256 keep_hi = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count - 8), index));
    const __m256 rest = _mm256_set1_ps(other);
    return {_mm256_blendv_ps(rest, a.lo, keep_lo), _mm256_blendv_ps(rest, a.hi, keep_hi)};
}
inline __m256 power_of_two(__m256 a) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(a), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
inline F32 scale_by_power(F32 b, F32 a) { return mul(b, {power_of_two(a.lo), power_of_two(a.hi)}); }
inline F32 round_even(F32 a) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.lo, kNearest), _mm256_round_ps(a.hi, kNearest)};
}

// fraction: a - floor(a). scale_by_floor: b * 2^floor(a) for b in [1, 2]; 0 if that is below the normal floats. a <= 0.
inline F32 fraction(F32 a) { return sub(a, {_mm256_floor_ps(a.lo), _mm256_floor_ps(a.hi)}); }
inline F32 scale_by_floor(F32 b, F32 a) {
    const __m256 least = _mm256_set1_ps(-126.0f);
    const F32 normal{_mm256_max_ps(_mm256_floor_ps(a.lo), least), _mm256_max_ps(_mm256_floor_ps(a.hi), least)};
    const F32 scaled = scale_by_power(b, normal);
    return {_mm256_and_ps(scaled.lo, _mm256_cmp_ps(a.lo, least, _CMP_GE_OQ)), _mm256_and_ps(scaled.hi, _mm256_cmp_ps(a.hi, least, _CMP_GE_OQ))};
}
inline F32 sums_of(const F32 (&rows)[kLanes]) {
    alignas(64) float sums[kLanes];
    for (int m = 0; m < kLanes; m++) sums[m] = sum(rows[m]);
    return load(sums);
}
inline F32 largest_of(const F32 (&rows)[kLanes]) {
    alignas(64) float peaks[kLanes];
    for (int m = 0; m < kLanes; m++) peaks[m] = largest(rows[m]);
    return load(peaks);
}

inline I32 splat_int(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
inline I32 add(I32 a, I32 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline F32 to_float(I32 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline I32 to_int(F32 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline int32_t sum(I32 a) {
    alignas(32) int32_t lane[8];
    _mm256_store_si256((__m256i*)lane, _mm256_add_epi32(a.lo, a.hi));
    int32_t total = 0;
    for (int32_t value : lane) total += value;
    return total;
}
inline void store_bytes(int8_t* to, I32 a) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0b11011000);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((__m128i*)to, bytes);
}

inline Bytes load_bytes(const uint8_t* from) {
    const __m256i zero = _mm256_set1_epi8(-128);  // converts bytes that are 128 too large to signed bytes
    return {_mm256_xor_si256(_mm256_loadu_si256((const __m256i*)from), zero),
            _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)(from + 32)), zero)};
}
inline Bytes low_nibbles(const uint8_t* from) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(_mm256_loadu_si256((const __m256i*)from), mask),
            _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(from + 32)), mask)};
}
inline Bytes high_nibbles(const uint8_t* from) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(_mm256_srli_epi16(_mm256_loadu_si256((const __m256i*)from), 4), mask),
            _mm256_and_si256(_mm256_srli_epi16(_mm256_loadu_si256((const __m256i*)(from + 32)), 4), mask)};
}

inline __m256i two_bits_half(const uint8_t* from, int shift) {
    const __m256i moved = _mm256_srli_epi16(_mm256_loadu_si256((const __m256i*)from), shift);
    return _mm256_and_si256(moved, _mm256_set1_epi8(3));
}
inline Bytes two_bits(const uint8_t* from, int shift) { return {two_bits_half(from, shift), two_bits_half(from + 32, shift)}; }
inline __m256i one_bit_half(const uint8_t* from, int shift) {
    const __m256i bits = _mm256_loadu_si256((const __m256i*)from);
    const __m256i moved = shift < 0 ? _mm256_slli_epi16(bits, -shift) : _mm256_srli_epi16(bits, shift);
    return _mm256_and_si256(moved, _mm256_set1_epi8(2));
}
inline Bytes one_bit(const uint8_t* from, int bit) { return {one_bit_half(from, bit - 1), one_bit_half(from + 32, bit - 1)}; }
inline void put_bytes(int8_t* to, Bytes bytes) {
    _mm256_storeu_si256((__m256i*)to, bytes.lo);
    _mm256_storeu_si256((__m256i*)(to + 32), bytes.hi);
}
inline Bytes get_bytes(const int8_t* from) {
    return {_mm256_loadu_si256((const __m256i*)from), _mm256_loadu_si256((const __m256i*)(from + 32))};
}
inline Bytes entries(Bytes numbers, const Table& table) {
    const __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
    return {_mm256_shuffle_epi8(bytes, numbers.lo), _mm256_shuffle_epi8(bytes, numbers.hi)};
}
struct BytesPair {
    Bytes first, second;
};
inline BytesPair points(const uint64_t* table, Indices index) {
    const PointHalves lo = eight_points(table, {index, 0}), hi = eight_points(table, {index, 1});
    return {{lo.first, hi.first}, {lo.second, hi.second}};
}
inline I32 ints_of(__m256i first, __m256i second) { return {first, second}; }
inline F32 small_floats(const int8_t* from) {
    const auto eight = [](const int8_t* at) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at))); };
    return {eight(from), eight(from + 8)};
}
inline __m256i with_bits_half(__m256i low, const uint8_t* plane, int shift, int mask) {
    const __m256i bits = _mm256_loadu_si256((const __m256i*)plane);
    const __m256i moved = shift < 0 ? _mm256_srli_epi16(bits, -shift) : _mm256_slli_epi16(bits, shift);
    return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(char(mask))));
}
inline Bytes with_bits(Bytes low, const uint8_t* plane, int shift, int mask) {
    return {with_bits_half(low.lo, plane, shift, mask), with_bits_half(low.hi, plane + 32, shift, mask)};
}

// Two sums of two products a channel. They are added up in 16 bits as long as these suffice (quads_of_few), because the
// processor has half as many units for multiplications as for additions.
struct Few {
    __m256i lo, hi;
};
inline Few begin_few(I32) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I32 end_few(I32 acc, Few few) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(few.lo, ones)), _mm256_add_epi32(acc.hi, _mm256_madd_epi16(few.hi, ones))};
}
// Multiplies |w| by x with the sign of w. Both are at most 127 in size, so sums of two products do not saturate.
inline __m256i signed_pairs(__m256i weights, __m256i x) {
    return _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
}
// Written as assembly: GCC orders additions anew, all products first, which then lie on the stack.
inline __m256i add_words(__m256i acc, __m256i words) {
    asm("vpaddw %1, %0, %0" : "+x"(acc) : "x"(words));
    return acc;
}
inline Few dot_weights(Few few, Bytes weights, int32_t quad) {
    const __m256i x = _mm256_set1_epi32(quad);
    return {add_words(few.lo, signed_pairs(weights.lo, x)), add_words(few.hi, signed_pairs(weights.hi, x))};
}
inline Few dot_nibbles(Few few, Bytes weights, int32_t quad) {
    const __m256i x = _mm256_set1_epi32(quad);
    return {add_words(few.lo, _mm256_maddubs_epi16(weights.lo, x)), add_words(few.hi, _mm256_maddubs_epi16(weights.hi, x))};
}
inline I32 dot_weights(I32 acc, Bytes weights, int32_t quad) { return end_few(acc, dot_weights(begin_few(acc), weights, quad)); }
inline I32 dot_nibbles(I32 acc, Bytes weights, int32_t quad) {
    const __m256i x = _mm256_set1_epi32(quad);
    return end_few(acc, {_mm256_maddubs_epi16(weights.lo, x), _mm256_maddubs_epi16(weights.hi, x)});
}
inline I32 end_few(I32, I32 sums) { return sums; }

inline __m256 first_half(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 second_half(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int32_t(0xffff0000u))));
}
inline PairHalves load_halves(const uint16_t* from) {
    const __m256i lo = _mm256_loadu_si256((const __m256i*)from), hi = _mm256_loadu_si256((const __m256i*)(from + 16));
    return {{first_half(lo), first_half(hi)}, {second_half(lo), second_half(hi)}};
}
inline F32 round_bf16(F32 a) { return {first_half(rounded_bf16(a.lo)), first_half(rounded_bf16(a.hi))}; }

// Stores 16 elements to to[0], to[2], to[4], ...; the elements between are not written.
template <class T>
void store_apart(T* to, const T* from) {
    for (int i = 0; i < kLanes; i++) to[2 * i] = from[i];
}

inline Words load_words(const int8_t* from) {
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from)),
            _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(from + 16)))};
}
inline I32 dot_words(I32 acc, Words a, int32_t pair) {
    const __m256i x = _mm256_set1_epi32(pair);
    return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(a.lo, x)), _mm256_add_epi32(acc.hi, _mm256_madd_epi16(a.hi, x))};
}
inline void store_words(int16_t* to, I32 a) {
    _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0b11011000));
}

}  // namespace kvl
