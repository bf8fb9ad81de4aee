// Attention on the tile unit of Intel's processors (AMX): a chunk of keys and up to 16 query rows at a time. The bits are
// those of attention.hpp: integers are exact, and floats are added there in the order of this unit.
#pragma once

#include "attention.hpp"
#include "tiles.hpp"

namespace kvl {

constexpr int kTileQueries = 16;
constexpr int kMaxHeadDim = 256;

#ifdef KVL_HAS_TILES

constexpr int kTileQueriesFrom = 3;  // fewer are sooner done by attention.hpp

inline bool can_attend_in_tiles(int kv_format) { return kv_format == KVL_KV_INT8 ? has_tiles() : has_bf16_tiles(); }

struct TileShape {
    int rows, bytes;
};
struct AttentionShapes : TileConfig {
    AttentionShapes(const TileShape (&tiles)[8]) {
        for (int i = 0; i < 8; i++) {
            num_rows[i] = uint8_t(tiles[i].rows);
            row_bytes[i] = uint16_t(tiles[i].bytes);
        }
    }
};

// A Tiles holds some queries, gives their scores [m][kChunkKeys] with a chunk (behind its last block there may be anything),
// and the weighted sums [m][kDims] of its values from dim `dim` on (fewer where the head ends), of factors [m][kChunkKeys].
// Compilers do not see what tiles are loaded of, so they are told that memory was written before.

// A K tile of the cache holds 32 dims of 16 keys and a V tile 16 dims of 16 keys, as the unit wants them.
struct Bf16Tiles {
    using Factor = uint16_t;
    static constexpr int kDims = 64;

    static float store_probabilities(Factor* to, const float* p, int count, const uint8_t* const*) {
        for (int k = 0; k < count; k += kLanes) store_bf16(to + k, load(p + k));
        return 1.0f;
    }
    // Sums 0 to 3; queries 4, probabilities of a block 5; keys 6, values 7.
    static AttentionShapes shapes(int rows) {
        return {{{rows, 64}, {rows, 64}, {rows, 64}, {rows, 64}, {rows, 64}, {rows, 32}, {16, 64}, {8, 64}}};
    }
    Bf16Tiles(const Query* of, int rows, int head_dim) : head_dim(head_dim) {
        for (int m = 0; m < rows; m++)
            for (int i = 0; i < head_dim; i += kLanes)
                store_bf16(queries + m * head_dim + i, load(of[m].as<Bf16Cache::Factor>() + i));
    }

