// Compares every kernel of this build with its scalar reference, for every number of rows and every remainder, and
// prints differences.
#include <numeric>

#include "activations/gates.hpp"
#include "activations/rope.hpp"
#include "check.hpp"
#include "linear/gemm.hpp"
#include "lora_test.cpp"
#include "model/model.hpp"
#include "numbers_test.cpp"
#include "panels_test.cpp"
#include "scalar.hpp"

using namespace kvl;

// Panels of three formats in one linear: each begins where the previous one ends, whichever thread's arena it is in.
static void test_stretches(int threads) {
    kvl_shape shape{};
    shape.num_threads = threads;
    kvl_model* model = kvl_new(&shape);
    const int formats[] = {KVL_INT4, KVL_FP4_16, KVL_INT8_32}, panels[] = {3, 1, 2};
    const int64_t cols = 40;
    kvl_add_linear(model, 6 * kPanel - 5, cols, formats[0]);
    kvl_set_format(model, 0, 3 * kPanel, formats[1]);
    kvl_set_format(model, 0, 4 * kPanel, formats[2]);
    kvl_allocate(model);
    const Linear& linear = model->linears[0];
    std::vector<const uint8_t*> ends(static_cast<size_t>(threads));
    for (int part = 0, index = 0; part < 3; part++)
        for (int i = 0; i < panels[part]; i++, index++) {
            near(linear.format(index), formats[part], 0, "form", threads, index);
            const size_t owner = size_t(linear.owner(index));
            if (ends[owner]) near(double(linear.panel(index) - ends[owner]), 0, 0, "panel", threads, index);
            ends[owner] = linear.panel(index) + 2 * block_bytes(formats[part]);
        }
    for (int t = 0; t < threads; t++)
        if (ends[size_t(t)]) near(double(ends[size_t(t)] - kvl_arena(model, t)), double(kvl_arena_bytes(model, t)), 0, "arena", threads, t);
    kvl_free(model);
}

// Sizes of a head's keys and values, and tiles of a block of the cache. is_shared: values are the first numbers of keys.
struct HeadSizes {
    int key_dim, value_dim, tiles;
    bool is_shared = false;
};

// Stores random keys and values; compares what is found there.
template <class Cache>
static void store_heads(const PagedHead& head, int length) {
    constexpr int format = Cache::kFormat;
    const int key_dim = head.key_dim, value_dim = head.value_dim;
    std::vector<float> rope = noise(key_dim);
    for (int key = 0; key < length; key++) {
        std::vector<float> k = noise(key_dim), want = k, v = noise(value_dim);
        rotate(k.data(), rope.data(), key_dim);
        scalar::rotate(want.data(), rope.data(), key_dim);
        const int64_t tile = key / kBlockTokens;
        Cache::store_key(const_cast<uint8_t*>(head.key_tile(tile)), k.data(), key_dim, key % kBlockTokens);
        if (!head.is_shared) Cache::store_value(const_cast<uint8_t*>(head.value_tile(tile)), v.data(), value_dim, key % kBlockTokens);
        const bool is_int8 = format == KVL_KV_INT8;  // half a step, and the rounding of the scale itself
        const double key_step = 1.1 * double(scalar::half_step(k.data(), 0, key_dim));
        const double value_step = 1.1 * double(scalar::half_step(v.data(), 0, value_dim));
        for (int d = 0; d < key_dim; d++) {
            const double a = double(k[size_t(d)]);
            near(a, want[size_t(d)], 1e-5, "rotate", key_dim, d);
            near(scalar::key_at(head, format, key, d), a, is_int8 ? key_step : std::fabs(a) / 256, "key", key, d);
        }
        for (int d = 0; d < value_dim && !head.is_shared; d++) {
            const double b = double(v[size_t(d)]);
            near(scalar::value_at(head, format, key, d), b, is_int8 ? value_step : std::fabs(b) / 256, "value", key, d);
        }
    }
}

