// Paged attention of a few query rows that share a kv head, on vector instructions, one chunk of keys at a time.
//
// Chunks begin at positions that are multiples of kChunkKeys. Each is computed independently and then merged in order
// of position (online softmax), so a query's result has the same bits however its prompt was divided into steps, and
// whichever rows share its task or thread.
#pragma once

#include <type_traits>

#include "attention/kvcache.hpp"

namespace kvl {

constexpr int kMaxHeadDim = 576;  // of keys, and of values

// Locates the cached tiles of one kv head of one sequence. table: the blocks of the sequence, each of `tiles` tiles, of
// which block 0 of the cache has the first at `keys` and `values`.
struct PagedHead {
    const uint8_t *keys, *values;
    const int32_t* table;
    int64_t block_bytes;
    int tiles;
    int64_t key_stride, value_stride;  // bytes from a tile to the next one of its block
    int key_dim, value_dim;
    float softcap;  // of scores, which are in log2 units; 0 = none
    bool is_shared;  // values are the first numbers of keys: V tiles are made of K tiles (ValueTiles)
    // of the sequence's tokens [tile * kBlockTokens, (tile + 1) * kBlockTokens)
    const uint8_t* key_tile(int64_t tile) const { return keys + at(tile, key_stride); }
    const uint8_t* value_tile(int64_t tile) const { return values + at(tile, value_stride); }

