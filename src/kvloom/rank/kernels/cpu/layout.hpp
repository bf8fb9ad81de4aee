// Layouts of weights and of the KV cache in memory, and the sizes that packing, kernels and tests share.
//
// Weights: panels of 32 output channels. A panel is a sequence of blocks along K; a block holds scales, then one or
// several groups of weights, which a micro-kernel reads one by one. The numbers of a group of 32 k:
//   bytes:   [8 quads of k][32 channels][4 k]; 16 quads in int8 and int8_channel, whose groups have 64 k
//   4 bits:  [4 octets of k][32][4] bytes, low nibble = first quad of the octet, high nibble = second
//   5 bits:  a plane of fifth bits before nibbles: [32][4] bytes, bit q = that of quad q
//   6 bits:  for each 16 k a plane [32][4] of the upper two bits, bits 2q and 2q + 1 = those of its quad q; then nibbles
//   3 bits:  for each 16 k a plane of the lower two bits, as 6 bits have the upper ones; a plane of third bits
//   2 bits:  the two planes alone
//   1 bit:   a plane as that of fifth bits
//   iq1, iq2: [4 points of 8 neighbours][32] indices into a grid (GridShape), their lower eight bits; then, in iq2, a plane
//            of signs as that of fifth bits
// Formats whose scales are fp16, of blocks of one group unless another size is told:
//   int8, int8_32:                  32 scales, value = (byte - 128) * scale
//   int8_min:                       32 scales | 32 minimums, value = (byte - 128) * scale + minimum
//   int4, int5:                     32 scales | 32 minimums, value = number * scale + minimum
//   iq4, fp4:                       32 scales, value = table[number] * scale
//   fp4_16:                         32 scales of the first 16 k | 32 of the others, value = table[number] * scale
//   int2 (64 k), int2_256 (256 k):  32 scales, value = (number - 1) * scale
//   int1 (128 k):                   32 scales, value = (2 * number - 1) * scale
// Formats with super-blocks of 256 k, as GGUF's K types have them: 32 fp16 factors of scales, with minimums then 32 of
// those, then the small integers that are multiplied by them:
//   int4_k, int5_k:  a pair of 6 bits for each group, its scale and its minimum, value = number * scale + minimum
//   int3_k:          a pair for each group, scales of its first 16 k and of the others, 32 too large;
//                    value = (number - 4) * scale
//   int6_k:          [16 runs of 16 k][32] signed bytes, value = (number - 32) * scale
//   int2_k:          [16 runs][32] bytes, scale in the low nibble, minimum in the high one; value as int4_k
//   iq1, iq2, iq3:   [4 pairs of groups, or 8 of runs][32] bytes, the scale of the first in the low nibble, of the second in
//                    the high one; then, in iq1 and iq2, the upper bits of indices (upper_offset);
//                    value = table[number] * (2 * nibble + 1) * unit_of the type * factor
//   Pairs: [8 groups][32] bytes, the lower four bits of the first number in the low nibble, those of the second in the
//   high one; then two planes of 64 bytes with the upper two bits of each (pair_plane, pair_shift).
// Others:
//   bf16:          [16 pairs of k][32][2] bf16
//   int8_channel:  32 float scales before the first group, value = (byte - 128) * scale
// int8 is for weights that are quantised while they are packed; the others but bf16 hold the quantised blocks of files
// without loss (docs/decisions/weights.md). K is padded with zero weights to a multiple of kPad, so kernels need no code
// for a tail along K. Where blocks are longer, K is a multiple of them, as in every file.
//
// KV cache: 16 tokens of one kv head have a K tile [key_dim / 2][16 keys][2] and, elsewhere in memory, a V tile
// [8 pairs of keys][value_dim][2]. A block of the cache is one or several such runs of 16 tokens, of all layers. Both products (scores; weighted values) are thus products of pairs, with one
// key or one dimension in each lane.
//   bf16: bf16 elements
//   int8: 16 fp16 scales, one per token, then the tile's bytes; value = byte * scale, bytes in -127 .. 127
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "abi.h"
#include "grids.hpp"