// Attention over keys and values stored in a form of the cache, for every number of query rows and lengths around every
// limit.
template <class Cache, class Tiles>
static void test_attention(HeadSizes sizes, int length, int window) {
    const int block_tokens = sizes.tiles * kBlockTokens, blocks = (length + block_tokens - 1) / block_tokens;
    const int format = Cache::kFormat, key_dim = sizes.key_dim, dim = sizes.value_dim;
    const int64_t key_bytes = kv_tile_bytes(format, key_dim), value_bytes = sizes.is_shared ? 0 : kv_tile_bytes(format, dim);
    const int64_t block_bytes = sizes.tiles * (key_bytes + value_bytes);
    std::vector<uint8_t> cache(size_t(blocks * block_bytes));
    std::vector<int32_t> table(static_cast<size_t>(blocks));
    std::iota(table.rbegin(), table.rend(), 0);
    const float softcap = window ? 0.8f : 0.0f;
    const PagedHead head{cache.data(), cache.data() + sizes.tiles * key_bytes, table.data(), block_bytes, sizes.tiles,
                         key_bytes, value_bytes, key_dim, dim, softcap, sizes.is_shared};
    store_heads<Cache>(head, length);
    const bool has_tiles_too = !sizes.is_shared && (!std::is_same_v<Cache, Bf16Pairs> || !has_pairs());
    if (has_tiles_too) test_attention_in_tiles<Cache, Tiles>(head, length, window);
    for (int rows = 1; rows <= kTaskRows; rows += rows < kAttentionRows ? 1 : kAttentionRows - 1) {  // then uneven groups
        std::vector<typename Cache::Stored> q(size_t(rows * key_dim));
        std::vector<float> sums(size_t(rows * dim));
        std::vector<Query> queries;
        Partials partials[kAttentionGroups];
        for (int g = 0; g < kAttentionGroups; g++) partials[g].sums = sums.data() + g * kAttentionRows * dim;
        for (int m = 0; m < rows; m++) {
            const float scale = Cache::store_query(q.data() + m * key_dim, noise(key_dim).data(), key_dim, 1.0f / std::sqrt(float(key_dim)));
            const int64_t until = std::max(1, length - rows + 1 + m);
            queries.push_back({q.data() + m * key_dim, scale, window ? std::max<int64_t>(0, until - window) : 0, until});
        }
        attend_rows<Cache, Tiles>(head, queries.data(), rows, queries[0].from, length, false, partials);
        std::vector<double> want(static_cast<size_t>(dim));
        const double tolerance = format == KVL_KV_INT8 ? 0.001 : 0.02;  // what bf16 probabilities lose, 15 bits keep
        for (int m = 0; m < rows; m++) {
            const float weight = partials[m / kAttentionRows].weight[m % kAttentionRows];
            scalar::attend(head, format, queries[size_t(m)], want.data());
            for (int d = 0; d < dim; d++) near(sums[size_t(m * dim + d)] / weight, want[size_t(d)], tolerance, "attend", length, d);
        }
    }
}

static void test_every_attention(HeadSizes sizes, int length, int window) {
    test_attention<Bf16Cache, Bf16Tiles>(sizes, length, window);
    if (has_pairs()) test_attention<Bf16Pairs, Bf16Tiles>(sizes, length, window);
    test_attention<Int8Cache, Int8Tiles>(sizes, length, window);
}

// The largest integer sum of int8 scores: queries and keys that are all of one size, up to the largest heads.
static void test_largest_scores() {
    for (int dim : {256, 512, 544, kMaxHeadDim}) {
        const std::vector<float> ones(size_t(dim), 1.0f);
        std::vector<uint8_t> tile(size_t(kv_tile_bytes(KVL_KV_INT8, dim)));
        std::vector<int16_t> q(ones.size());
        Int8Cache::store_key(tile.data(), ones.data(), dim, 0);
        const Query query{q.data(), Int8Cache::store_query(q.data(), ones.data(), dim, 1), 0, 1};
        const uint8_t* const tiles[] = {tile.data()};
        alignas(64) float scores[kChunkKeys];
        score_blocks<Int8Cache, 1, 1>(tiles, dim, &query, scores);
        near(scores[0], dim, dim * 1e-3, "largest score", dim, 0);
    }
}

