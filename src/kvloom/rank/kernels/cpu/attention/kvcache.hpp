// The two forms of the paged cache: how a token's key and value are stored, and how a tile is multiplied. Attention is
// written once over either.
//
// Both forms multiply pairs: of bf16 into floats, or of int8 (widened to words as it is loaded) with 15-bit queries and
// probabilities into exact integers. int8 halves the bytes that attention streams; the rounding of a cached number is
// its only loss that can be measured. Largest sum: 256 dims * 32767 * 127 < 2^31.
//
// Floats are added in one of two orders (pairs.hpp). A stretch is 32 dims of a key, or the 16 keys of a block.
#pragma once

#include "activations/quant.hpp"
#include "isa/pairs.hpp"

namespace kvl {

constexpr float kWordPeak = 32767.0f;
constexpr float kBytePeak = 127.0f;
constexpr float kLargestFp16 = 65504.0f;
constexpr float kNothing = 1e-30f;  // what is smaller counts as zero: its inverse would not be finite

// Largest size of x[count].
inline float peak_size(const float* x, int count) {
    F32 peak = splat(0);
    for (int i = 0; i < count; i += kLanes) peak = max(peak, abs(load(x + i)));
    return largest(peak);
}

// A key's elements in column `slot` of a K tile [dim / 2][16][2]: pairs of dims stay together.
template <class T>
void scatter_key(T* tile, const T* elements, int count, int first_dim, int slot) {
    for (int j = 0; j < count; j += 2)
        std::memcpy(tile + ((first_dim + j) / 2 * kBlockTokens + slot) * 2, elements + j, 2 * sizeof(T));
}

// kLanes of a value's elements in a V tile [8][dim][2]: neighbouring keys are a pair.
template <class T>
void scatter_value(T* tile, const T* elements, int first_dim, int slot, int dim) {
    store_apart(tile + (slot / 2 * dim + first_dim) * 2 + slot % 2, elements);
}

// A query as it is stored: Stored. What it, or the probabilities of its keys, are multiplied with: Factor. Sums of one
// of them over tiles, a lane for each key or dim: Sum, to be closed at the end of each stretch. kTilesOnce, kVectors:
// of keys, and of values, that share a load of the factors.
template <class Order>
struct Bf16Form {
    static constexpr int kFormat = KVL_KV_BF16, kTilesOnce = Order::kTilesOnce, kVectors = kTilesOnce;
    using Stored = uint16_t;
    using Factor = typename Order::Factor;
    using Sum = typename Order::Sum;
    static Sum zero() { return Order::zero(); }
    static typename Order::Pairs load_tile(const uint8_t* tile, int64_t element) {
        return Order::load_pairs(reinterpret_cast<const uint16_t*>(tile) + element);
    }
    static void add_pair(Sum& sum, const typename Order::Pairs& tile, const Factor* pair) { Order::add_pair(sum, tile, pair); }
    static void close(Sum& sum) { Order::close(sum); }
    // Sums of a query over a K tile as scores; `scale` is the query's.
    static F32 scores(const Sum& sum, const uint8_t*, float) { return Order::whole(sum); }
    static F32 sums(const Sum& sum) { return Order::whole(sum); }

    // A query head times `scale`; returns the scale that is left to apply.
    static float store_query(Stored* to, const float* head, int dim, float scale) {
        for (int i = 0; i < dim; i += kLanes) store_bf16(to + i, mul(load(head + i), splat(scale)));
        return 1.0f;
    }
    // A stored query as factors, in `room` [dim] where they are not the same.
    static const Factor* factors_of(const Stored* query, int dim, Factor* room) { return Order::factors_of(query, dim, room); }
    static void store_key(uint8_t* tile, const float* head, int dim, int slot) {
        alignas(64) uint16_t half[kLanes];
        for (int i = 0; i < dim; i += kLanes) {
            store_bf16(half, load(head + i));
            scatter_key(reinterpret_cast<uint16_t*>(tile), half, kLanes, i, slot);
        }
    }
    static void store_value(uint8_t* tile, const float* head, int dim, int slot) {
        alignas(64) uint16_t half[kLanes];
        for (int i = 0; i < dim; i += kLanes) {
            store_bf16(half, load(head + i));
            scatter_value(reinterpret_cast<uint16_t*>(tile), half, i, slot, dim);
        }
    }
    // Probabilities of the keys of VECS blocks (whose V tiles are tiles[0 ..]) as factors of the tiles' elements;
    // returns what the sums are to be multiplied by.
    template <int VECS>
    static float store_probabilities(Factor* to, const F32 (&p)[VECS], const uint8_t* const*) {
        Order::store_factors(to, p);
        return 1.0f;
    }
};

using Bf16Cache = Bf16Form<UnitOrder>;
using Bf16Pairs = Bf16Form<PairOrder>;

struct Int8Cache {
    static constexpr int kFormat = KVL_KV_INT8, kTilesOnce = kvl::kTilesOnce, kVectors = kAttentionRows >= 4 ? 4 : 2;
    using Stored = int16_t;
    using Factor = int16_t;
    using Sum = I32;
    static Sum zero() { return splat_int(0); }
    static Words load_tile(const uint8_t* tile, int64_t element) {
        return load_words(reinterpret_cast<const int8_t*>(tile) + kBlockTokens * 2 + element);
    }
    static void add_pair(Sum& sum, const Words& tile, const Factor* pair) { sum = dot_words(sum, tile, word_at(pair)); }
    static void close(Sum&) {}
    static F32 scores(const Sum& sums, const uint8_t* tile, float scale) { return mul(to_float(sums), mul(scales(tile), splat(scale))); }
    static F32 sums(const Sum& sum) { return to_float(sum); }

