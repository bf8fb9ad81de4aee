// A pass over a panel, and what the micro-kernels of all formats with groups share: sums, and quads of weights as bytes.
#pragma once

#include "activations/quant.hpp"
#include "linear/epilogue.hpp"
#include "linear/scales.hpp"

namespace kvl {

// Prefetch distance in the weight stream, in bytes: what arrives during one DRAM latency at 20 GB/s per core. From
// kBusyRows rows on it is longer, because the core is busy with them and the hardware prefetcher then runs too late.
constexpr int kPrefetchBytes = 4096;
constexpr int kPrefetchBytesBusy = 8192, kBusyRows = 5;

// One pass over a panel: rows of `x` from `row` on, `cols` columns each, times `panel`. Sums go to out [rows][kPanel]
// and then through the epilogue, or directly through the epilogue, without `out` (Way::multiply).
struct Pass {
    Activations x{};
    int64_t row = 0, cols = 0;
    const uint8_t* panel = nullptr;
    float* out = nullptr;
    const Epilogue* epilogue = nullptr;  // its rows are counted as those of `x`; null = sums stay in `out`
    int64_t ahead = kPrefetchBytes;      // prefetch distance in bytes; ignored for a single row (ahead_of)
    bool is_passing = false;             // weights bypass the last-level cache (Way::is_passing)

    // The epilogue, its rows counted from the first one of the pass; without one, an epilogue that stores sums in `out`.
    Epilogue end() const {
        Epilogue end;
        if (epilogue != nullptr) return epilogue->from(row);
        end.to = out, end.stride = kPanel;
        return end;
    }
    template <int ROWS>
    int64_t ahead_of() const { return ROWS == 1 ? kPrefetchBytes : ahead; }
    Pass without_epilogue() const { return {x, row, cols, panel, out, nullptr, ahead, is_passing}; }
    void ask(int begin, int end) const {
        for (int r = begin; epilogue != nullptr && r < end; r++) epilogue->ask(row + r);
    }
    // Applies the epilogue to rows [begin, end) of the pass, whose sums are in `out`.
    void finish(int begin, int end) const {
        if (epilogue != nullptr) epilogue->apply(row + begin, end - begin, out + begin * kPanel);
    }
};

// Divides rows into passes: a single one if there are at most `once` rows, else passes of nearly equal size with at
// most `many` rows each.
struct Passes {
    explicit Passes(int64_t rows, int once, int many)
        : rows(rows), count(rows <= once ? 1 : (rows + many - 1) / many) {}
    // `count` passes of nearly equal size; each but the last is a multiple of `block` rows.
    static Passes of_blocks(int64_t rows, int64_t count, int64_t block) {
        Passes passes(rows, 1, 1);
        passes.count = count;
        passes.block = block;
        return passes;
    }
    int64_t begin(int64_t pass) const { return pass == count ? rows : rows * pass / count / block * block; }
    int64_t most() const {  // rows of the largest pass
        int64_t most = 0;
        for (int64_t pass = 0; pass < count; pass++) most = max_of(most, begin(pass + 1) - begin(pass));
        return most;
    }
    int64_t rows, count, block = 1;
};

// A micro-kernel. The table is that of formats that have one.
using Tile = void (*)(const Pass&, const Table&);

// Independent integer sums per row: with few rows a single chain of dot products would be bound by its latency.
constexpr int sums_per_row(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

// Adds the independent integer sums of one row into sums[0], and returns it.
template <int SUMS>
inline I32 total(I32 (&sums)[SUMS]) {
    for (int s = 1; s < SUMS; s++) sums[0] = add(sums[0], sums[s]);
    return sums[0];
}

// Sum of the activations of a group, from the sums of its runs.
template <int FORMAT>
inline int32_t group_sum(const int32_t* runs) {
    int32_t sum = 0;
    for (int r = 0; r < group_size(FORMAT) / run_size(FORMAT); r++) sum += runs[r];
    return sum;
}

// Sums of rows of earlier columns; null = there are none.
template <int ROWS>
inline void load_rows(F32 (&lo)[ROWS], F32 (&hi)[ROWS], const float* from) {
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++) {
        lo[m] = from == nullptr ? splat(0) : load(from + m * kPanel);
        hi[m] = from == nullptr ? splat(0) : load(from + m * kPanel + kLanes);
    }
}

template <int ROWS>
inline void store_rows(const F32 (&lo)[ROWS], const F32 (&hi)[ROWS], float* out) {
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++) {
        store(out + m * kPanel, lo[m]);
        store(out + m * kPanel + kLanes, hi[m]);
    }
}

