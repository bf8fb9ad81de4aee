// Attention on the tile unit of Intel's processors (AMX), for a chunk of keys and a group of up to 16 query rows at a
// time. Results have the same bits as those of attention.hpp: integer sums are exact, and attention.hpp adds floats in
// the unit's order.
#pragma once

#include "attention/attention.hpp"
#include "linear/tiles.hpp"

namespace kvl {

constexpr int kTileGroups = 2;  // most groups of a task: they share one read of a chunk from memory
constexpr int kTileQueries = kTileGroups * kLanes;
constexpr int kTaskRows = kAttentionGroups * kAttentionRows;  // most rows of a task on vector instructions
constexpr int kMostGroups = max_of(kTileGroups, kAttentionGroups);
static_assert(kTaskRows <= kTileQueries);

#ifdef KVL_HAS_TILES

constexpr int kTileQueriesFrom = 3;  // fewer query rows are faster in attention.hpp

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

// The classes Bf16Tiles and Int8Tiles, below called Tiles, hold the queries of a task in groups of kLanes. For one
// group and one chunk, score() computes the scores [m][kChunkKeys] (undefined after the chunk's last block) and weigh()
// the weighted sums [m][kMaxHeadDim] of the values. Both work in steps; a caller must run all steps of a chunk in
// order, with no steps of the same kind for another chunk or group between them. Rows of factors are kFactors words
// apart. Compilers do not know what memory tile loads read, hence the memory barriers before them.
constexpr int kFactors = 2 * kChunkKeys;  // 16-bit words of a row of factors, which overwrites a row of scores

// Prefetches `bytes` of a tile of the KV cache.
inline void ask_for(const uint8_t* tile, int bytes) {
    for (int at = 0; at < bytes; at += 64) prefetch(tile + at);
}

// Whether a chunk's values are prefetched while its keys are read: in tasks of few rows (decoding), which are bound by
// memory. Prompts find their keys and values in a processor cache, where prefetched data would displace others.
constexpr bool asks_for_values(int rows) { return rows <= kLanes; }

// For the bf16 cache, whose K and V tiles in memory have the unit's layout: it loads 32 dims of 16 keys of a K tile, or
// 16 dims of 16 keys of a V tile, directly.
struct Bf16Tiles {
    using Factor = uint16_t;

    template <int VECS>
    static float store_probabilities(Factor* to, const F32 (&p)[VECS], const uint8_t* const*) {
        PairOrder::store_factors(to, p);
        return 1.0f;
    }
    // Tiles 0 to 3 hold sums; 4 queries, 5 probabilities of a block; 6 keys, 7 values.
    static AttentionShapes shapes(int rows) {
        return {{{rows, 64}, {rows, 64}, {rows, 64}, {rows, 64}, {rows, 64}, {rows, 32}, {16, 64}, {8, 64}}};
    }
    // The queries must be contiguous in memory, and memory for a whole last group must follow them.
    Bf16Tiles(const Query* of, int rows, const PagedHead& head)
        : asks(asks_for_values(rows)), key_dim(head.key_dim), value_dim(head.value_dim), queries(of[0].as<Bf16Cache::Stored>()) {}