namespace kvl {

// Reads four bytes as an integer; `from` needs no alignment.
inline int32_t word_at(const void* from) {
    int32_t word;
    std::memcpy(&word, from, 4);
    return word;
}

constexpr int kLanes = 16;        // floats in the widest register; narrower machines use several
// output channels per panel: two vectors, so that each broadcast activation is used by two dot products
constexpr int kPanel = 32;
constexpr int kInt8Group = 64;    // weights that share a scale: perplexity +0.5 %, and 3 % of the bytes
constexpr int kFileGroup = 32;    // the group size of GGUF, so that blocks of its files are held without loss
constexpr int kRun = 16;          // weights of Q6_K that share a scale
constexpr int kSuper = 256;       // weights of its super-blocks, whose scales share a factor
constexpr int kPad = 64;          // every K is padded to a multiple of this
constexpr int kBlockTokens = 16;  // keys of a K tile
// Keys of one attention chunk. Chunks begin at multiples of it, so a query's sums do not depend on how the prompt is
// divided into steps.
constexpr int kChunkKeys = 128;

// Most columns of the format with one scale per channel: its integer sums over all of K stay below 2^31.
constexpr int64_t kMostChannelCols = 1 << 17;

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Values of the 16 nibbles in the formats with a table: IQ4_NL of GGUF; E2M1 numbers, doubled to be integers.
constexpr int8_t kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kFp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
// Values of the numbers of GGUF's IQ1, IQ2 and IQ3: sizes, then the same with the other sign. Those of IQ1
// are eighths of -1, 0 and 1, moved up, then down, by one. Numbers that do not occur have 0.
constexpr int8_t kIq1[16] = {-7, 1, 9, 0, -9, -1, 7, 0};
constexpr int8_t kIq2[16] = {8, 25, 43, 0, -8, -25, -43, 0};
constexpr int8_t kIq3S[16] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};
constexpr int8_t kIq3Xxs[16] = {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62};

using Table = int8_t[16];

// The table of a format that has one.
constexpr const Table& table_of(int format) {
    switch (format) {
        case KVL_IQ1_S:
        case KVL_IQ1_M: return kIq1;
        case KVL_IQ2_XXS:
        case KVL_IQ2_XS:
        case KVL_IQ2_S: return kIq2;
        case KVL_IQ3_S: return kIq3S;
        case KVL_IQ3_XXS: return kIq3Xxs;
        case KVL_IQ4: return kIq4;
        default: return kFp4;
    }
}

// The format whose kernels compute a format: one that differs in its table alone.
constexpr int kernel_of(int format) { return format == KVL_FP4 ? KVL_IQ4 : format; }

// A type of GGUF whose weights are points of a grid, each for eight neighbours; an index has `bits`, and above them, where
// `has_move`, one that says which half of the table the point has. Where it has not, each neighbour has a sign.
constexpr int kPoint = 8;
struct GridShape {
    const uint16_t* points;  // grids.hpp
    int bits;
    bool has_move;
    constexpr int upper_bits() const { return bits + has_move - 8; }
    constexpr int count() const { return 1 << bits; }
};
constexpr GridShape grid_of(int format) {
    switch (format) {
        case KVL_IQ1_S:
        case KVL_IQ1_M: return {kIq1Points, 11, true};
        case KVL_IQ2_XXS: return {kIq2XxsPoints, 8, false};
        case KVL_IQ2_XS: return {kIq2XsPoints, 9, false};
        case KVL_IQ2_S: return {kIq2SPoints, 10, false};
        default: return {};
    }
}
constexpr bool has_grid(int format) { return grid_of(format).bits > 0; }

// What scales that are odd integers are multiplied by, besides their factor.
constexpr float unit_of(int format) { return format == KVL_IQ3_S ? 1.0f : format == KVL_IQ3_XXS ? 0.25f : 0.125f; }
constexpr bool has_odd_scales(int format) { return has_grid(format) || format == KVL_IQ3_S || format == KVL_IQ3_XXS; }

constexpr bool has_table(int format) { return kernel_of(format) == KVL_IQ4 || format == KVL_FP4_16 || has_odd_scales(format); }

// How scales are stored: see above.
enum class Scaling { kNone, kHalves, kPairs, kBytes, kNibbles, kOdd };
constexpr Scaling scaling_of(int format) {
    switch (format) {
        case KVL_BF16:
        case KVL_INT8_CHANNEL: return Scaling::kNone;
        case KVL_INT3_K:
        case KVL_INT4_K:
        case KVL_INT5_K: return Scaling::kPairs;
        case KVL_INT6_K: return Scaling::kBytes;
        case KVL_INT2_K: return Scaling::kNibbles;
        default: return has_odd_scales(format) ? Scaling::kOdd : Scaling::kHalves;
    }
}
constexpr bool is_super(int format) { return scaling_of(format) > Scaling::kHalves; }

