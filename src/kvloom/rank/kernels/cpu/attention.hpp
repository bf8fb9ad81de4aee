// Paged attention of a few query rows that share a kv head, one chunk of keys at a time.
//
// Chunks begin at absolute positions (multiples of kChunkKeys) and are computed from nothing, then merged in order of
// position: a query's result is the same bits however its prompt was cut and whoever shares its tile or its thread.
#pragma once

#include "kvcache.hpp"

namespace kvl {

// Where the tiles of one kv head of one sequence are: block b's K tile is at keys + table[b] * stride.
struct PagedHead {
    const uint8_t *keys, *values;
    const int32_t* table;
    int64_t stride;  // bytes
    int head_dim;
    float softcap;  // of scores, in log2 units; 0 = none
    const uint8_t* key_tile(int64_t block) const { return keys + table[block] * stride; }
    const uint8_t* value_tile(int64_t block) const { return values + table[block] * stride; }
};

// A query row: 16-bit elements [head_dim] as the cache's form wants them; times `scale`, the query times
// log2(e) / sqrt(head_dim). Sees keys in [from, until).
struct Query {
    const uint16_t* q;
    float scale;
    int64_t from, until;
};

// Softmax over what was seen so far: weighted values, not divided by `weight` yet; peak is in log2 units.
struct Partial {
    float peak = kMasked, weight = 0;
    float* sums;  // [head_dim]
};

// Scores of ROWS queries against one block, masked, into scores[m * kChunkKeys + ...].
template <class Cache, int ROWS>
void score_block(const PagedHead& head, const Query* queries, int64_t block, float* scores) {
    const uint8_t* const tile = head.key_tile(block);
    const int64_t first_key = block * kBlockTokens;
    const int head_dim = head.head_dim;
    typename Cache::Sum acc[ROWS];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) acc[m] = Cache::zero();
#pragma GCC unroll 2
    for (int pair = 0; pair < head_dim / 2; pair++) {
        const auto keys = Cache::load_tile(tile, pair * kBlockTokens * 2);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) {
            int32_t q;
            std::memcpy(&q, queries[m].q + 2 * pair, 4);
            acc[m] = Cache::dot(acc[m], keys, q);
        }
    }
    for (int m = 0; m < ROWS; m++) {
        const int64_t seen = queries[m].until - first_key, hidden = queries[m].from - first_key;
        F32 value = Cache::scores(acc[m], tile, queries[m].scale);
        if (head.softcap > 0) value = softcap(value, head.softcap);
        if (seen < kBlockTokens) value = first_lanes(value, int(max_of(seen, 0)), kMasked);
        if (hidden > 0) {  // keys that have left the sliding window: what is not among the first `hidden`
            const F32 late = first_lanes(splat(kMasked), int(min_of(hidden, kBlockTokens)), 0.0f);
            value = max(add(value, late), splat(kMasked));
        }
        store(scores + m * kChunkKeys, value);
    }
}

// Turns `count` scores into probabilities relative to the chunk's own peak, in place; returns peak and total weight.
inline Partial softmax_chunk(float* scores, int count) {
    F32 peak = splat(kMasked);
    for (int k = 0; k < count; k += kLanes) peak = max(peak, load(scores + k));
    Partial result{largest(peak), 0, nullptr};
    if (result.peak <= kMasked / 2) {  // nothing visible in this chunk
        for (int k = 0; k < count; k += kLanes) store(scores + k, splat(0));
        result.peak = kMasked;
        return result;
    }
    F32 weight = splat(0);
    for (int k = 0; k < count; k += kLanes) {
        const F32 score = load(scores + k);
        F32 value = exp2(sub(score, splat(result.peak)));
        value = zero_where_masked(value, score);
        weight = add(weight, value);
        store(scores + k, value);
    }
    result.weight = sum(weight);
    return result;
}