    int score_steps(const Chunk& chunk) const { return (chunk.num_blocks + kOnce - 1) / kOnce * (key_dim / kStretch); }
    KVL_IN_ALL_TILES void score(const Chunk& chunk, int group, int step, float* scores) const {
        const int stretches = key_dim / kStretch, b = step / stretches * kOnce, stretch = step % stretches;
        constexpr int kPart = kStretch * kBlockTokens * 2;  // bytes of a tile, as many of keys as of values
        const uint8_t* keys[kOnce];
        for (int i = 0; i < kOnce; i++) {
            const int block = min_of(b + i, chunk.num_blocks - 1);
            keys[i] = chunk.keys[block] + stretch * kPart;
            if (asks && stretch * kStretch < value_dim) ask_for(chunk.values[block] + stretch * kPart, kPart);
        }
        if (stretch == 0) zero_sums();
        _tile_loadd(4, queries + group * kLanes * key_dim + stretch * kStretch, key_dim * 2);
        _tile_loadd(6, keys[0], 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(6, keys[1], 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(6, keys[2], 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(6, keys[3], 64);
        _tile_dpbf16ps(3, 4, 6);
        if (stretch == stretches - 1) store_sums(scores + b * kBlockTokens, kChunkKeys * 4);
    }

    int weigh_steps(const Chunk& chunk) const { return (value_dim + kDims - 1) / kDims * chunk.num_blocks; }
    KVL_IN_ALL_TILES void weigh(const Chunk& chunk, int, int step, const Factor* factors, float* sums) const {
        const int b = step % chunk.num_blocks, dim = step / chunk.num_blocks * kDims, stride = value_dim * 4;
        const uint8_t* values = chunk.values[b] + dim * 4;
        if (b == 0) zero_sums();
        _tile_loadd(5, factors + b * kBlockTokens, kFactors * 2);
        _tile_loadd(7, values, stride);
        _tile_dpbf16ps(0, 5, 7);
        _tile_loadd(7, values + 64, stride);
        _tile_dpbf16ps(1, 5, 7);
        if (value_dim - dim >= kDims) {
            _tile_loadd(7, values + 128, stride);
            _tile_dpbf16ps(2, 5, 7);
            _tile_loadd(7, values + 192, stride);
            _tile_dpbf16ps(3, 5, 7);
        }
        if (b == chunk.num_blocks - 1) store_sums(sums + dim, kMaxHeadDim * 4);
    }

  private:
    // a step of score() covers kOnce blocks and kStretch dims; a step of weigh() one block and kDims dims
    static constexpr int kOnce = 4, kStretch = 32, kDims = 64;

    KVL_IN_ALL_TILES static void zero_sums() {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    // Stores the four tiles side by side, in rows of `stride` bytes.
    KVL_IN_ALL_TILES static void store_sums(float* to, int stride) {
        _tile_stored(0, to, stride);
        _tile_stored(1, to + kLanes, stride);
        _tile_stored(2, to + 2 * kLanes, stride);
        _tile_stored(3, to + 3 * kLanes, stride);
    }

    const bool asks;
    const int key_dim, value_dim;
    const uint16_t* const queries;
};

// For the int8 cache. Queries and probabilities are 16-bit words; their upper bytes (signed) and lower bytes (unsigned)
// are multiplied separately. The unit needs quads of dims or keys, but the cache holds pairs: the first group of a task
// converts each chunk for all its groups.
struct Int8Tiles {
    using Factor = int16_t;  // a row of factors is kChunkKeys upper bytes, then as many lower ones

    template <int VECS>
    static float store_probabilities(Factor* to, const F32 (&p)[VECS], const uint8_t* const* tiles) {
        alignas(64) int16_t words[kChunkKeys] = {};
        const float scale = Int8Cache::store_probabilities(words, p, tiles);
        split(words, int(round_up(VECS * kLanes, kQuads)), reinterpret_cast<int8_t*>(to), kChunkKeys);
        return scale;
    }
    // Tiles 0 and 2 hold sums of upper bytes, 1 and 3 of lower bytes; 4 upper bytes, 5 lower bytes; 6 and 7 keys or
    // values.
    static AttentionShapes shapes(int rows) {
        return {{{rows, 64}, {rows, 64}, {rows, 64}, {rows, 64}, {rows, 64}, {rows, 64}, {16, 64}, {16, 64}}};
    }
    Int8Tiles(const Query* of, int rows, const PagedHead& head) : of(of), rows(rows), key_dim(head.key_dim), value_dim(head.value_dim) {
        alignas(64) int16_t words[kMaxHeadDim] = {};
        for (int m = 0; m < rows; m++) {
            std::memcpy(words, of[m].numbers, size_t(key_dim) * 2);
            split(words, int(round_up(key_dim, kQuads)), queries + m * 2 * kMaxHeadDim, kMaxHeadDim);
        }
    }

    int score_steps(const Chunk& chunk) const { return (chunk.num_blocks + 1) / 2; }
    KVL_IN_ALL_TILES void score(const Chunk& chunk, int group, int step, float* scores) {
        constexpr int kRowBytes = 2 * kMaxHeadDim;
        const int b = 2 * step, first = group * kLanes, width = int(round_up(key_dim, kQuads)) * kBlockTokens;
        const int blocks[2] = {b, min_of(b + 1, chunk.num_blocks - 1)};
        const uint8_t* tiles[2] = {chunk.keys[blocks[0]], chunk.keys[blocks[1]]};
        for (int i = 0; asks_for_values(rows) && i < 2; i++)
            ask_for(chunk.values[blocks[i]], kScales + value_dim * kBlockTokens);
        int8_t* const both = keys + b * width;
        for (int i = 0; group == 0 && i < 2; i++) take_keys(tiles[i], both + i * width);
        zero_sums();
        for (int dim = 0; dim < key_dim; dim += kQuads) {
            _tile_loadd(4, queries + first * kRowBytes + dim, kRowBytes);
            _tile_loadd(5, queries + first * kRowBytes + kMaxHeadDim + dim, kRowBytes);
            add_products(both + dim * kBlockTokens, both + width + dim * kBlockTokens, 64);
        }
        store_sums();
        for (int m = 0; m < min_of(rows - first, kLanes); m++)
            for (int i = 0; i < 2; i++)
                store(scores + m * kChunkKeys + (b + i) * kBlockTokens, Int8Cache::scores(total(i, m), tiles[i], of[first + m].scale));
    }

    int weigh_steps(const Chunk&) const { return value_dim / kDims; }
    KVL_IN_ALL_TILES void weigh(const Chunk& chunk, int group, int step, const Factor* factors, float* to) {
        const int8_t* bytes = reinterpret_cast<const int8_t*>(factors);
        const int dim = step * kDims;
        if (group == 0 && step == 0) take_values(chunk);
        zero_sums();
        for (int key = 0; key < chunk.num_keys; key += kQuads) {
            const int8_t* quads = values + key * value_dim + dim * 4;
            _tile_loadd(4, bytes + key, kFactors * 2);
            _tile_loadd(5, bytes + kChunkKeys + key, kFactors * 2);
            add_products(quads, quads + 64, value_dim * 4);
        }
        store_sums();
        for (int m = 0; m < min_of(rows - group * kLanes, kLanes); m++)
            for (int i = 0; i < 2; i++) store(to + m * kMaxHeadDim + dim + i * kLanes, to_float(total(i, m)));
    }

  private:
    static constexpr int kDims = 32, kQuads = 64;     // dims of a step of weigh(); dims, or keys, that a tile holds
    static constexpr int kScales = kBlockTokens * 2;  // bytes of scales before the elements of a cached tile

    // Indices for permuting words: k, k + `behind` for k = first, first + 1, ...
    static __m512i in_turn(int first, int behind) {
        const __m512i all = _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7, 6, 6, 5, 5, 4, 4, 3, 3,
                                             2, 2, 1, 1, 0, 0);
        const __m512i odd = _mm512_set1_epi32(behind << 16);
        return _mm512_add_epi16(all, _mm512_add_epi16(odd, _mm512_set1_epi16(int16_t(first))));
    }
    // Converts a K tile from pairs to quads of dims: interleaves two dims of 16 keys with the next two.
    void take_keys(const uint8_t* tile, int8_t* to) const {
        const __m512i order = in_turn(0, 16);
        for (int at = 0; at < key_dim * kBlockTokens; at += 64)
            _mm512_store_si512(to + at, _mm512_permutexvar_epi16(order, _mm512_loadu_si512(tile + kScales + at)));
    }
    static void split(const int16_t* words, int count, int8_t* to, int lower) {
        // loads as wide as the stores before them: a load that spans several stores would wait for them
        for (int i = 0; i < count; i += kLanes) {
            const __m256i both = _mm256_load_si256((const __m256i*)(words + i));
            _mm_storeu_si128((__m128i*)(to + i), _mm256_cvtepi16_epi8(_mm256_srai_epi16(both, 8)));
            _mm_storeu_si128((__m128i*)(to + lower + i), _mm256_cvtepi16_epi8(both));
        }
    }
    // Converts the V tiles of a chunk from pairs to quads of keys: interleaves 32 dims of two keys with those of the
    // next two.
    void take_values(const Chunk& chunk) {
        const __m512i first = in_turn(0, 32), second = in_turn(16, 32);
        int8_t* to = values;
        for (int b = 0; b < chunk.num_blocks; b++) {
            const uint8_t* row = chunk.values[b] + kScales;
            for (int quad = 0; quad < kBlockTokens / 4; quad++, row += value_dim * 4)
                for (int at = 0; at < value_dim * 2; at += 64, to += 128) {
                    const __m512i low = _mm512_loadu_si512(row + at), high = _mm512_loadu_si512(row + value_dim * 2 + at);
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
    // Adds the products of tiles 4 and 5 with two tiles of quads, whose rows are `stride` bytes apart.
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
    // Sums of row m with the first (0) or second (1) tile of quads: those of upper bytes times 256 plus those of lower
    // ones.
    I32 total(int tile, int m) const {
        const __m512i upper = _mm512_load_si512(sums[2 * tile] + m * kLanes);
        return {_mm512_add_epi32(_mm512_slli_epi32(upper, 8), _mm512_load_si512(sums[2 * tile + 1] + m * kLanes))};
    }

    const Query* const of;
    const int rows, key_dim, value_dim;
    // a row of queries is kMaxHeadDim upper bytes, then as many lower bytes
    alignas(64) int8_t queries[kTileQueries * 2 * kMaxHeadDim];
    alignas(64) int8_t keys[kChunkKeys * kMaxHeadDim], values[kChunkKeys * kMaxHeadDim];  // of the chunk, as quads
    alignas(64) int32_t sums[4][kTileQueries * kLanes];
};

// A turn: one group of rows over one chunk. It is scored, goes through the softmax, and then weighs the values.
template <class Tiles>
struct Turn {
    typename Tiles::Factor* factors() { return reinterpret_cast<typename Tiles::Factor*>(scores); }
    Chunk chunk;
    int group, rows;
    Shares shares;
    alignas(64) float scores[kLanes * kChunkKeys];  // the softmax overwrites a row of scores with its factors
};

// Runs the turns of some rows in a pipeline: while the vector unit computes the softmax of one turn, the tile unit
// weighs the values of the previous turn and scores the next one.
template <class Tiles>
class Turns {
  public:
    Turns(const PagedHead& head, const Query* queries, int rows, Partials* out)
        : head_(head), queries_(queries), rows_(rows), out_(out), tiles_(queries, rows, head) {}

    KVL_IN_ALL_TILES void run(int64_t from, int64_t until) {
        const int groups = (rows_ + kLanes - 1) / kLanes;
        const int64_t first = from / kChunkKeys, count = ((until + kChunkKeys - 1) / kChunkKeys - first) * groups;
        Turn<Tiles> turns[3];
        asm volatile("" ::: "memory");
        Tiles::shapes(min_of(rows_, kLanes)).load();
        for (int64_t i = -1; i <= count; i++) {
            last_ = i > 0 ? &turns[(i - 1) % 3] : nullptr;
            next_ = i + 1 < count ? &turns[(i + 1) % 3] : nullptr;
            if (next_) {
                next_->group = int((i + 1) % groups);
                next_->rows = min_of(rows_ - next_->group * kLanes, kLanes);
                next_->chunk = Chunk(head_, first + (i + 1) / groups, until);
            }
            begin_steps();
            if (i >= 0 && i < count) own(turns[i % 3]);
            else take_steps(1, 1);
        }
        _tile_release();  // saves the system from keeping 8 KB of tiles when the thread is switched out
    }

  private:
    static constexpr int kJoined = 4;  // rows whose sums one step merges

    void own(Turn<Tiles>& turn) {
        const Query* const queries = queries_ + turn.group * kLanes;
        turn.shares = weigh_keys<Tiles>(head_, turn.chunk, {queries, turn.rows, turn.scores, turn.factors(), kFactors},
                                        out_[turn.group], [&](int m) { take_steps(m + 1, turn.rows); });
    }
    void begin_steps() {
        taken_ = 0;
        weighs_ = last_ ? tiles_.weigh_steps(last_->chunk) : 0;
        scores_ = weighs_ + (next_ ? tiles_.score_steps(next_->chunk) : 0);
        steps_ = scores_ + (last_ ? (last_->rows + kJoined - 1) / kJoined : 0);
    }
    // Runs steps of the previous and the next turn until part / parts of them are done.
    KVL_IN_ALL_TILES void take_steps(int part, int parts) {
        asm volatile("" ::: "memory");
        for (const int end = steps_ * part / parts; taken_ < end; taken_++) {
            if (taken_ < weighs_) tiles_.weigh(last_->chunk, last_->group, taken_, last_->factors(), sums_);
            else if (taken_ < scores_) tiles_.score(next_->chunk, next_->group, taken_ - weighs_, next_->scores);
            else join_rows((taken_ - scores_) * kJoined);
        }
        asm volatile("" ::: "memory");
    }
    void join_rows(int first) {
        const int end = min_of(first + kJoined, last_->rows), dim = head_.value_dim;
        for (int m = first; m < end; m++)
            join(out_[last_->group].sums + m * dim, sums_ + m * kMaxHeadDim, dim, last_->shares, m);
    }

    const PagedHead& head_;
    const Query* const queries_;
    const int rows_;
    Partials* const out_;  // of each group
    Tiles tiles_;
    Turn<Tiles> *last_ = nullptr, *next_ = nullptr;
    // steps done; steps until the values are weighed; until the next turn is scored too; all steps
    int taken_ = 0, weighs_ = 0, scores_ = 0, steps_ = 0;
    alignas(64) float sums_[kLanes * kMaxHeadDim];
};

// Attention of up to kTileQueries rows over the chunks of positions [from, until), merged into out[group].
template <class Tiles>
void attend_in_tiles(const PagedHead& head, const Query* queries, int rows, int64_t from, int64_t until, Partials* out) {
    Turns<Tiles>(head, queries, rows, out).run(from, until);
}

#else

constexpr int kTileQueriesFrom = kTileQueries + 1;
struct Bf16Tiles {};
struct Int8Tiles {};
inline bool can_attend_in_tiles(int) { return false; }
template <class Tiles>
void attend_in_tiles(const PagedHead&, const Query*, int, int64_t, int64_t, Partials*) {}

#endif

// Attention of a task's rows over the chunks of positions [from, until). in_tiles: up to kTileQueries rows in groups of
// kLanes; otherwise up to kTaskRows rows in groups of kAttentionRows. out[g]: the result of group g.
template <class Cache, class Tiles>
void attend_rows(const PagedHead& head, const Query* queries, int rows, int64_t from, int64_t until, bool in_tiles, Partials* out) {
    if (in_tiles && rows >= kTileQueriesFrom) return attend_in_tiles<Tiles>(head, queries, rows, from, until, out);
    typename Cache::Factor factors[kTaskRows * kMaxHeadDim];
    Query own[kTaskRows];
    for (int m = 0; m < rows; m++) {
        own[m] = queries[m];
        own[m].numbers = Cache::factors_of(queries[m].as<typename Cache::Stored>(), head.key_dim, factors + m * kMaxHeadDim);
    }
    if (head.is_shared) return attend_shared<Cache>(head, own, rows, from, until, out);
    for (int64_t chunk = from / kChunkKeys; chunk * kChunkKeys < until; chunk++)
        attend_groups<Cache>(head, own, rows, chunk, nullptr, out);
}

}  // namespace kvl