// Heads of zeros, of the smallest and of very large numbers: cached values are finite.
static void test_extreme_heads() {
    const int dim = 32;
    for (float size : {0.0f, 1e-38f, 1e-9f, 1e30f}) {
        std::vector<uint8_t> tile(size_t(kv_tile_bytes(KVL_KV_INT8, dim)));
        std::vector<float> head(size_t(dim), size);
        std::vector<int16_t> q(static_cast<size_t>(dim));
        const int32_t table = 0;
        const PagedHead cached{tile.data(), tile.data(), &table, 0, 1, 0, 0, dim, dim, 0};
        Int8Cache::store_key(tile.data(), head.data(), dim, 3);
        near(std::isfinite(Int8Cache::store_query(q.data(), head.data(), dim, 1)), 1, 0, "query scale", 0, 0);
        const double want = std::min(double(size), double(kLargestFp16) * 127);
        near(scalar::key_at(cached, KVL_KV_INT8, 3, 5), want, 1e-7 + want * 0.01, "extreme key", int64_t(std::log10(size)), 0);
    }
}

// In a step's threads subnormal floats are 0, but subnormal fp16 numbers keep their values; afterwards the caller's own
// setting holds again.
static void test_tiny_numbers() {
    volatile float tiny = 1e-40f, one = 1;
    Pool pool(3);
    std::atomic<int> zeros{0}, wrong{0};
    pool.run([&](int) {
        zeros += tiny * one == 0;
        for (int bits = 0; bits < 0x7c00; bits++) wrong += float_to_fp16(fp16_to_float(uint16_t(bits))) != bits;
    });
    near(wrong, 0, 0, "fp16 in a step", 0, 0);
#if defined(__x86_64__)
    near(zeros, 3, 0, "tiny floats", 0, 0);
#endif
    near(tiny * one > 0, 1, 0, "tiny floats of the caller", 0, 0);
}

// Drawing: logits in memory of exactly their size, every remainder of a block, each rule alone and all together.
static void test_draw() {
    for (int count = 1; count < 140; count++) {
        std::vector<float> logits = noise(count, 3);
        if (count % 3 == 0) logits[size_t(count / 2)] = -std::numeric_limits<float>::infinity();
        if (count % 5 == 0) logits[0] = -std::numeric_limits<float>::infinity();  // which point 0 is nearest to
        for (float top_p : {1.0f, 0.95f, 0.5f, 0.01f, 0.0f})
            for (float min_p : {0.0f, 0.02f, 0.4f})
                for (double point : {0.0, 0.31, 0.72, 0.99}) {
                    const kvl_draw_rules rules{count % 2 ? 0.7f : 1.3f, top_p, min_p, point};
                    near(kvl_draw(logits.data(), count, &rules), scalar::draw(logits, rules), 0, "draw", count, int64_t(100 * top_p));
                }
    }
}

// The router of `count` experts: logits, choice, and the rows of each expert.
static void test_experts(int count, int64_t cols) {
    const std::vector<float> router = noise(count * cols), x = noise(cols);
    std::vector<float> logits(size_t(round_up(count, kLanes)), NAN);
    score(router.data(), x.data(), cols, count, logits.data());
    for (int e = 0; e < count; e++) {
        const double want = std::inner_product(x.begin(), x.end(), router.begin() + e * cols, 0.0);
        near(logits[size_t(e)], want, 1e-4 * double(cols), "score", count, e);
        float alone;  // the bits do not depend on who else is scored
        score(router.data() + e * cols, x.data(), cols, 1, &alone);
        near(alone, logits[size_t(e)], 0, "score alone", count, e);
        logits[size_t(e)] = float(int(generator() % 7)) - 3;  // many are equal
    }
    for (int taken = 1; taken <= count; taken++)
        for (bool weighs_chosen : {false, true}) {
            std::vector<float> own = logits;
            std::vector<Choice> got(static_cast<size_t>(taken));
            choose(own.data(), count, taken, weighs_chosen, got.data());
            const auto want = scalar::choose({logits.begin(), logits.begin() + count}, taken, weighs_chosen);
            for (int i = 0; i < taken; i++) {
                near(got[size_t(i)].expert, want[size_t(i)].expert, 0, "choice", count, i);
                near(got[size_t(i)].weight, want[size_t(i)].weight, 1e-6, "weight", count, i);
            }
        }
}