  private:
    int64_t at(int64_t tile, int64_t stride) const {
        if (tiles == 1) return table[tile] * block_bytes;
        return table[tile / tiles] * block_bytes + tile % tiles * stride;
    }
};

// A query row. numbers [key_dim], as the cache form's Stored or Factor; multiplied by `scale` they are the query times
// log2(e) * attention_scale, so that scores are in log2 units. It sees the keys at positions [from, until).
struct Query {
    const void* numbers;
    float scale;
    int64_t from, until;
    template <class Number>
    const Number* as() const {
        return static_cast<const Number*>(numbers);
    }
};

// State of the online softmax of up to kLanes rows over the chunks merged so far: the largest score in log2 units, the
// sum of the weights 2^(score - peak), and the weighted sums of values, not yet divided by `weight`.
struct Partials {
    Partials() {
        store(peak, splat(kMasked));
        store(weight, splat(0));
    }
    alignas(64) float peak[kLanes];
    alignas(64) float weight[kLanes];
    float* sums = nullptr;  // [rows][value_dim]
};

// The blocks of one chunk that lie before position `until`: keys [first_key, first_key + num_keys), whole blocks.
struct Chunk {
    Chunk() = default;
    Chunk(const PagedHead& head, int64_t chunk, int64_t until) : first_key(chunk * kChunkKeys) {
        const int64_t first_block = first_key / kBlockTokens, last_block = (until + kBlockTokens - 1) / kBlockTokens;
        num_blocks = int(min_of(last_block - first_block, int64_t(kChunkBlocks)));
        num_keys = num_blocks * kBlockTokens;
        for (int b = 0; b < num_blocks; b++) {
            keys[b] = head.key_tile(first_block + b);
            values[b] = head.value_tile(first_block + b);
        }
    }
    static constexpr int kChunkBlocks = kChunkKeys / kBlockTokens;
    int64_t first_key;
    int num_blocks, num_keys;
    const uint8_t *keys[kChunkBlocks], *values[kChunkBlocks];
};

// Makes the numbers of a V tile of those of a K tile, of its first `dims` dims. Unit: four of them.
//
// A K tile has for two dims and two keys a unit k0 d0, k0 d1, k1 d0, k1 d1, the units of all keys behind each other; a V
// tile has d0 k0, d0 k1, d1 k0, d1 k1, the units of all dims behind each other.
template <class Unit>
void turn_tile(const uint8_t* keys, uint8_t* values, int dims) {
    constexpr int kPairs = kBlockTokens / 2, kQuarter = int(sizeof(Unit)) * 2;
    constexpr Unit kSecond = ((Unit(1) << kQuarter) - 1) << kQuarter, kMiddle = kSecond | kSecond << kQuarter;
    for (int pair = 0; pair < dims / 2; pair++)
        for (int k = 0; k < kPairs; k++) {
            Unit unit;
            std::memcpy(&unit, keys + (pair * kPairs + k) * sizeof(Unit), sizeof(Unit));
            unit = (unit & ~kMiddle) | (unit >> kQuarter & kSecond) | (unit & kSecond) << kQuarter;
            std::memcpy(values + (k * (dims / 2) + pair) * sizeof(Unit), &unit, sizeof(Unit));
        }
}

// V tiles of a chunk whose values are the first numbers of its keys; an int8 value has its key's scale.
template <class Cache>
struct ValueTiles {
    void take(const PagedHead& head, const Chunk& chunk) {
        constexpr bool kIsInt8 = Cache::kFormat == KVL_KV_INT8;
        constexpr int kScales = kIsInt8 ? kBlockTokens * 2 : 0;
        for (int b = 0; b < chunk.num_blocks; b++) {
            std::memcpy(tiles[b], chunk.keys[b], kScales);
            using Unit = std::conditional_t<kIsInt8, uint32_t, uint64_t>;
            turn_tile<Unit>(chunk.keys[b] + kScales, tiles[b] + kScales, head.value_dim);
        }
    }
    void give(Chunk& chunk) const {
        for (int b = 0; b < chunk.num_blocks; b++) chunk.values[b] = tiles[b];
    }
    alignas(64) uint8_t tiles[Chunk::kChunkBlocks][kBlockTokens * 2 * kMaxHeadDim];
};

// Computes the scores of ROWS queries with TILES K tiles, and stores those of query m at scores + m * kChunkKeys.
template <class Cache, int ROWS, int TILES>
void score_blocks(const uint8_t* const* tiles, int key_dim, const Query* queries, float* scores) {
    constexpr int kStretch = 16;  // pairs of dims
    typename Cache::Sum sums[ROWS][TILES];
    const typename Cache::Factor* q[ROWS];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) {
#pragma GCC unroll 4
        for (int t = 0; t < TILES; t++) sums[m][t] = Cache::zero();
        q[m] = queries[m].as<typename Cache::Factor>();
    }
    for (int stretch = 0; stretch < key_dim / 2; stretch += kStretch) {
#pragma GCC unroll 2
        for (int pair = stretch; pair < stretch + kStretch; pair++) {
            decltype(Cache::load_tile(nullptr, 0)) keys[TILES];
#pragma GCC unroll 4
            for (int t = 0; t < TILES; t++) keys[t] = Cache::load_tile(tiles[t], pair * kBlockTokens * 2);
#pragma GCC unroll 8
            for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
                for (int t = 0; t < TILES; t++) Cache::add_pair(sums[m][t], keys[t], q[m] + 2 * pair);
        }
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
            for (int t = 0; t < TILES; t++) Cache::close(sums[m][t]);
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
        for (int t = 0; t < TILES; t++)
            store(scores + m * kChunkKeys + t * kBlockTokens, Cache::scores(sums[m][t], tiles[t], queries[m].scale));
}

// Replaces the scores of keys that the query must not see by kMasked.
inline void mask_scores(const Query& query, const Chunk& chunk, float* scores) {
    const int64_t seen = query.until - chunk.first_key, hidden = query.from - chunk.first_key;
    if (seen >= chunk.num_keys && hidden <= 0) return;
    for (int k = 0; k < chunk.num_keys; k += kLanes) {
        F32 value = first_lanes(load(scores + k), int(max_of(min_of(seen - k, kLanes), 0)), kMasked);
        if (hidden > k) {  // the first `hidden` keys have left the sliding window
            const F32 late = first_lanes(splat(kMasked), int(min_of(hidden - k, kLanes)), 0.0f);
            value = max(add(value, late), splat(kMasked));
        }
        store(scores + k, value);
    }
}

// The largest of VECS * 16 scores of each row: that of row m in lane m.
template <int VECS>
F32 peaks_of(const float* scores, int rows) {
    F32 peaks[kLanes];
    for (int m = 0; m < kLanes; m++) peaks[m] = splat(kMasked);
    for (int m = 0; m < rows; m++, scores += kChunkKeys) {
        F32 odd = peaks[m];
#pragma GCC unroll 8
        for (int v = 0; v < VECS; v++) (v % 2 ? odd : peaks[m]) = max(v % 2 ? odd : peaks[m], load(scores + v * kLanes));
        peaks[m] = max(peaks[m], odd);
    }
    return largest_of(peaks);
}

// Turns VECS * 16 scores of a row into weights 2^(score - peak), and stores these as factors of the chunk's values.
// Returns the scale by which sums of factors * values must be multiplied. The lanes of `total` add up to the sum of the
// weights.
template <class Form, int VECS>
float weigh_row(const float* scores, float peak, const Chunk& chunk, typename Form::Factor* factors, F32& total) {
    F32 p[VECS];
    total = splat(0);
#pragma GCC unroll 8
    for (int v = 0; v < VECS; v++) {
        p[v] = exp2_share(sub(load(scores + v * kLanes), splat(peak)));
        total = add(total, p[v]);
    }
    return Form::store_probabilities(factors, p, chunk.values);
}

// Factors with which a chunk is merged into the sums of up to kLanes rows: new = old * keep + the chunk's * gain.
struct Shares {
    alignas(64) float keep[kLanes];
    alignas(64) float gain[kLanes];
};

// Up to kLanes queries, their scores with a chunk [rows][kChunkKeys], and the destination of their factors
// [rows][stride]. A row's factors may overwrite its scores.
template <class Factor>
struct Scored {
    const Query* queries;
    int rows;
    float* scores;
    Factor* factors;
    int stride;
};

// Does nothing between the rows of a softmax (argument `meanwhile`). A type of its own for each ROWS makes the compiler
// instantiate the softmax for each number of rows.
template <int ROWS>
struct NothingMeanwhile {
    void operator()(int) const {}
};

// Softmax of some queries over a chunk of VECS blocks: turns scores into factors of the values in the form's type, and
// merges peaks and weights into `out`. Returns the factors for merging the sums. Calls meanwhile(m) after row m.
template <class Form, int VECS, class Meanwhile>
Shares weigh_blocks(const PagedHead& head, const Chunk& chunk, const Scored<typename Form::Factor>& of, Partials& out, Meanwhile&& meanwhile) {
    alignas(64) float peak[kLanes], scale[kLanes] = {};
    F32 totals[kLanes];
    for (int m = 0; m < of.rows; m++) {
        float* const row = of.scores + m * kChunkKeys;
        if (head.softcap > 0)
            for (int k = 0; k < VECS * kLanes; k += kLanes) store(row + k, softcap(load(row + k), head.softcap));
        mask_scores(of.queries[m], chunk, row);
    }
    const F32 own = peaks_of<VECS>(of.scores, of.rows);
    store(peak, own);
    for (int m = 0; m < kLanes; m++) totals[m] = splat(0);
    for (int m = 0; m < of.rows; m++) {
        const float top = peak[m] > kMasked / 2 ? peak[m] : 0.0f;  // if the row sees no key, all weights become 0
        scale[m] = weigh_row<Form, VECS>(of.scores + m * kChunkKeys, top, chunk, of.factors + m * of.stride, totals[m]);
        meanwhile(m);
    }
    const F32 old = load(out.peak), top = max(old, own);
    const F32 keep = exp2(sub(old, top)), gain = exp2(sub(own, top));
    store(out.weight, fma(load(out.weight), keep, mul(sums_of(totals), gain)));
    store(out.peak, top);
    Shares shares;
    store(shares.keep, keep);
    store(shares.gain, mul(gain, load(scale)));
    return shares;
}

// weigh_blocks for a chunk of any number of blocks.
template <class Form, int VECS = Chunk::kChunkBlocks, class Meanwhile>
Shares weigh_keys(const PagedHead& head, const Chunk& chunk, const Scored<typename Form::Factor>& of, Partials& out, Meanwhile&& meanwhile) {
    if constexpr (VECS > 1)
        if (chunk.num_blocks < VECS) return weigh_keys<Form, VECS - 1>(head, chunk, of, out, meanwhile);
    return weigh_blocks<Form, VECS>(head, chunk, of, out, meanwhile);
}

// Merges a chunk's sums of `count` dims of row m into those at `to`.
inline void join(float* to, const float* sums, int count, const Shares& shares, int m) {
    const F32 keep = splat(shares.keep[m]), gain = splat(shares.gain[m]);
    for (int i = 0; i < count; i += kLanes) store(to + i, fma(load(to + i), keep, mul(load(sums + i), gain)));
}

// Multiplies VECS * 16 dims, from `dim` on, of the chunk's values by the factors of ROWS rows, and merges the sums into
// out.sums.
template <class Cache, int ROWS, int VECS>
void weigh_values(const Chunk& chunk, int value_dim, int dim, const typename Cache::Factor* factors, const Shares& shares,
                  Partials& out) {
    typename Cache::Sum sums[ROWS][VECS];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) sums[m][v] = Cache::zero();
    for (int b = 0; b < chunk.num_blocks; b++) {
#pragma GCC unroll 2
        for (int pair = 0; pair < kBlockTokens / 2; pair++) {
            decltype(Cache::load_tile(nullptr, 0)) values[VECS];
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++)
                values[v] = Cache::load_tile(chunk.values[b], (pair * value_dim + dim + v * kLanes) * 2);
#pragma GCC unroll 8
            for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
                for (int v = 0; v < VECS; v++)
                    Cache::add_pair(sums[m][v], values[v], factors + m * kChunkKeys + b * kBlockTokens + pair * 2);
        }
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) Cache::close(sums[m][v]);
    }
    for (int m = 0; m < ROWS; m++) {
        alignas(64) float own[VECS * kLanes];
        for (int v = 0; v < VECS; v++) store(own + v * kLanes, Cache::sums(sums[m][v]));
        join(out.sums + m * value_dim + dim, own, VECS * kLanes, shares, m);
    }
}

