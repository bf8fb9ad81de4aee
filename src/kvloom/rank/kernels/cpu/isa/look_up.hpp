// Looking up points of grids on AVX2, in scalar loads: gathers are no faster, on many processors much slower.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#define KVL_HAS_LOOK_UP

namespace kvl {

struct Indices {
    __m256i words;
};

inline Indices indices_of(const uint8_t* low, const uint8_t* upper, int shift, int mask) {
    const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)low));
    if (mask == 0) return {words};
    const __m256i above = _mm256_srli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)upper)), shift);
    return {_mm256_or_si256(words, _mm256_slli_epi16(_mm256_and_si256(above, _mm256_set1_epi16(int16_t(mask))), 8))};
}

// The words of a half of the indices, four in each of two integers.
struct EightIndices {
    EightIndices(Indices of, int half) {
        const __m128i words = half == 0 ? _mm256_castsi256_si128(of.words) : _mm256_extracti128_si256(of.words, 1);
        fours[0] = uint64_t(_mm_cvtsi128_si64(words)), fours[1] = uint64_t(_mm_extract_epi64(words, 1));
    }
    uint64_t operator[](int i) const { return fours[i / 4] >> i % 4 * 16 & 0xffff; }
    uint64_t fours[2];
};

// Points of eight channels: the first four bytes of each, and the others.
struct PointHalves {
    __m256i first, second;
};
inline PointHalves eight_points(const uint64_t* table, EightIndices index) {
    const auto two = [&](int i) {
        const __m128i first = _mm_loadl_epi64((const __m128i*)(table + index[i]));
        return _mm_castsi128_ps(_mm_castpd_si128(_mm_loadh_pd(_mm_castsi128_pd(first), (const double*)(table + index[i + 1]))));
    };
    const __m256 even = _mm256_insertf128_ps(_mm256_castps128_ps256(two(0)), two(4), 1);
    const __m256 odd = _mm256_insertf128_ps(_mm256_castps128_ps256(two(2)), two(6), 1);
    return {_mm256_castps_si256(_mm256_shuffle_ps(even, odd, 0x88)), _mm256_castps_si256(_mm256_shuffle_ps(even, odd, 0xdd))};
}

// Writes the words of 32 indices, as indices_of has them, in the order of channels.
inline void put_indices(uint16_t* to, const uint8_t* low, const uint8_t* upper, int shift, int mask) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i*)low), moved = _mm256_srli_epi16(_mm256_loadu_si256((const __m256i*)upper), shift);
    const __m256i above = _mm256_and_si256(moved, _mm256_set1_epi8(char(mask)));
    const __m256i even = _mm256_unpacklo_epi8(bytes, above), odd = _mm256_unpackhi_epi8(bytes, above);
    _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(even));
    _mm_storeu_si128((__m128i*)(to + 8), _mm256_castsi256_si128(odd));
    _mm_storeu_si128((__m128i*)(to + 16), _mm256_extracti128_si256(even, 1));
    _mm_storeu_si128((__m128i*)(to + 24), _mm256_extracti128_si256(odd, 1));
}

// The points of two channels. Both indices come in one load: the processor loads three numbers a cycle, and each point is one.
template <int MASK, class Index>
inline __m128i two_points(const uint64_t* table, const Index* index) {
    constexpr int kBits = 8 * sizeof(Index);
    std::conditional_t<sizeof(Index) == 1, uint16_t, uint32_t> both;
    std::memcpy(&both, index, sizeof both);
    const __m128d first = _mm_castsi128_pd(_mm_loadl_epi64((const __m128i*)(table + (Index(both) & MASK))));
    return _mm_castpd_si128(_mm_loadh_pd(first, (const double*)(table + (both >> kBits & MASK))));
}

// Products of eight channels, four points of each, with 32 activations: sums over 16 of them. The points of a channel lie 32
// indices, under a mask, apart; they are sizes of up to 64, so sums of four products fit 16 bits. Signs are those of a plane;
// unread where there are none.
struct RunSums {
    __m256i first, second;
};
template <int MASK, bool HAS_SIGNS, class Index>
inline RunSums eight_channels(const uint64_t* table, const Index* index, const uint8_t* signs, const __m256i (&x)[4]) {
    __m256i sign[2];
    if constexpr (HAS_SIGNS) {
        const __m256i quads = _mm256_loadu_si256((const __m256i*)signs), others = _mm256_slli_epi16(quads, 1);
        const __m256i some = _mm256_set1_epi8(0x55);  // below each sign: no activation is multiplied by 0
        sign[0] = _mm256_or_si256(_mm256_unpacklo_epi32(others, quads), some);
        sign[1] = _mm256_or_si256(_mm256_unpackhi_epi32(others, quads), some);
    }
    __m256i words[2][2];  // of a run: channels 0, 1, 4 and 5; 2, 3, 6 and 7
#pragma GCC unroll 4
    for (int p = 0; p < 4; p++, index += 32) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const __m256i low = _mm256_castsi128_si256(two_points<MASK>(table, index + 2 * half));
            const __m256i points = _mm256_inserti128_si256(low, two_points<MASK>(table, index + 2 * half + 4), 1);
            __m256i factors = x[p];
            if constexpr (HAS_SIGNS) factors = _mm256_sign_epi8(factors, _mm256_slli_epi16(sign[half], 6 - 2 * p));
            const __m256i products = _mm256_maddubs_epi16(points, factors);
            words[p / 2][half] = p % 2 == 0 ? products : _mm256_add_epi16(words[p / 2][half], products);
        }
    }
    const auto sums = [](const __m256i (&of)[2]) {
        const __m256i ones = _mm256_set1_epi16(1);
        const __m256 a = _mm256_castsi256_ps(_mm256_madd_epi16(of[0], ones)), b = _mm256_castsi256_ps(_mm256_madd_epi16(of[1], ones));
        return _mm256_add_epi32(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)), _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd)));
    };
    return {sums(words[0]), sums(words[1])};
}

// Of sixteen channels, for each run: the sum of the activations of those points whose indices, words, have bit BIT, times FACTOR.
template <int BIT, int FACTOR>
inline void sums_with_bit(const uint16_t* index, const int8_t* x, __m256i (&sums)[2]) {
    const __m256i eights = _mm256_sad_epu8(_mm256_xor_si256(_mm256_loadu_si256((const __m256i*)x), _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    alignas(32) int64_t of_point[4];
    _mm256_store_si256((__m256i*)of_point, eights);
#pragma GCC unroll 4
    for (int p = 0; p < 4; p++, index += 32) {
        const __m256i has = _mm256_srli_epi16(_mm256_slli_epi16(_mm256_loadu_si256((const __m256i*)index), 15 - BIT), 15);
        const __m256i part = _mm256_mullo_epi16(has, _mm256_set1_epi16(int16_t(FACTOR * (of_point[p] - 8 * 128))));
        sums[p / 2] = p % 2 == 0 ? part : _mm256_add_epi16(sums[p / 2], part);
    }
}

}  // namespace kvl