// Bits of a number.
constexpr int number_bits(int format) {
    switch (format) {
        case KVL_INT8:
        case KVL_INT8_32:
        case KVL_INT8_MIN:
        case KVL_INT8_CHANNEL: return 8;
        case KVL_INT6_K: return 6;
        case KVL_INT5:
        case KVL_INT5_K: return 5;
        case KVL_IQ1_S:
        case KVL_IQ1_M:
        case KVL_IQ2_XXS:
        case KVL_IQ2_XS:
        case KVL_IQ2_S:
        case KVL_INT3_K: return 3;
        case KVL_INT2:
        case KVL_INT2_256:
        case KVL_INT2_K: return 2;
        case KVL_INT1: return 1;
        case KVL_BF16: return 16;
        default: return 4;
    }
}
constexpr bool has_bytes(int format) { return number_bits(format) == 8; }

// Whether each run of 16 has a scale of its own.
constexpr bool has_runs(int format) {
    switch (format) {
        case KVL_INT2_K:
        case KVL_INT3_K:
        case KVL_INT6_K:
        case KVL_FP4_16:
        case KVL_IQ1_M:
        case KVL_IQ2_XS:
        case KVL_IQ2_S: return true;
        default: return false;
    }
}
// Whether planes of two bits are those of runs of 16.
constexpr bool has_pairs_of_bits(int format) { return number_bits(format) == 2 || number_bits(format) == 3 || number_bits(format) == 6; }

// Whether all weights of a channel share one scale, and all activations of a row share one.
constexpr bool is_whole(int format) { return format == KVL_INT8_CHANNEL; }

constexpr bool has_groups(int format) { return format != KVL_BF16 && !is_whole(format); }

constexpr int group_size(int format) { return format == KVL_INT8 || is_whole(format) ? kInt8Group : kFileGroup; }

// Number of consecutive activations for which one sum is stored: a group in KVL_INT8, else kRun, because some formats have a
// scale for each run. (KVL_INT8_CHANNEL stores one sum for the whole row.)
constexpr int run_size(int format) { return format == KVL_INT8 || is_whole(format) ? kInt8Group : kRun; }

// Number of scales, and of sums, of a row of activations with `cols` columns.
constexpr int64_t num_scales(int format, int64_t cols) { return is_whole(format) ? 1 : cols / group_size(format); }
constexpr int64_t num_sums(int format, int64_t cols) { return is_whole(format) ? 1 : cols / run_size(format); }

constexpr bool has_min(int format) {
    return number_bits(format) == 5 || format == KVL_INT4 || format == KVL_INT4_K || format == KVL_INT8_MIN || format == KVL_INT2_K;
}

// Groups of a block.
constexpr int block_groups(int format) {
    switch (format) {
        case KVL_INT1: return 4;
        case KVL_INT2: return 2;
        case KVL_INT2_256: return kSuper / kFileGroup;
        default: return is_super(format) ? kSuper / kFileGroup : 1;
    }
}
constexpr int block_size(int format) { return block_groups(format) * group_size(format); }

// Bytes of the scales of a block, in super-blocks of the factors that come first among them.
constexpr int factor_bytes(int format) { return is_super(format) ? kPanel * (has_min(format) ? 4 : 2) : 0; }
constexpr int kPairBytes = kSuper / kFileGroup * kPanel * 3 / 2;
constexpr int scale_bytes(int format) {
    switch (scaling_of(format)) {
        case Scaling::kNone: return 0;
        case Scaling::kHalves: return has_min(format) || has_runs(format) ? kPanel * 4 : kPanel * 2;
        case Scaling::kPairs: return factor_bytes(format) + kPairBytes;
        case Scaling::kOdd: return factor_bytes(format) + kSuper / (has_runs(format) ? kRun : kFileGroup) / 2 * kPanel;
        default: return factor_bytes(format) + kSuper / kRun * kPanel;
    }
}
// Bytes of a group's planes, and of the whole group. Behind planes lie nibbles, or bytes, or nothing.
constexpr int plane_bytes(int format) {
    const int bits = number_bits(format), in_planes = bits < 4 ? bits : bits < 8 ? bits - 4 : 0;
    return in_planes * kPanel * kFileGroup / 8;
}
constexpr int kIndexBytes = kFileGroup / kPoint * kPanel;  // of indices of a group, without their upper bits
constexpr int group_bytes(int format) {
    if (has_grid(format)) return kIndexBytes + (grid_of(format).has_move ? 0 : kPanel * kFileGroup / 8);
    return number_bits(format) * kPanel * group_size(format) / 8;
}
// Bytes of a block before its groups: scales, and upper bits of indices.
constexpr int front_bytes(int format) {
    return scale_bytes(format) + (has_grid(format) ? kSuper / kPoint * grid_of(format).upper_bits() / 8 * kPanel : 0);
}
constexpr int block_bytes(int format) { return front_bytes(format) + block_groups(format) * group_bytes(format); }