// Every way of choosing `taken` of 24 experts in `groups` groups.
static void test_routing(int groups, int kept_groups, int taken) {
    constexpr int kCount = 24;
    const std::vector<float> logits = noise(kCount), correction = noise(kCount);
    for (int way = 0; way < 16; way++) {
        const float* const own_correction = way & 4 ? correction.data() : nullptr;
        const Routing routing{kCount, taken, (way & 1) != 0, (way & 2) != 0, groups, kept_groups, 2.5f, 1 + way / 8, own_correction};
        std::vector<float> own = logits, ranks(32);
        own.resize(ranks.size(), NAN);
        std::vector<Choice> got(static_cast<size_t>(taken));
        choose(own.data(), ranks.data(), routing, got.data());
        const auto want = scalar::choose(logits, routing);
        for (size_t i = 0; i < size_t(taken); i++) near(got[i].expert, want[i].expert, 0, "routing", way, int(i));
        for (size_t i = 0; i < size_t(taken); i++) near(got[i].weight, want[i].weight, 1e-5, "weight", way, int(i));
    }
}

static void test_groups() {
    const Choice chosen[] = {{4, 0.1f}, {1, 0.2f}, {1, 0.3f}, {0, 0.4f}, {4, 0.5f}, {1, 0.6f}};  // of three rows
    Groups groups;
    for (int again = 0; again < 2; again++) groups.build(chosen, 3, 2, 6);
    near(groups.expert == std::vector<int32_t>{0, 1, 4}, 1, 0, "touched experts", groups.size(), 0);
    near(groups.begin == std::vector<int32_t>{0, 1, 4, 6}, 1, 0, "slots", groups.slots(), 0);
    near(groups.row == std::vector<int32_t>{1, 0, 1, 2, 0, 2}, 1, 0, "rows", groups.slots(), 0);
    near(groups.weight == std::vector<float>{0.4f, 0.2f, 0.3f, 0.6f, 0.1f, 0.5f}, 1, 0, "weights", groups.slots(), 0);
}

static void test_sinks() {
    for (float score : {-40.0f, 0.0f, 2.5f, 60.0f})
        for (float peak : {-30.0f, 3.0f}) {
            const double sink = std::exp2(double(score * kLog2E) - double(peak));
            near(double(share_beside(&score, peak, 1.7f)) * (1.7 + sink), 1, 1e-5, "sink", int64_t(score), int64_t(peak));
        }
    near(share_beside(nullptr, 2.0f, 1.7f), 1.0f / 1.7f, 0, "no sink", 0, 0);
}

static void test_pool() {
    for (int threads : {1, 2, 3, 8}) {
        Pool pool(threads);
        std::vector<int> seen(static_cast<size_t>(threads), 0);
        for (int round = 0; round < 50; round++)
            pool.run([&](int thread) {
                seen[size_t(thread)]++;
                pool.barrier(thread);
                near(std::accumulate(seen.begin(), seen.end(), 0), threads * (round + 1), 0, "barrier", threads, round);
                pool.barrier(thread);
            });
    }
}

static void test_items_are_done_once() {
    for (int threads : {1, 2, 3, 8})
        for (int64_t count : {0, 1, 7, 200}) {
            Pool pool(threads);
            std::vector<int> times(size_t(count), 0);
            std::atomic<int64_t> next{0};
            pool.run([&](int thread) {
                pool.share(thread, count, [&] { return next++; }, [&](Claim claim) {
                    if (!claim.wins()) return false;
                    times[size_t(claim.item())]++;
                    return true;
                });
                near(double(std::count(times.begin(), times.end(), 1)), double(count), 0, "done once", threads, count);
            });
        }
}

// Thread 1 stops in the middle of its item until thread 0 has gone through two phases; its result is not used.
static void test_a_late_thread_is_not_waited_for() {
    if (!kHelps) return;
    Pool pool(2);
    std::atomic<int64_t> next[2] = {};
    std::atomic<bool> is_taken{false}, is_over{false};
    std::vector<int> results[2] = {std::vector<int>(4, 0), std::vector<int>(4, 0)};
    pool.run([&](int thread) {
        for (int phase = 0; phase < 2; phase++) {
            while (thread == 0 && !is_taken) pause_cpu();
            const auto work = [&](Claim claim) {
                const int result = 10 * phase + thread + 1;
                is_taken = true;
                while (thread == 1 && !is_over) pause_cpu();
                if (claim.wins()) results[phase][size_t(claim.item())] = result;
                else return false;
                return true;
            };
            pool.share(thread, 4, [&] { return next[phase]++; }, work);
        }
        if (thread == 0) is_over = true;
    });
    for (int phase = 0; phase < 2; phase++)
        for (size_t i = 0; i < 4; i++) near(results[phase][i], 10 * phase + 1, 0, "result of thread 0", phase, int64_t(i));
}

