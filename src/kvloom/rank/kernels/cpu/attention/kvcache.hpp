// The two forms of the paged cache, bf16 and int8: how a token's key and value are stored, and how a tile is
// multiplied. The attention kernels are templates over the form.
//
// Both forms multiply pairs: bf16 pairs give floats; int8, widened to 16 bits when loaded, times 15-bit queries and
// probabilities gives exact integers. int8 halves the bytes that attention reads; rounding the cached numbers is its
// only measurable loss. The largest sum of scores is 516 dims * 32767 * 127 < 2^31; queries of more dims have less than
// 15 bits (query_peak). Sums of values have 128 keys.
//
// Floats are added in one of two orders (isa/pairs.hpp). A stretch is 32 dims of a key, or the 16 keys of a block.
#pragma once

#include "activations/quant.hpp"
#include "isa/pairs.hpp"

namespace kvl {

constexpr float kWordPeak = 32767.0f;
constexpr float kBytePeak = 127.0f;
// Largest magnitude of a query's word: `dim` products with bytes do not overflow.
inline float query_peak(int dim) { return min_of(kWordPeak, float(INT32_MAX / (127 * int64_t(dim)))); }
constexpr float kLargestFp16 = 65504.0f;
constexpr float kNothing = 1e-30f;  // smaller magnitudes count as zero: their inverse would not be finite

// Largest magnitude of x[count]; count is a multiple of kLanes.
inline float peak_size(const float* x, int count) {
    F32 peak = splat(0);
    for (int i = 0; i < count; i += kLanes) peak = max(peak, abs(load(x + i)));
    return largest(peak);
}

// Writes `count` elements of a key, dims from `first_dim` on, to column `slot` of a K tile [dim / 2][16][2]: two
// neighbouring dims are a pair.
template <class T>
void scatter_key(T* tile, const T* elements, int count, int first_dim, int slot) {
    for (int j = 0; j < count; j += 2)
        std::memcpy(tile + ((first_dim + j) / 2 * kBlockTokens + slot) * 2, elements + j, 2 * sizeof(T));
}

// Writes kLanes elements of a value, dims from `first_dim` on, for key `slot` to a V tile [8][dim][2]: two neighbouring
// keys are a pair.
template <class T>
void scatter_value(T* tile, const T* elements, int first_dim, int slot, int dim) {
    store_apart(tile + (slot / 2 * dim + first_dim) * 2 + slot % 2, elements);
}

// The bf16 form, in an order of addition. Stored: the type of a stored query. Factor: the type of queries and
// probabilities in products. Sum: sums of products over tiles, with one key or dim per lane; close() must be called at
// the end of each stretch. kTilesOnce, kVectors: number of key tiles, and of vectors of values, that share a load of
// factors.
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
    // Converts a query's sums with a K tile to scores; `scale` is the query's.
    static F32 scores(const Sum& sum, const uint8_t*, float) { return Order::whole(sum); }
    static F32 sums(const Sum& sum) { return Order::whole(sum); }

    // Stores a query head times `scale`; returns the factor that scores must still be multiplied by.
    static float store_query(Stored* to, const float* head, int dim, float scale) {
        for (int i = 0; i < dim; i += kLanes) store_bf16(to + i, mul(load(head + i), splat(scale)));
        return 1.0f;
    }
    // Converts a stored query to factors in `room` [dim] and returns it; if no conversion is needed, returns `query`.
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
    // Stores the probabilities of the keys of VECS blocks as factors of their values, whose V tiles are tiles[0..VECS);
    // returns the scale that sums of products must be multiplied by.
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
        const float top = query_peak(dim), peak = peak_size(head, dim);
        const F32 inverse = splat(peak > kNothing ? top / peak : 0.0f);
        for (int i = 0; i < dim; i += kLanes) store_words(to + i, to_int(mul(load(head + i), inverse)));
        return peak / top * scale;
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
    // Multiplies the probabilities by the values' scales, so that one integer sum can run over all keys of a chunk.
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

    // The factor that maps the magnitude `peak` to kWordPeak; 0 if `peak` counts as zero.
    static float inverse_of(float peak) { return peak > kNothing ? kWordPeak / peak : 0.0f; }
    // Stores the scale of a token's key or value head in the tile; returns its inverse, 0 for a head of zeros.
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