// Attention of ROWS queries over one chunk, merged into `out`.
template <class Cache, int ROWS>
void attend_chunk(const PagedHead& head, const Query* queries, const Chunk& chunk, Partials& out) {
    alignas(64) float scores[ROWS * kChunkKeys];
    alignas(64) typename Cache::Factor factors[ROWS * kChunkKeys];
    int b = 0;
    for (; b + Cache::kTilesOnce <= chunk.num_blocks; b += Cache::kTilesOnce)
        score_blocks<Cache, ROWS, Cache::kTilesOnce>(chunk.keys + b, head.key_dim, queries, scores + b * kBlockTokens);
    for (; b < chunk.num_blocks; b++)
        score_blocks<Cache, ROWS, 1>(chunk.keys + b, head.key_dim, queries, scores + b * kBlockTokens);
    const NothingMeanwhile<kUnrollsRows ? ROWS : 0> nothing;
    const Shares shares = weigh_keys<Cache>(head, chunk, {queries, ROWS, scores, factors, kChunkKeys}, out, nothing);
    int dim = 0;
    for (; dim + Cache::kVectors * kLanes <= head.value_dim; dim += Cache::kVectors * kLanes)
        weigh_values<Cache, ROWS, Cache::kVectors>(chunk, head.value_dim, dim, factors, shares, out);
    for (; dim < head.value_dim; dim += kLanes)
        weigh_values<Cache, ROWS, 1>(chunk, head.value_dim, dim, factors, shares, out);
}