    KVL_IN_ALL_TILES void score(const Chunk& chunk, float* scores) const {
        constexpr int kStretch = 32, kStretchBytes = kStretch * kBlockTokens * 2, kOnce = 4, kRowBytes = kChunkKeys * 4;
        asm volatile("" ::: "memory");
        for (int b = 0; b < chunk.num_blocks; b += kOnce, scores += kOnce * kBlockTokens) {
            const uint8_t* keys[kOnce];
            for (int i = 0; i < kOnce; i++) keys[i] = chunk.keys[min_of(b + i, chunk.num_blocks - 1)];
            zero_sums();
            for (int dim = 0, at = 0; dim < head_dim; dim += kStretch, at += kStretchBytes) {
                _tile_loadd(4, queries + dim, head_dim * 2);
                _tile_loadd(6, keys[0] + at, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(6, keys[1] + at, 64);
                _tile_dpbf16ps(1, 4, 6);
                _tile_loadd(6, keys[2] + at, 64);
                _tile_dpbf16ps(2, 4, 6);
                _tile_loadd(6, keys[3] + at, 64);
                _tile_dpbf16ps(3, 4, 6);
            }
            store_sums(scores, kRowBytes);
        }
    }
    KVL_IN_ALL_TILES void weigh(const Chunk& chunk, const Factor* factors, int dim, float* sums) const {
        const int stride = head_dim * 4;
        asm volatile("" ::: "memory");
        zero_sums();
        for (int b = 0; b < chunk.num_blocks; b++) {
            const uint8_t* values = chunk.values[b] + dim * 4;
            _tile_loadd(5, factors + b * kBlockTokens, kChunkKeys * 2);
            _tile_loadd(7, values, stride);
            _tile_dpbf16ps(0, 5, 7);
            _tile_loadd(7, values + 64, stride);
            _tile_dpbf16ps(1, 5, 7);
            if (head_dim - dim < kDims) continue;
            _tile_loadd(7, values + 128, stride);
            _tile_dpbf16ps(2, 5, 7);
            _tile_loadd(7, values + 192, stride);
            _tile_dpbf16ps(3, 5, 7);
        }
        store_sums(sums, kDims * 4);
    }

  private:
    KVL_IN_ALL_TILES static void zero_sums() {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    // Side by side, in rows of `stride` bytes.
    KVL_IN_ALL_TILES static void store_sums(float* to, int stride) {
        _tile_stored(0, to, stride);
        _tile_stored(1, to + kLanes, stride);
        _tile_stored(2, to + 2 * kLanes, stride);
        _tile_stored(3, to + 3 * kLanes, stride);
    }

    const int head_dim;
    alignas(64) uint16_t queries[kTileQueries * kMaxHeadDim];
};

// Queries and probabilities are words: their upper bytes, with a sign, and their lower ones, without, are multiplied apart.
// The unit wants quads of dims, or keys, where the cache has pairs.
struct Int8Tiles {
    using Factor = int16_t;  // a row: kChunkKeys upper bytes, then as many lower ones
    static constexpr int kDims = 32, kQuads = 64;  // dims, or keys, of a tile

    static float store_probabilities(Factor* to, const float* p, int count, const uint8_t* const* tiles) {
        alignas(64) int16_t words[kChunkKeys] = {};
        const float scale = Int8Cache::store_probabilities(words, p, count, tiles);
        split(words, int(round_up(count, kQuads)), reinterpret_cast<int8_t*>(to), kChunkKeys);
        return scale;
    }
    // Sums 0 to 3, of upper and lower bytes in turn; upper 4 and lower bytes 5; keys or values 6 and 7.
    static AttentionShapes shapes(int rows) {
        return {{{rows, 64}, {rows, 64}, {rows, 64}, {rows, 64}, {rows, 64}, {rows, 64}, {16, 64}, {16, 64}}};
    }
    Int8Tiles(const Query* of, int rows, int head_dim) : of(of), rows(rows), head_dim(head_dim) {
        for (int m = 0; m < rows; m++) {
            alignas(64) int16_t words[kMaxHeadDim] = {};
            std::memcpy(words, of[m].factors, size_t(head_dim) * 2);
            split(words, int(round_up(head_dim, kQuads)), queries + m * 2 * kMaxHeadDim, kMaxHeadDim);
        }
    }

    KVL_IN_ALL_TILES void score(const Chunk& chunk, float* scores) {
        constexpr int kOnce = 2, kRowBytes = 2 * kMaxHeadDim;
        for (int b = 0; b < chunk.num_blocks; b += kOnce) {
            const uint8_t* keys[kOnce] = {chunk.keys[b], chunk.keys[min_of(b + 1, chunk.num_blocks - 1)]};
            int8_t* const second = quads + kMaxHeadDim * kBlockTokens;
            take_keys(keys[0], quads);
            take_keys(keys[1], second);
            zero_sums();
            for (int dim = 0; dim < head_dim; dim += kQuads) {
                _tile_loadd(4, queries + dim, kRowBytes);
                _tile_loadd(5, queries + kMaxHeadDim + dim, kRowBytes);
                add_products(quads + dim * kBlockTokens, second + dim * kBlockTokens, 64);
            }
            store_sums();
            for (int m = 0; m < rows; m++)
                for (int i = 0; i < kOnce; i++)
                    store(scores + m * kChunkKeys + (b + i) * kBlockTokens, Int8Cache::scores(total(i, m), keys[i], of[m].scale));
        }
    }
    KVL_IN_ALL_TILES void weigh(const Chunk& chunk, const Factor* factors, int dim, float* to) {
        const int8_t* bytes = reinterpret_cast<const int8_t*>(factors);
        if (dim == 0) take_values(chunk);
        zero_sums();
        for (int key = 0; key < chunk.num_keys; key += kQuads) {
            const int8_t* values = quads + key * head_dim + dim * 4;
            _tile_loadd(4, bytes + key, kChunkKeys * 2);
            _tile_loadd(5, bytes + kChunkKeys + key, kChunkKeys * 2);
            add_products(values, values + 64, head_dim * 4);
        }
        store_sums();
        for (int m = 0; m < rows; m++)
            for (int i = 0; i < 2; i++) store(to + m * kDims + i * kLanes, to_float(total(i, m)));
    }

  private:
    static constexpr int kScales = kBlockTokens * 2;  // bytes of a cache's tile before its elements

    // Words k and k + `behind` for k = first, first + 1, ...
    static __m512i in_turn(int first, int behind) {
        const __m512i all = _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7, 6, 6, 5, 5, 4, 4, 3, 3,
                                             2, 2, 1, 1, 0, 0);
        const __m512i odd = _mm512_set1_epi32(behind << 16);
        return _mm512_add_epi16(all, _mm512_add_epi16(odd, _mm512_set1_epi16(int16_t(first))));
    }
    // Two dims of 16 keys, then the next two.
    void take_keys(const uint8_t* tile, int8_t* to) const {
        const __m512i order = in_turn(0, 16);
        for (int at = 0; at < head_dim * kBlockTokens; at += 64)
            _mm512_store_si512(to + at, _mm512_permutexvar_epi16(order, _mm512_loadu_si512(tile + kScales + at)));
    }
    static void split(const int16_t* words, int count, int8_t* to, int lower) {
        for (int i = 0; i < count; i += 32) {
            const __m512i both = _mm512_load_si512(words + i);
            _mm256_storeu_si256((__m256i*)(to + i), _mm512_cvtepi16_epi8(_mm512_srai_epi16(both, 8)));
            _mm256_storeu_si256((__m256i*)(to + lower + i), _mm512_cvtepi16_epi8(both));
        }
    }
    // Two keys of 32 dims, and the next two, a row each.
    void take_values(const Chunk& chunk) {
        const __m512i first = in_turn(0, 32), second = in_turn(16, 32);
        int8_t* to = quads;
        for (int b = 0; b < chunk.num_blocks; b++) {
            const uint8_t* row = chunk.values[b] + kScales;
            for (int quad = 0; quad < kBlockTokens / 4; quad++, row += head_dim * 4)
                for (int at = 0; at < head_dim * 2; at += 64, to += 128) {
                    const __m512i low = _mm512_loadu_si512(row + at), high = _mm512_loadu_si512(row + head_dim * 2 + at);
                    _mm512_store_si512(to, _mm512_permutex2var_epi16(low, first, high));
                    _mm512_store_si512(to + 64, _mm512_permutex2var_epi16(low, second, high));
                }
        }
    }
    KVL_IN_ALL_TILES static void zero_sums() {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    // Tiles 4 and 5 times two tiles of quads, whose rows are `stride` bytes apart.
    KVL_IN_ALL_TILES static void add_products(const int8_t* first, const int8_t* second, int stride) {
        asm volatile("" ::: "memory");
        _tile_loadd(6, first, stride);
        _tile_loadd(7, second, stride);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbusd(1, 5, 6);
        _tile_dpbssd(2, 4, 7);
        _tile_dpbusd(3, 5, 7);
    }
    KVL_IN_ALL_TILES void store_sums() {
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
    }
    // Of row m, with the first or the second tile of quads.
    I32 total(int tile, int m) const {
        const __m512i upper = _mm512_load_si512(sums[2 * tile] + m * kLanes);
        return {_mm512_add_epi32(_mm512_slli_epi32(upper, 8), _mm512_load_si512(sums[2 * tile + 1] + m * kLanes))};
    }

    const Query* const of;
    const int rows, head_dim;
    alignas(64) int8_t queries[kTileQueries * 2 * kMaxHeadDim];  // a row: kMaxHeadDim upper bytes, then as many lower ones
    alignas(64) int8_t quads[kChunkKeys * kMaxHeadDim];          // of two K tiles, then of all values of a chunk
    alignas(64) int32_t sums[4][kTileQueries * kLanes];
};

// The chunks of [from, until) for up to kTileQueries rows, merged into out.
template <class Tiles>
KVL_IN_ALL_TILES void attend_in_tiles(const PagedHead& head, const Query* queries, int rows, int64_t from, int64_t until,
                                      Partials& out) {
    Tiles tiles(queries, rows, head.head_dim);
    alignas(64) float scores[kTileQueries * kChunkKeys], sums[kTileQueries * Tiles::kDims];
    alignas(64) typename Tiles::Factor factors[kTileQueries * kChunkKeys];
    asm volatile("" ::: "memory");
    Tiles::shapes(rows).load();
    for (int64_t c = from / kChunkKeys; c * kChunkKeys < until; c++) {
        const Chunk chunk(head, c, until);
        tiles.score(chunk, scores);
        const Shares shares = weigh_keys<Tiles>(head, chunk, queries, rows, scores, factors, out);
        for (int dim = 0; dim < head.head_dim; dim += Tiles::kDims) {
            tiles.weigh(chunk, factors, dim, sums);
            const int count = min_of(head.head_dim - dim, Tiles::kDims);
            for (int m = 0; m < rows; m++)
                for (int i = 0; i < count; i += kLanes)
                    join(out.sums[m] + dim + i, load(sums + m * Tiles::kDims + i), shares, m);
        }
    }
    _tile_release();  // a thread that sleeps has 8 KB less to be kept
}

#else

constexpr int kTileQueriesFrom = kAttentionRows + 1;
struct Bf16Tiles {};
struct Int8Tiles {};
inline bool can_attend_in_tiles(int) { return false; }
template <class Tiles>
void attend_in_tiles(const PagedHead&, const Query*, int, int64_t, int64_t, Partials&) {}

#endif

// The chunks of [from, until) for a few rows: in tiles up to kTileQueries, otherwise up to kAttentionRows.
template <class Cache, class Tiles>
void attend_rows(const PagedHead& head, const Query* queries, int rows, int64_t from, int64_t until, bool in_tiles, Partials& out) {
    if (in_tiles && rows >= kTileQueriesFrom) return attend_in_tiles<Tiles>(head, queries, rows, from, until, out);
    const ChunkKernel kernel = chunk_kernel<Cache>(rows);
    for (int64_t chunk = from / kChunkKeys; chunk * kChunkKeys < until; chunk++)
        kernel(head, queries, Chunk(head, chunk, until), out);
}

}  // namespace kvl
