// CRC-32 of frames, the same as zlib's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace ems {

struct CrcTable {
    uint32_t of[8][256];
    constexpr CrcTable() : of() {
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t crc = i;
            for (int bit = 0; bit < 8; bit++) {
                crc = (crc >> 1) ^ (crc & 1 ? 0xEDB88320U : 0);
            }
            of[0][i] = crc;
        }
        for (uint32_t i = 0; i < 256; i++) {
            for (int n = 1; n < 8; n++) {
                of[n][i] = (of[n - 1][i] >> 8) ^ of[0][of[n - 1][i] & 0xFF];
            }
        }
    }
};

// Eight bytes at a time, by tables (Kounavis and Berry, 2005). `crc`: inverted CRC of the preceding bytes.
inline uint32_t crc32_by_tables(const uint8_t* data, size_t size, uint32_t crc) {
    static constexpr CrcTable table;
    for (; size >= 8; size -= 8, data += 8) {
        uint64_t word;
        std::memcpy(&word, data, sizeof word);
        word ^= crc;
        crc = 0;
        for (int n = 0; n < 8; n++) {
            crc ^= table.of[7 - n][(word >> (8 * n)) & 0xFF];
        }
    }
    for (; size > 0; size--, data++) {
        crc = (crc >> 8) ^ table.of[0][(crc ^ *data) & 0xFF];
    }
    return crc;
}

#ifdef __x86_64__
constexpr size_t kFold = 64;  // bytes folded at a time

// The same for a multiple of 16 bytes, at least kFold, by carry-less multiplication (Gopal et al., Fast CRC Computation
// Using PCLMULQDQ, Intel 2009, from which the constants are). It needs no tables, which a batch would have displaced
// from the caches.
__attribute__((target("pclmul,sse4.1"))) inline uint32_t crc32_by_products(const uint8_t* data, size_t size,
                                                                           uint32_t crc) {
    const auto load = [](const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); };
    const __m128i by_64 = _mm_set_epi64x(0x01C6E41596, 0x0154442BD4), by_16 = _mm_set_epi64x(0x00CCAA009E, 0x01751997D0);
    const __m128i to_32 = _mm_set_epi64x(0, 0x0163CD6124), poly = _mm_set_epi64x(0x01F7011641, 0x01DB710641);
    const __m128i low_words = _mm_setr_epi32(~0, 0, ~0, 0);
    __m128i parts[4];
    for (int i = 0; i < 4; i++) {
        parts[i] = load(data + 16 * i);
    }
    parts[0] = _mm_xor_si128(parts[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
    for (data += kFold, size -= kFold; size >= kFold; data += kFold, size -= kFold) {
        for (int i = 0; i < 4; i++) {
            const __m128i low = _mm_clmulepi64_si128(parts[i], by_64, 0x00), high = _mm_clmulepi64_si128(parts[i], by_64, 0x11);
            parts[i] = _mm_xor_si128(_mm_xor_si128(low, high), load(data + 16 * i));
        }
    }
    __m128i sum = parts[0];
    for (size_t i = 1, num = 4 + size / 16; i < num; i++) {
        const __m128i next = i < 4 ? parts[i] : load(data + 16 * (i - 4));
        const __m128i low = _mm_clmulepi64_si128(sum, by_16, 0x00), high = _mm_clmulepi64_si128(sum, by_16, 0x11);
        sum = _mm_xor_si128(_mm_xor_si128(low, high), next);
    }
    sum = _mm_xor_si128(_mm_srli_si128(sum, 8), _mm_clmulepi64_si128(sum, by_16, 0x10));  // folds to 64 bits
    const __m128i folded = _mm_clmulepi64_si128(_mm_and_si128(sum, low_words), to_32, 0x00);
    sum = _mm_xor_si128(_mm_srli_si128(sum, 4), folded);
    __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(sum, low_words), poly, 0x10);  // Barrett reduction
    quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low_words), poly, 0x00);
    return static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(sum, quotient), 1));
}
#endif

// CRC-32 of `size` bytes. `crc`: the CRC of the preceding bytes, to continue it.
inline uint32_t crc32(const uint8_t* data, size_t size, uint32_t crc = 0) {
    crc = ~crc;
#ifdef __x86_64__
    static const bool has_products = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
    if (has_products && size >= kFold) {
        const size_t folded = size / 16 * 16;
        crc = crc32_by_products(data, folded, crc);
        data += folded;
        size -= folded;
    }
#endif
    return ~crc32_by_tables(data, size, crc);
}

}  // namespace ems
