// The tile unit of Intel's processors (AMX): detection at compile time and at run time, and shapes of its tiles.
#pragma once

#include "isa/simd.hpp"

#if defined(__AVX512VNNI__) && !defined(KVL_PORTABLE) && defined(__linux__) && __has_include(<amxint8intrin.h>)
#define KVL_HAS_TILES 1
#define KVL_IN_TILES __attribute__((target("amx-tile,amx-int8")))
#define KVL_IN_ALL_TILES __attribute__((target("amx-tile,amx-int8,amx-bf16")))
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvl {

#ifdef KVL_HAS_TILES

// Whether this processor has the unit and the system allows this process to use it. The first call requests that
// permission for the process (Linux, Documentation/arch/x86/xstate.rst).
inline bool has_tiles() {
    static const bool has = [] {
        constexpr unsigned kUnit = 1u << 24, kInt8 = 1u << 25;  // of CPUID 7.0, EDX
        constexpr long kRequest = 0x1023, kTileData = 18;       // ARCH_REQ_XCOMP_PERM
        unsigned a, b, c, d = 0;
        return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kUnit) && (d & kInt8) &&
               syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
    }();
    return has;
}

// Whether has_tiles() and the unit multiplies bf16 too.
inline bool has_bf16_tiles() {
    static const bool has = [] {
        constexpr unsigned kBf16 = 1u << 22;  // of CPUID 7.0, EDX
        unsigned a, b, c, d = 0;
        return has_tiles() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBf16);
    }();
    return has;
}

// Shapes of the eight tiles (Intel SDM, LDTILECFG): rows, and bytes of each.
struct alignas(64) TileConfig {
    KVL_IN_TILES void load() const {
        asm volatile("" ::"r"(this) : "memory");  // compilers do not know that the instruction reads the whole object
        _tile_loadconfig(this);
    }
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t num_rows[16] = {};
};

// Tiles for kernels that keep sums of 1 to 32 rows in tiles: 0 and 1 hold sums of the first 16 rows, 2 and 3 sums of
// the others; 4 and 5 hold the activations of both; 6 and 7 hold weights. With at most 16 rows, 2, 3 and 5 are unused.
struct BlockShapes : TileConfig {
    explicit BlockShapes(int rows) {
        const int first = min_of(rows, kLanes), second = max_of(rows - kLanes, 1);
        const int of_tile[] = {first, first, second, second, first, second, 16, 16};
        for (int tile = 0; tile < 8; tile++) {
            num_rows[tile] = uint8_t(of_tile[tile]);
            row_bytes[tile] = 64;
        }
    }
};

#else

inline bool has_tiles() { return false; }
inline bool has_bf16_tiles() { return false; }

#endif

}  // namespace kvl
