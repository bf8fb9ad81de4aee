// Writing and reading single numbers of packed weights.
#pragma once

#include <algorithm>

#include "layout.hpp"

namespace kvl {

// Replaces the bits of `mask`, from `shift` on, of a byte.
inline void set_bits(uint8_t& byte, int shift, int mask, int bits) { byte = uint8_t((byte & ~(mask << shift)) | (bits & mask) << shift); }

// Writes the quantised number of weight k of a channel into a group, whose planes begin at `group`, in any format but bf16.
inline void set_number(uint8_t* group, int format, int channel, int k, int number) {
    const int bits = number_bits(format);
    uint8_t* rest = group + plane_bytes(format);
    if (has_bytes(format)) {
        rest[byte_offset(k, channel)] = uint8_t(number);
        return;
    }
    uint8_t& plane = group[plane_offset(format, k, channel)];
    const int shift = plane_shift(format, k);
    if (bits < 4) {
        set_bits(plane, shift, bits == 1 ? 1 : 3, number);
        if (bits == 3) set_bits(group[third_offset(k, channel)], k / 4, 1, number >> 2);
        return;
    }
    set_bits(rest[nibble_offset(k, channel)], k % 8 < 4 ? 0 : 4, 15, number);
    if (bits > 4) set_bits(plane, shift, (1 << (bits - 4)) - 1, number >> 4);
}

// Reads the number that set_number wrote.
inline int number_at(const uint8_t* group, int format, int channel, int k) {
    const int bits = number_bits(format);
    const uint8_t* rest = group + plane_bytes(format);
    if (has_bytes(format)) return rest[byte_offset(k, channel)];
    const int upper = group[plane_offset(format, k, channel)] >> plane_shift(format, k);
    if (bits == 3) return (upper & 3) | (group[third_offset(k, channel)] >> k / 4 & 1) << 2;
    if (bits < 3) return upper & ((1 << bits) - 1);
    const int byte = rest[nibble_offset(k, channel)], nibble = k % 8 < 4 ? byte & 15 : byte >> 4;
    return bits == 4 ? nibble : nibble | (upper & ((1 << (bits - 4)) - 1)) << 4;
}

// The number of the point of a grid that has these sizes; points are in ascending order.
inline int point_with(const GridShape& grid, uint16_t sizes) {
    return int(std::lower_bound(grid.points, grid.points + grid.count() - 1, sizes) - grid.points);
}

// Writes the numbers of a point, whose first is weight k of a block.
inline void set_point(uint8_t* block, int format, int channel, int k, const uint8_t* numbers) {
    const GridShape grid = grid_of(format);
    const int in_group = k % kFileGroup, upper = grid.upper_bits();
    uint8_t* group = group_of(block, format, k);
    int sizes = 0;
    for (int i = 0; i < kPoint; i++) {
        sizes |= (numbers[i] & 3) << 2 * i;
        if (!grid.has_move) set_bits(group[sign_offset(in_group + i, channel)], (in_group + i) / 4, 1, numbers[i] >> 2);
    }
    const int index = point_with(grid, uint16_t(sizes)) | (grid.has_move ? numbers[0] >> 2 << grid.bits : 0);
    group[in_group / kPoint * kPanel + channel] = uint8_t(index);
    if (upper > 0) set_bits(block[upper_offset(format, k, channel)], upper_shift(format, k), (1 << upper) - 1, index >> 8);
}

// Reads a number that set_point wrote.
inline int number_of_point(const uint8_t* block, int format, int channel, int k) {
    const GridShape grid = grid_of(format);
    const int in_group = k % kFileGroup, upper = grid.upper_bits();
    const uint8_t* group = group_of(block, format, k);
    int index = group[in_group / kPoint * kPanel + channel];
    if (upper > 0) index |= (block[upper_offset(format, k, channel)] >> upper_shift(format, k) & ((1 << upper) - 1)) << 8;
    const int size = grid.points[index & (grid.count() - 1)] >> k % kPoint * 2 & 3;
    const int sign = grid.has_move ? index >> grid.bits : group[sign_offset(in_group, channel)] >> in_group / 4 & 1;
    return size | sign << 2;
}

// The value of a quantised number, before scale and minimum.
inline int level_of(int format, int number) {
    if (has_bytes(format)) return number - 128;
    if (has_table(format)) return table_of(format)[number];
    switch (format) {
        case KVL_INT6_K: return number - 32;
        case KVL_INT3_K: return number - 4;
        case KVL_INT2:
        case KVL_INT2_256: return number - 1;
        case KVL_INT1: return 2 * number - 1;
        default: return number;
    }
}

}  // namespace kvl