// Bytes of a panel before its first block, and of the whole panel.
constexpr int64_t head_bytes(int format) { return is_whole(format) ? kPanel * 4 : 0; }
constexpr int64_t panel_bytes(int format, int64_t cols) { return head_bytes(format) + cols / block_size(format) * block_bytes(format); }

// Where in a panel the block with column k begins, and in that block the group with it.
template <class Byte>
constexpr Byte* block_of(Byte* panel, int format, int64_t k) {
    return panel + head_bytes(format) + k / block_size(format) * block_bytes(format);
}
template <class Byte>
constexpr Byte* group_of(Byte* block, int format, int64_t k) {
    return block + front_bytes(format) + k % block_size(format) / group_size(format) * group_bytes(format);
}

// Formats of one byte per weight: offset of weight k (within its group) of channel c from the group's first weight.
constexpr int byte_offset(int k, int c) { return (k / 4) * kPanel * 4 + c * 4 + k % 4; }
// Formats of nibbles: offset of the byte with the nibble of that weight; it is the high nibble if k % 8 >= 4.
constexpr int nibble_offset(int k, int c) { return (k / 8) * kPanel * 4 + c * 4 + k % 4; }
// Position of the bits of weight k in the first planes: offset of their byte, and their lowest bit in it. Then the offset
// of the byte with the third bit, whose place in it is k / 4.
constexpr int plane_offset(int format, int k, int c) { return (has_pairs_of_bits(format) ? k / kRun : 0) * kPanel * 4 + c * 4 + k % 4; }
constexpr int plane_shift(int format, int k) { return has_pairs_of_bits(format) ? k % kRun / 4 * 2 : k / 4; }
constexpr int third_offset(int k, int c) { return 2 * kPanel * 4 + c * 4 + k % 4; }
// Pairs of 6 bits: offset of the byte with the upper bits of a group's pair of channel c, and the place in it of those of
// the first number (which: 0) or the second (1).
constexpr int pair_plane(int group, int c) { return kSuper / kFileGroup * kPanel + group / 4 * 2 * kPanel + group % 2 * kPanel + c; }
constexpr int pair_shift(int group, int which) { return group / 2 % 2 * 4 + which * 2; }
// Grids: offset in a group of the byte with the sign of weight k; its place in it is k / 4.
constexpr int sign_offset(int k, int c) { return kIndexBytes + c * 4 + k % 4; }
// Where in a block the upper bits of a channel's index lie, of the point with weight k of the block.
constexpr int upper_offset(int format, int k, int c) {
    return scale_bytes(format) + k / kPoint * grid_of(format).upper_bits() / 8 * kPanel + c;
}
constexpr int upper_shift(int format, int k) { return k / kPoint * grid_of(format).upper_bits() % 8; }
// bf16: offset of that weight in elements, not bytes, from the beginning of its group.
constexpr int bf16_offset(int k, int c) { return (k / 2) * kPanel * 2 + c * 2 + k % 2; }

// Bytes of one K tile or V tile: 16 keys, or values, of `dim` numbers of one kv head.
constexpr int64_t kv_tile_bytes(int kv_format, int dim) {
    return kv_format == KVL_KV_INT8 ? kBlockTokens * (2 + int64_t(dim)) : kBlockTokens * 2 * int64_t(dim);
}

inline float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float bf16_to_float(uint16_t value) { return bits_to_float(uint32_t(value) << 16); }

// Round to nearest, ties to even. NaN stays NaN because the quiet bit survives the rounding of real models' NaNs.
inline uint16_t float_to_bf16(float value) {
    const uint32_t bits = float_to_bits(value);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Exact for every finite fp16, subnormals included, even while subnormal floats are flushed to zero (TinyIsZero).
inline float fp16_to_float(uint16_t value) {
    const uint32_t rest = value & 0x7fff;
    const float magnitude = rest < 0x0400 ? float(rest) * 0x1p-24f : bits_to_float((rest << 13) + (112u << 23));
    return value & 0x8000 ? -magnitude : magnitude;
}

// Nearest fp16 of a finite float below 65504; ties to even.
inline uint16_t float_to_fp16(float value) {
    const uint16_t sign = uint16_t(float_to_bits(value) >> 16 & 0x8000);
    const float magnitude = bits_to_float(float_to_bits(value) & 0x7fffffff);
    if (magnitude < 0x1p-14f) return uint16_t(sign | (float_to_bits(magnitude + 0.5f) - float_to_bits(0.5f)));
    const uint32_t bits = float_to_bits(magnitude) - (112u << 23);
    return uint16_t(sign | ((bits + 0xfff + ((bits >> 13) & 1)) >> 13));
}

}  // namespace kvl