static void test_every_kernel() {
    for (int format : {KVL_INT8, KVL_INT4, KVL_INT8_CHANNEL, KVL_BF16})
        for (int64_t rank : {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 40})
            for (int64_t cols : {64, 100}) test_adapters(format, cols, rank, cols == 64 ? kPanel : kPanel - 3);
    test_numbers();
    for (int64_t cols : {1, 15, 16, 63, 64, 65, 200}) test_norm_and_quantisation(cols);
    for (int64_t cols : {1, 31, 33, 64, 96, 200}) {
        for (int format : {KVL_INT8, KVL_INT8_32, KVL_INT4, KVL_BF16}) test_quantised(format, cols);
        for (int format : {KVL_INT4, KVL_INT5, KVL_INT8_MIN}) test_kept(format, cols, 32, true);
        for (int format : {KVL_INT4, KVL_INT8_32, KVL_IQ4, KVL_FP4}) test_kept(format, cols, 32, false);
        test_kept(KVL_INT8_CHANNEL, cols, cols, false);
        for (int64_t run : {64, 128, 200}) test_kept(KVL_INT4, cols, run, true);
    }
    for (float size : {3e-19f, 1e15f}) test_quantised(KVL_BF16, 200, size);
    test_quantised(KVL_INT8, 840);  // wider than what the tile unit takes at a time
    test_kept(KVL_INT4, 840, 32, true);
    test_kept(KVL_INT8_CHANNEL, 840, 840, false);
    test_largest_sums();
    for (int64_t cols : {16, 48, 256, 840}) test_kept(KVL_FP4_16, cols, 16, false);
    for (int64_t cols : {64, 832}) test_kept(KVL_INT2, cols, 64, false);
    for (int64_t cols : {128, 896}) test_kept(KVL_INT1, cols, 128, false);
    for (int64_t cols : {256, 1024}) {  // the second is wider than what is unpacked at a time
        test_kept(KVL_INT2_256, cols, 256, false);
        test_kept(KVL_INT2_K, cols, 16, true, 0, 15);
        test_kept(KVL_INT3_K, cols, 16, false, -32, 31);
        for (int format : {KVL_INT4_K, KVL_INT5_K}) test_kept(format, cols, 32, true, 0, 63);
        test_kept(KVL_INT6_K, cols, 16, false, -128, 127);
        for (int format : {KVL_IQ1_M, KVL_IQ2_XS, KVL_IQ2_S}) test_kept(format, cols, 16, false, 1, 16);
        for (int format : {KVL_IQ1_S, KVL_IQ2_XXS, KVL_IQ3_XXS, KVL_IQ3_S}) test_kept(format, cols, 32, false, 1, 16);
    }
    for (int threads : {1, 2, 3, 7}) test_stretches(threads);
    for (int dim : {32, 64, 96, 128, 256})
        for (int length : {1, 15, 16, 17, 127, 128, 129, 300}) test_every_attention({dim, dim, 1}, length, 0);
    for (HeadSizes sizes : {HeadSizes{512, 512, 1}, {kMaxHeadDim, 512, 2}, {192, 128, 3}, {32, 96, 2}, {kMaxHeadDim, 512, 1, true}, {96, 64, 3, true}})
        for (int length : {1, 17, 129, 300}) test_every_attention(sizes, length, 0);
    for (int window : {1, 16, 37, 128, 500}) test_every_attention({64, 64, 2}, 300, window);
    test_largest_scores();
    test_extreme_heads();
    for (int count : {1, 3, 4, 5, 16, 17, 33}) test_experts(count, count % 2 ? 64 : 192);
    for (int kept : {1, 2, 4}) test_routing(4, kept, 5);
    test_groups();
    test_sinks();
    test_draw();
    test_tiny_numbers();
    test_pool();
    test_items_are_done_once();
    test_a_late_thread_is_not_waited_for();
}