// Factor that normalises a row's sums: 1 / weight, or less if a sink, a logit without a value, takes part in the
// softmax. sink: null = none. peak, weight: the row's in Partials.
inline float share_beside(const float* sink, float peak, float weight) {
    if (sink == nullptr) return 1.0f / weight;
    const float score = *sink * kLog2E, top = max_of(peak, score);
    const float keep = exp2_scalar(max_of(peak - top, -126.0f));
    return keep / (weight * keep + exp2_scalar(max_of(score - top, -126.0f)));
}

using ChunkKernel = void (*)(const PagedHead&, const Query*, const Chunk&, Partials&);

// attend_chunk for 1 <= rows <= kAttentionRows.
template <class Cache, int ROWS = kAttentionRows>
ChunkKernel chunk_kernel(int rows) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return chunk_kernel<Cache, ROWS - 1>(rows);
    return &attend_chunk<Cache, ROWS>;
}

// Attention of rows, in groups of kAttentionRows, over the part of a chunk that each group sees. values: of its blocks,
// if they are not those in the cache.
template <class Cache>
void attend_groups(const PagedHead& head, const Query* queries, int rows, int64_t chunk, const ValueTiles<Cache>* values, Partials* out) {
    for (int first = 0; first < rows; first += kAttentionRows) {
        const int count = min_of(rows - first, kAttentionRows);
        const int64_t end = max_of(queries[first].until, queries[first + count - 1].until);
        if (chunk * kChunkKeys >= end) continue;
        Chunk part(head, chunk, end);
        if (values != nullptr) values->give(part);
        chunk_kernel<Cache>(count)(head, queries + first, part, out[first / kAttentionRows]);
    }
}

// The same over the chunks of positions [from, until) of a head that is_shared. Apart, because of its large stack.
template <class Cache>
__attribute__((noinline)) void attend_shared(const PagedHead& head, const Query* queries, int rows, int64_t from, int64_t until, Partials* out) {
    ValueTiles<Cache> values;
    for (int64_t chunk = from / kChunkKeys; chunk * kChunkKeys < until; chunk++) {
        values.take(head, Chunk(head, chunk, until));
        attend_groups<Cache>(head, queries, rows, chunk, &values, out);
    }
}

}  // namespace kvl