// Adds VECS * 16 dims of the values of `blocks` tiles, weighted, into out[m][dim..]; old sums are scaled by keep[m],
// the new ones by gain[m].
template <class Cache, int ROWS, int VECS>
void weigh_values(const uint8_t* const* tiles, int blocks, int head_dim, int dim, const uint16_t* probabilities,
                  const float* keep, const float* gain, Partial* out) {
    typename Cache::Sum acc[ROWS][VECS];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) acc[m][v] = Cache::zero();
    for (int b = 0; b < blocks; b++) {
#pragma GCC unroll 2
        for (int pair = 0; pair < kBlockTokens / 2; pair++) {
            decltype(Cache::load_tile(nullptr, 0)) values[VECS];
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) values[v] = Cache::load_tile(tiles[b], (pair * head_dim + dim + v * kLanes) * 2);
#pragma GCC unroll 8
            for (int m = 0; m < ROWS; m++) {
                int32_t p;
                std::memcpy(&p, probabilities + m * kChunkKeys + b * kBlockTokens + pair * 2, 4);
#pragma GCC unroll 4
                for (int v = 0; v < VECS; v++) acc[m][v] = Cache::dot(acc[m][v], values[v], p);
            }
        }
    }
    for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < VECS; v++) {
            float* at = out[m].sums + dim + v * kLanes;
            store(at, fma(load(at), splat(keep[m]), mul(Cache::sums(acc[m][v]), splat(gain[m]))));
        }
}

// One chunk (which one: keys [chunk * kChunkKeys, ...) up to `until`) of ROWS queries, merged into out.
template <class Cache, int ROWS>
void attend_chunk(const PagedHead& head, const Query* queries, int64_t chunk, int64_t until, Partial* out) {
    constexpr int kBlocks = kChunkKeys / kBlockTokens;
    alignas(64) float scores[ROWS * kChunkKeys];
    alignas(64) uint16_t probabilities[ROWS * kChunkKeys];
    const int64_t first_block = chunk * kBlocks, last_block = (until + kBlockTokens - 1) / kBlockTokens;
    const int blocks = int(min_of(last_block - first_block, kBlocks));
    const uint8_t* tiles[kBlocks];
    for (int b = 0; b < blocks; b++) {
        tiles[b] = head.value_tile(first_block + b);
        score_block<Cache, ROWS>(head, queries, first_block + b, scores + b * kBlockTokens);
    }
    float keep[ROWS], gain[ROWS];
    for (int m = 0; m < ROWS; m++) {
        float* const p = scores + m * kChunkKeys;
        const Partial own = softmax_chunk(p, blocks * kBlockTokens);
        const float scale = Cache::store_probabilities(probabilities + m * kChunkKeys, p, blocks * kBlockTokens, tiles);
        const float peak = own.peak > out[m].peak ? own.peak : out[m].peak;
        keep[m] = exp2_scalar(max_of(out[m].peak - peak, -126.0f));
        gain[m] = exp2_scalar(max_of(own.peak - peak, -126.0f));
        out[m].weight = out[m].weight * keep[m] + own.weight * gain[m];
        out[m].peak = peak;
        gain[m] *= scale;
    }
    constexpr int kWide = kAttentionRows >= 4 ? 4 : 2;  // value registers that ROWS queries share
    int dim = 0;
    for (; dim + kWide * kLanes <= head.head_dim; dim += kWide * kLanes)
        weigh_values<Cache, ROWS, kWide>(tiles, blocks, head.head_dim, dim, probabilities, keep, gain, out);
    for (; dim < head.head_dim; dim += kLanes)
        weigh_values<Cache, ROWS, 1>(tiles, blocks, head.head_dim, dim, probabilities, keep, gain, out);
}

// What the sums are to be multiplied by, in the company of a sink, which takes its share of the softmax; null = none.
inline float share_beside(const float* sink, const Partial& of) {
    if (sink == nullptr) return 1.0f / of.weight;
    const float score = *sink * kLog2E, peak = max_of(of.peak, score);
    const float keep = exp2_scalar(max_of(of.peak - peak, -126.0f));
    return keep / (of.weight * keep + exp2_scalar(max_of(score - peak, -126.0f)));
}

using ChunkKernel = void (*)(const PagedHead&, const Query*, int64_t, int64_t, Partial*);

// The kernel for 1 <= rows <= kAttentionRows.
template <class Cache, int ROWS = kAttentionRows>
ChunkKernel chunk_kernel(int rows) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return chunk_kernel<Cache, ROWS - 1>(rows);
    return &attend_chunk<Cache, ROWS>;
}

}  // namespace kvl
