// Looking up points of grids on AVX2, in scalar loads: gathers are no faster, on many processors much slower.
#pragma once

#include <immintrin.h>

#include <cstdint>

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

}  // namespace kvl
