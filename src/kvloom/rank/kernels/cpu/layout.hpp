// Layouts of weights and of the KV cache in memory, and the sizes that packing, kernels and tests share.
//
// Weights: panels of 32 output channels. A panel is a sequence of groups along K; a group is contiguous and holds the
// weights and scales that a micro-kernel reads in one iteration:
//   int8:     32 fp16 scales | [16 quads of k][32 channels][4 k] bytes, value = (byte - 128) * scale    (64 k a group)
//   int8_32:  the same with 8 quads                                                               (from here on 32 k)
//   int8_min: 32 fp16 scales | 32 fp16 minimums | 8 quads of bytes, value = (byte - 128) * scale + minimum
//   int4:     32 fp16 scales | 32 fp16 minimums | [4 octets of k][32][4] bytes, low nibble = first quad of
//             the octet, high nibble = second; value = nibble * scale + minimum
//   int5:     as int4, a plane of fifth bits before the nibbles: [32][4] bytes, bit q = that of quad q
//   int6:     32 fp16 scales of the first 16 k | 32 of the others | for each 16 k a plane [32][4] of the upper two bits,
//             bits 2q and 2q + 1 = those of its quad q | nibbles as int4; value = (number - 32) * scale
//   iq4, fp4, table4: 32 fp16 scales | nibbles as int4; value = table[nibble] * scale
//   fp4_16:   32 fp16 scales of the first 16 k | 32 of the others | nibbles as int4
//   int3, table3: scales as fp4_16 | for each 16 k a plane of the lower two bits, as int6 has the upper ones | a plane of
//             third bits, as int5 has fifth ones; value = table[number] * scale
//   int2:     32 fp16 factors | for each 16 k 32 bytes: scale in the low nibble, minimum in the high one | the two planes
//             of int3; value = number * scale * first factor + minimum * second factor. A pair of groups shares its
//             factors: the first group holds the first ones, the second group the second ones
//   bf16:     [16 pairs of k][32][2] bf16
// A format with one scale per channel stores the scales before the first group:
//   int8_channel: 32 float scales, then groups [16 quads of k][32 channels][4 k], value = (byte - 128) * scale
// int8 is for weights that are quantised while they are packed; the others but bf16 hold the quantised blocks of files
// without loss (docs/decisions/weights.md). K is padded with zero weights to a multiple of kPad, so kernels need no code
// for a tail along K.
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
constexpr int kFactorRun = 64;    // weights of int2 that share factors
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
// Values of the numbers of int3, and of GGUF's IQ1, IQ2 and IQ3: sizes, then the same with the other sign. Those of IQ1
// are eighths of -1, 0 and 1, moved up, then down, by one. Numbers that do not occur have 0.
constexpr int8_t kInt3[16] = {-4, -3, -2, -1, 0, 1, 2, 3};
constexpr int8_t kIq1[16] = {-7, 1, 9, 0, -9, -1, 7, 0};
constexpr int8_t kIq2[16] = {8, 25, 43, 0, -8, -25, -43, 0};
constexpr int8_t kIq3S[16] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};
constexpr int8_t kIq3Xxs[16] = {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62};

using Table = int8_t[16];

// The table of a format that has one.
constexpr const Table& table_of(int format) {
    switch (format) {
        case KVL_INT3: return kInt3;
        case KVL_TABLE3_IQ1: return kIq1;
        case KVL_TABLE3_IQ2: return kIq2;
        case KVL_TABLE4_IQ3_S: return kIq3S;
        case KVL_TABLE4_IQ3_XXS: return kIq3Xxs;
        case KVL_IQ4: return kIq4;
        default: return kFp4;
    }
}

// The format whose kernels compute a format: one that differs in its table alone.
constexpr int kernel_of(int format) {
    switch (format) {
        case KVL_TABLE3_IQ1:
        case KVL_TABLE3_IQ2: return KVL_INT3;
        case KVL_TABLE4_IQ3_S:
        case KVL_TABLE4_IQ3_XXS:
        case KVL_FP4: return KVL_IQ4;
        default: return format;
    }
}

constexpr bool has_table(int format) {
    return kernel_of(format) == KVL_INT3 || kernel_of(format) == KVL_IQ4 || format == KVL_FP4_16;
}

