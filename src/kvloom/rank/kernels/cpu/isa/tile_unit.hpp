// The tile unit of Intel's processors (AMX): whether a build can have it, and whether this machine has.
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

// Whether this processor has the unit and the system lets this process use it (Linux,
// Documentation/arch/x86/xstate.rst).
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

// Whether the unit, where there is one, multiplies bf16 too.
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
        asm volatile("" ::"r"(this) : "memory");  // compilers do not see that all of it is read
        _tile_loadconfig(this);
    }
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t num_rows[16] = {};
};

// Where sums stay in the tiles, for 1 to 32 rows: 0 and 1 sums of the first 16, 2 and 3
// of the others; 4 and 5 their activations; 6 and 7 weights. Where there are 16 at most, 2, 3 and 5 are not used.
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