// The largest size of an entry of a format's table.
constexpr int largest_of(int format) {
    int largest = 0;
    for (const int8_t each : table_of(format)) largest = max_of(largest, each < 0 ? -each : int(each));
    return largest;
}
// What is added to the entries of a table so that none is negative, where a sum of two products then still fits 16 bits.
constexpr int raise_of(int format) {
    return kRaisesTables && has_table(format) && 2 * 2 * largest_of(format) * 127 < 1 << 15 ? largest_of(format) : 0;
}
constexpr bool has_signs(int format) { return has_table(format) && raise_of(format) == 0; }
template <int FORMAT>
struct RaisedTable {
    constexpr RaisedTable() : at{} {
        for (int i = 0; i < 16; i++) at[i] = int8_t(table_of(FORMAT)[i] + raise_of(FORMAT));
    }
    Table at;
};
template <int FORMAT>
inline constexpr RaisedTable<FORMAT> kRaisedTable;

// Entries of the table of a format: of its own, or, where it is one of several with a kernel, of `table`.
template <int FORMAT>
inline Bytes entries_of(Bytes numbers, const Table& table) {
    if constexpr (raise_of(FORMAT) > 0) return entries(numbers, kRaisedTable<FORMAT>.at);
    return entries(numbers, table);
}

// Quad `quad` of a group for 16 channels, whose group begins at `group`: 32 k, numbers of fewer than eight bits.
template <int FORMAT>
inline Bytes quad_of(const uint8_t* group, int quad, const Table& table) {
    constexpr int kBits = number_bits(FORMAT), kRow = kPanel * 4;
    const uint8_t* plane = group + (has_pairs_of_bits(FORMAT) ? quad / 4 * kRow : 0);
    if constexpr (kBits == 1) return one_bit(group, quad);
    if constexpr (kBits == 2) return two_bits(plane, quad % 4 * 2);
    if constexpr (kBits == 3) return with_bits(two_bits(plane, quad % 4 * 2), group + 2 * kRow, 2 - quad, 4);
    if constexpr (kBits >= 4) {
        const uint8_t* nibbles = group + plane_bytes(FORMAT) + quad / 2 * kRow;
        const Bytes low = quad % 2 == 0 ? low_nibbles(nibbles) : high_nibbles(nibbles);
        if constexpr (has_table(FORMAT)) return entries_of<FORMAT>(low, table);
        if constexpr (kBits == 5) return with_bits(low, plane, 4 - quad, 0x10);
        if constexpr (kBits == 6) return with_bits(low, plane, 4 - quad % 4 * 2, 0x30);
        return low;
    }
}

// Offset that quad_of leaves in the weights of a format; it must be subtracted from them, or from sums of products.
constexpr int zero_of(int format) {
    if (has_table(format)) return raise_of(format) > 0 ? raise_of(format) : kByteZero;
    switch (format) {
        case KVL_INT6_K: return 32;
        case KVL_INT3_K: return 4;
        case KVL_INT1:
        case KVL_INT2:
        case KVL_INT2_256: return 1;
        default: return 0;
    }
}

// Quads of a part that are added up as Few: their products with activations, 127 at most, fit 16 bits in pairs.
constexpr int quads_of_few(int format) {
    int weight = (1 << number_bits(format)) - 1, count = 1;
    if (has_table(format)) weight = largest_of(format) + raise_of(format);
    const int quads = min_of(kFewQuads, kFileGroup / 4 / (has_runs(format) ? 2 : 1));
    while (2 * count <= quads && 2 * count * 2 * 127 * weight < 1 << 15) count *= 2;
    return count;
}

// Begins a sum of FEW quads; a single one needs no sum of fewer bits.
template <int FEW>
inline auto begin_sum(I32 acc) {
    if constexpr (FEW == 1) return acc;
    else return begin_few(acc);
}
template <bool IS_SIGNED, class Sum>
inline Sum dot_quad(Sum sum, Bytes weights, int32_t quad) {
    return IS_SIGNED ? dot_weights(sum, weights, quad) : dot_nibbles(sum, weights, quad);
}

}  // namespace kvl