    static float store_query(Factor* to, const float* head, int dim, float scale) {
        return store_scaled(to, head, dim) * scale;
    }
    static const Factor* factors_of(const Stored* query, int, Factor*) { return query; }
    static void store_key(uint8_t* tile, const float* head, int dim, int slot) {
        alignas(64) int8_t bytes[kLanes];
        const float inverse = store_scale(tile, head, dim, slot);
        for (int i = 0; i < dim; i += kLanes) {
            to_bytes(bytes, head + i, inverse);
            scatter_key(elements(tile), bytes, kLanes, i, slot);
        }
    }
    static void store_value(uint8_t* tile, const float* head, int dim, int slot) {
        alignas(64) int8_t bytes[kLanes];
        const float inverse = store_scale(tile, head, dim, slot);
        for (int i = 0; i < dim; i += kLanes) {
            to_bytes(bytes, head + i, inverse);
            scatter_value(elements(tile), bytes, i, slot, dim);
        }
    }
    // The values' scales go into the probabilities, so that one sum runs over all keys of a chunk.
    template <int VECS>
    static float store_probabilities(Factor* to, const F32 (&p)[VECS], const uint8_t* const* tiles) {
        F32 weighed[VECS], top = splat(0);
#pragma GCC unroll 8
        for (int v = 0; v < VECS; v++) top = max(top, weighed[v] = mul(p[v], scales(tiles[v])));
        const float peak = largest(top);
        const F32 inverse = splat(inverse_of(peak));
#pragma GCC unroll 8
        for (int v = 0; v < VECS; v++) store_words(to + v * kLanes, to_int(mul(weighed[v], inverse)));
        return peak / kWordPeak;
    }

  private:
    static F32 scales(const uint8_t* tile) { return load_fp16(reinterpret_cast<const uint16_t*>(tile)); }
    static int8_t* elements(uint8_t* tile) { return reinterpret_cast<int8_t*>(tile) + kBlockTokens * 2; }

    // What puts the largest size at kWordPeak.
    static float inverse_of(float peak) { return peak > kNothing ? kWordPeak / peak : 0.0f; }
    // x[count] as words, the largest at kWordPeak; returns the scale.
    static float store_scaled(Factor* to, const float* x, int count) {
        const float peak = peak_size(x, count);
        const F32 inverse = splat(inverse_of(peak));
        for (int i = 0; i < count; i += kLanes) store_words(to + i, to_int(mul(load(x + i), inverse)));
        return peak / kWordPeak;
    }
    // The scale of a token's head into the tile; returns its inverse, 0 for a head of zeros.
    static float store_scale(uint8_t* tile, const float* head, int dim, int slot) {
        const uint16_t bits = float_to_fp16(min_of(peak_size(head, dim) / kBytePeak, kLargestFp16));
        std::memcpy(tile + slot * 2, &bits, 2);
        const float scale = fp16_to_float(bits);
        return scale > 0 ? 1.0f / scale : 0.0f;
    }
    static void to_bytes(int8_t* to, const float* x, float inverse) {
        const F32 value = mul(load(x), splat(inverse));
        store_bytes(to, to_int(max(min(value, splat(kBytePeak)), splat(-kBytePeak))));
    }
};

}  // namespace kvl