// Whether numbers have two or three bits, and lie in planes alone.
constexpr bool is_thin(int format) { return format == KVL_INT2 || kernel_of(format) == KVL_INT3; }

// Whether each run of 16 has a scale of its own.
constexpr bool has_runs(int format) { return is_thin(format) || format == KVL_INT6 || format == KVL_FP4_16; }

// Whether all weights of a channel share one scale, and all activations of a row share one.
constexpr bool is_whole(int format) { return format == KVL_INT8_CHANNEL; }

constexpr bool has_groups(int format) { return format != KVL_BF16 && !is_whole(format); }

constexpr int group_size(int format) { return format == KVL_INT8 || is_whole(format) ? kInt8Group : kFileGroup; }

// Number of consecutive activations for which one sum is stored: a group in KVL_INT8, else kRun, because KVL_INT6 has a
// scale for each run. (KVL_INT8_CHANNEL stores one sum for the whole row.)
constexpr int run_size(int format) { return format == KVL_INT8 || is_whole(format) ? kInt8Group : kRun; }

// Number of scales, and of sums, of a row of activations with `cols` columns.
constexpr int64_t num_scales(int format, int64_t cols) { return is_whole(format) ? 1 : cols / group_size(format); }
constexpr int64_t num_sums(int format, int64_t cols) { return is_whole(format) ? 1 : cols / run_size(format); }

constexpr bool has_min(int format) { return format == KVL_INT4 || format == KVL_INT5 || format == KVL_INT8_MIN || format == KVL_INT2; }
constexpr bool has_bytes(int format) {
    return format == KVL_INT8 || format == KVL_INT8_32 || format == KVL_INT8_MIN || format == KVL_INT8_CHANNEL;
}
constexpr int high_bits(int format) { return format == KVL_INT5 ? 1 : format == KVL_INT6 ? 2 : 0; }
constexpr int plane_bits(int format) { return kernel_of(format) == KVL_INT3 ? 3 : format == KVL_INT2 ? 2 : high_bits(format); }

// Bytes of the parts of a group, which lie in this order: scales and minimums; planes of upper bits; the lower bits, or
// all bits, of each weight. Then bytes of the whole group.
constexpr int scale_bytes(int format) {
    if (format == KVL_BF16 || is_whole(format)) return 0;
    return has_min(format) || has_runs(format) ? kPanel * 4 : kPanel * 2;
}
constexpr int plane_bytes(int format) { return plane_bits(format) * kPanel * kFileGroup / 8; }
constexpr int64_t group_bytes(int format) {
    if (is_thin(format)) return scale_bytes(format) + plane_bytes(format);
    const int rest = format == KVL_BF16 ? kPanel * kFileGroup * 2 : kPanel * group_size(format) / (has_bytes(format) ? 1 : 2);
    return scale_bytes(format) + plane_bytes(format) + rest;
}

// Bytes of a panel before its first group, and of the whole panel.
constexpr int64_t head_bytes(int format) { return is_whole(format) ? kPanel * 4 : 0; }
constexpr int64_t panel_bytes(int format, int64_t cols) { return head_bytes(format) + cols / group_size(format) * group_bytes(format); }

// Formats of one byte per weight: offset of weight k (within its group) of channel c from the group's first weight.
constexpr int byte_offset(int k, int c) { return (k / 4) * kPanel * 4 + c * 4 + k % 4; }
// Formats of nibbles: offset of the byte with the nibble of that weight; it is the high nibble if k % 8 >= 4.
constexpr int nibble_offset(int k, int c) { return (k / 8) * kPanel * 4 + c * 4 + k % 4; }
// Position of the upper bits of weight k, in thin formats of the lower two: offset of their byte from the first plane,
// and their lowest bit in it. Then that of the third bit, behind both planes, whose place in its byte is k / 4.
constexpr int plane_offset(int format, int k, int c) { return (has_runs(format) ? k / kRun : 0) * kPanel * 4 + c * 4 + k % 4; }
constexpr int plane_shift(int format, int k) { return has_runs(format) ? k % kRun / 4 * 2 : k / 4; }
constexpr int third_offset(int k, int c) { return 2 * kPanel * 4 + c * 4 + k % 4; }
// int2: bytes from a group to the one that holds the first factors of its pair, or the second ones.
constexpr int64_t factors_at(int64_t group, int which) { return (which - group % 2) * group_bytes(KVL_INT2); }
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
