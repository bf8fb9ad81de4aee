// Copying bytes of blocks: for saves, with stores that may bypass the caches; for loads, with prefetching.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace ems {

constexpr size_t kLine = 64;

#ifdef __x86_64__
constexpr bool kHasLines = true;       // whether this processor has the copies of cache lines below
constexpr size_t kAhead = 16 * kLine;  // prefetch distance: the source may be in another core's cache

// Copies whole cache lines to `target`, bypassing the caches, and at the same time to `kept`, so that each byte is read
// once. Both must be aligned to cache lines.
inline void copy_lines_sse2(uint8_t* target, uint8_t* kept, const uint8_t* source, size_t size) {
    constexpr size_t kStep = sizeof(__m128i), kSteps = kLine / kStep;
    for (size_t i = 0; i < size; i += kLine) {
        _mm_prefetch(reinterpret_cast<const char*>(source + i) + kAhead, _MM_HINT_T0);
        __m128i words[kSteps];
        for (size_t w = 0; w < kSteps; w++) {
            words[w] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i + w * kStep));
        }
        for (size_t w = 0; w < kSteps; w++) {
            _mm_stream_si128(reinterpret_cast<__m128i*>(target + i + w * kStep), words[w]);
            _mm_store_si128(reinterpret_cast<__m128i*>(kept + i + w * kStep), words[w]);
        }
    }
}

// The same with a whole cache line per register and store.
__attribute__((target("avx512f"))) inline void copy_lines_avx512(uint8_t* target, uint8_t* kept, const uint8_t* source,
                                                                 size_t size) {
    for (size_t i = 0; i < size; i += kLine) {
        _mm_prefetch(reinterpret_cast<const char*>(source + i) + kAhead, _MM_HINT_T0);
        const __m512i line = _mm512_loadu_si512(source + i);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(target + i), line);
        _mm512_store_si512(kept + i, line);
    }
}

inline void copy_lines(uint8_t* target, uint8_t* kept, const uint8_t* source, size_t size) {
    static const bool has_avx512 = __builtin_cpu_supports("avx512f");
    has_avx512 ? copy_lines_avx512(target, kept, source, size) : copy_lines_sse2(target, kept, source, size);
}

// Copies whole cache lines to an aligned target, and meanwhile prefetches as many bytes from `next` on.
inline void move_lines_sse2(uint8_t* target, const uint8_t* source, size_t size, const uint8_t* next) {
    for (size_t i = 0; i < size; i += sizeof(__m128i)) {
        if (i % kLine == 0) {
            _mm_prefetch(reinterpret_cast<const char*>(next) + i, _MM_HINT_T0);
        }
        const __m128i word = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
        _mm_store_si128(reinterpret_cast<__m128i*>(target + i), word);
    }
}

__attribute__((target("avx512f"))) inline void move_lines_avx512(uint8_t* target, const uint8_t* source, size_t size,
                                                                 const uint8_t* next) {
    for (size_t i = 0; i < size; i += kLine) {
        _mm_prefetch(reinterpret_cast<const char*>(next) + i, _MM_HINT_T0);
        _mm512_store_si512(reinterpret_cast<__m512i*>(target + i), _mm512_loadu_si512(source + i));
    }
}

inline void move_lines(uint8_t* target, const uint8_t* source, size_t size, const uint8_t* next) {
    static const bool has_avx512 = __builtin_cpu_supports("avx512f");
    has_avx512 ? move_lines_avx512(target, source, size, next) : move_lines_sse2(target, source, size, next);
}

// Makes stores that bypassed the caches visible before later stores.
inline void finish_copies() { _mm_sfence(); }
#else
constexpr bool kHasLines = false;

inline void copy_lines(uint8_t*, uint8_t*, const uint8_t*, size_t) {}
inline void move_lines(uint8_t*, const uint8_t*, size_t, const uint8_t*) {}
inline void finish_copies() {}
#endif

// Copies data that is already in the caches. next: about as many bytes that will be read next; they are prefetched
// meanwhile, because they may be in another core's cache.
inline void copy_ahead(uint8_t* target, const uint8_t* source, size_t size, const uint8_t* next) {
    constexpr size_t kLeast = 1 << 10;  // for fewer bytes, the incomplete lines at both ends dominate
    if (!kHasLines || size < kLeast) {
        std::memcpy(target, source, size);
        return;
    }
    const size_t before = (kLine - reinterpret_cast<uintptr_t>(target) % kLine) % kLine;
    const size_t lines = (size - before) / kLine * kLine, end = before + lines;
    std::memcpy(target, source, before);
    move_lines(target + before, source + before, lines, next + before);
    std::memcpy(target + end, source + end, size - end);
}

}  // namespace ems
