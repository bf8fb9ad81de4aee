// Step: heads and the paged KV cache (q/k norm, RoPE, cache writes, attention), and the probe of memory bandwidth.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "step/step.hpp"

namespace kvl {

// The K tile, or V tile, of a kv head that has the token's key or value.
uint8_t* Step::key_tile(const kvl_attention& own, const Place& place, int head) const {
    return (own.of_windows ? place.window : place.block) + own.keys_at + (place.tile * own.num_kv_heads + head) * kv_tile_bytes(shape_.kv_format, own.key_dim);
}
uint8_t* Step::value_tile(const kvl_attention& own, const Place& place, int head) const {
    return (own.of_windows ? place.window : place.block) + own.values_at + (place.tile * own.num_kv_heads + head) * kv_tile_bytes(shape_.kv_format, own.value_dim);
}

// Where the step's tokens are in the cache, for all layers.
void Step::find_places() {
    const int size = shape_.block_tiles * kBlockTokens;
    for (int64_t token = 0; token < batch_.num_tokens; token++) {
        const int64_t entry = int64_t(sequence_[size_t(token)]) * batch_.max_blocks + batch_.pos[token] / size;
        const int at = batch_.pos[token] % size;
        uint8_t* const block = batch_.kv + batch_.block_table[entry] * shape_.block_bytes;
        uint8_t* const window =
            batch_.window_kv ? batch_.window_kv + batch_.windows[entry] * shape_.window_block_bytes : nullptr;
        places_.push_back({block, window, at / kBlockTokens, at % kBlockTokens});
    }
}

// Divides, for one shape of attention, the query rows of each sequence and kv head (tokens x heads of its group) into tasks. The last rows of a
// prompt see the most keys, so their tasks come first, and the short ones even out the threads' work at the end.
void Step::plan_attention(const kvl_attention& shape) {
    const int heads_per_kv = shape.num_heads / shape.num_kv_heads;
    std::vector<AttentionTask>& tasks = tasks_.emplace_back();
    // with few tokens a task is a single group, so that there are more tasks than threads
    const int of_words = batch_.num_tokens >= kFusedTokens ? kTaskRows : kAttentionRows;
    const int at_once = attends_in_tiles_ && shape.projected != KVL_LATENT ? kTileQueries : of_words;
    for (int s = 0; s < batch_.num_seqs; s++) {
        const int rows = (batch_.qstart[s + 1] - batch_.qstart[s]) * heads_per_kv;
        const int tiles = (rows + at_once - 1) / at_once;
        for (int tile = tiles - 1; tile >= 0; tile--) {
            const int first = int(int64_t(rows) * tile / tiles), end = int(int64_t(rows) * (tile + 1) / tiles);
            for (int head = 0; head < shape.num_kv_heads; head++) tasks.push_back({s, head, first, end - first});
        }
    }
}

// KVL_ROPE_KV. Tokens are shared out among the threads. Two neighbouring tokens of a V tile share a pair, which two
// threads may write at the same time: each stores only its own element, which is safe.
void Step::place_heads(const kvl_instruction& instruction, int thread) {
    const bool is_int8 = shape_.kv_format == KVL_KV_INT8;
    ask_for(thread, (&instruction)[1]);
    share_rows(index_of(instruction), batch_.num_tokens, thread, [&](int64_t token) {
        is_int8 ? place_token<Int8Cache>(instruction, token) : place_token<Bf16Cache>(instruction, token);
    });
}

// Heads of keys, and of values, in a row of the linear.
static int num_keys(const kvl_attention& own) { return own.projected == KVL_QUERIES ? 0 : own.num_kv_heads; }
static int num_values(const kvl_attention& own) { return own.projected == KVL_ALL ? own.num_kv_heads : 0; }

// Normalises a value in place and stores it.
template <class Cache>
void Step::place_value(const kvl_attention& own, const Place& place, int head, float* at) const {
    const float* weight = vector(own.value_norm);
    if (weight != nullptr) rms_norm(at, weight, own.value_dim, own.value_dim, shape_.norm_eps, at);
    Cache::store_value(value_tile(own, place, head), at, own.value_dim, place.slot);
}

// Normalises and rotates a query or key head of a token in place and stores it; a value head is only stored. `head`
// counts queries first, then keys, then values, then gates. Queries and gates go to the step's scratch memory, keys and
// values to the cache.
template <class Cache>
void Step::place_head(const kvl_instruction& instruction, int64_t token, int head, float* at) {
    const kvl_attention& own = attention_of(instruction);
    const int dim = own.key_dim, position = batch_.pos[token];
    const float scale = shape_.attention_scale > 0 ? kLog2E * shape_.attention_scale : kLog2E / std::sqrt(float(dim));
    const Place& place = places_[size_t(token)];
    const float* weight = vector(head < own.num_heads ? instruction.vector : instruction.vector2);
    const auto norm_at = [&](int when) {
        if (weight != nullptr && instruction.source == when) rms_norm(at, weight, dim, dim, shape_.norm_eps, at);
    };
    const int key = head - own.num_heads, value = key - num_keys(own), gate = value - num_values(own);
    if (gate >= 0) {
        std::copy(at, at + own.value_dim, scratch_.gates.row(token) + int64_t(gate) * own.value_dim);
        return;
    }
    if (value >= 0) return place_value<Cache>(own, place, value, at);
    if (key >= 0 && own.projected == KVL_KEYS) {
        alignas(64) float copy[kMaxHeadDim];
        std::copy(at, at + dim, copy);
        place_value<Cache>(own, place, key, copy);
    }
    norm_at(KVL_NORM_HEADS);
    turn(at, instruction.rope, position);
    norm_at(KVL_NORM_ROTATED);
    if (key >= 0) return Cache::store_key(key_tile(own, place, key), at, dim, place.slot);
    const int64_t query = query_at(own, token, head);
    auto* to = reinterpret_cast<typename Cache::Stored*>(scratch_.queries + query * dim);
    scratch_.query_scale[query] = Cache::store_query(to, at, dim, scale * growth_at(position));
}

// What a query at `position` is multiplied by.
float Step::growth_at(int position) const {
    if (shape_.query_growth == 0) return 1;
    return float(1 + double(shape_.query_growth) * std::log1p(double(position / shape_.growth_unit)));
}

// Index of a query in the scratch memory: [kv head][token][heads per kv head].
int64_t Step::query_at(const kvl_attention& own, int64_t token, int head) const {
    const int each = own.num_heads / own.num_kv_heads;
    return (head / each * batch_.num_tokens + token) * each + head % each;
}

// Handles all heads of a token's row of the qkv buffer, and overwrites the row.
template <class Cache>
void Step::place_token(const kvl_instruction& instruction, int64_t token) {
    const kvl_attention& own = attention_of(instruction);
    float* row = scratch_.qkv.row(token);
    if (instruction.source == KVL_NORM_ROWS) {
        const int64_t queries = own.num_heads * own.key_dim, keys = num_keys(own) * own.key_dim;
        rms_norm(row, vector(instruction.vector), queries, queries, shape_.norm_eps, row);
        if (keys > 0) rms_norm(row + queries, vector(instruction.vector2), keys, keys, shape_.norm_eps, row + queries);
    }
    const int values = own.num_heads + num_keys(own);  // the first of them, behind queries and keys
    const int end = values + num_values(own) + (instruction.is_gated ? own.num_heads : 0);
    for (int head = 0; head < end; head++) {
        place_head<Cache>(instruction, token, head, row);
        row += head < values ? own.key_dim : own.value_dim;
    }
}

template void Step::place_head<Bf16Cache>(const kvl_instruction&, int64_t, int, float*);
template void Step::place_head<Int8Cache>(const kvl_instruction&, int64_t, int, float*);

// KVL_ATTENTION. Threads take tasks one by one, because the cost of a task depends on the length of its sequence.
void Step::attend(const kvl_instruction& instruction, int thread) {
    const std::vector<AttentionTask>& tasks = tasks_of(instruction);
    const int64_t count = int64_t(tasks.size());
    const auto next_task = [&] {
        const int64_t task = next(instruction);
        if (task >= count) ask_for_a(index_of(instruction) + 1, thread);
        return task;
    };
    model_.pool.share(thread, count, next_task, [&](Claim claim) {
        ask_for(claim.item() + model_.pool.size(), instruction);
        return attend_task(tasks[size_t(claim.item())], instruction, claim);
    });
}

// Prefetches the first keys and values of task `index` if its sequence has one token in this step: they come from
// memory, in pieces of one block, too short for the hardware prefetcher. Sequences with more tokens find them in the
// processor's cache, or read them more than once.
void Step::ask_for(int64_t index, const kvl_instruction& attention) const {
    const std::vector<AttentionTask>& tasks = tasks_of(attention);
    if (index >= int64_t(tasks.size())) return;
    const AttentionTask& task = tasks[size_t(index)];
    const int64_t token = batch_.qstart[task.sequence], position = batch_.pos[token];
    if (batch_.qstart[task.sequence + 1] - token > 1) return;
    const PagedHead head = head_of(task, attention);
    const int64_t key_bytes = kv_tile_bytes(shape_.kv_format, head.key_dim);
    const int64_t value_bytes = head.is_shared ? 0 : kv_tile_bytes(shape_.kv_format, head.value_dim);
    const int64_t most = std::max<int64_t>(1, kAskedKvBytes / (key_bytes + value_bytes));
    const int64_t passed = attention.window > 0 ? std::max<int64_t>(0, position + 1 - attention.window) : 0;
    const int64_t first = passed / kBlockTokens;
    const int64_t end = std::min(position / kBlockTokens + 1, first + std::min<int64_t>(kAskedTiles, most));
    for (int64_t tile = first; tile < end; tile++) {
        for (int64_t at = 0; at < key_bytes; at += 64) prefetch(head.key_tile(tile) + at);
        for (int64_t at = 0; at < value_bytes; at += 64) prefetch(head.value_tile(tile) + at);
    }
}

PagedHead Step::head_of(const AttentionTask& task, const kvl_instruction& attention) const {
    const kvl_attention& own = attention_of(attention);
    const int64_t key_bytes = kv_tile_bytes(shape_.kv_format, own.key_dim);
    const int64_t value_bytes = kv_tile_bytes(shape_.kv_format, own.value_dim);
    const uint8_t* const kv = own.of_windows ? batch_.window_kv : batch_.kv;
    return {kv + own.keys_at + task.kv_head * key_bytes,
            kv + own.values_at + task.kv_head * value_bytes,
            (own.of_windows ? batch_.windows : batch_.block_table) + int64_t(task.sequence) * batch_.max_blocks,
            own.of_windows ? shape_.window_block_bytes : shape_.block_bytes,
            shape_.block_tiles,
            own.num_kv_heads * key_bytes,
            own.num_kv_heads * value_bytes,
            own.key_dim,
            own.value_dim,
            shape_.attention_softcap * kLog2E,
            own.projected == KVL_LATENT};
}

// Zeros the padding behind `width` floats of a row, which a layer with a wider output may have left there.
static void clear_behind(float* row, int64_t width) { std::fill(row + width, row + round_up(width, kPad), 0.0f); }

// Returns whether the caller wins the claim; else nothing is written.
bool Step::attend_task(const AttentionTask& task, const kvl_instruction& instruction, Claim& claim) {
    const kvl_attention& shape = attention_of(instruction);
    const int rows = task.num_rows, dim = shape.value_dim, heads_per_kv = shape.num_heads / shape.num_kv_heads;
    const PagedHead head = head_of(task, instruction);
    Query queries[kTileQueries];
    Partials partials[kMostGroups];
    const bool in_tiles = attends_in_tiles_ && !head.is_shared;
    const int each = in_tiles ? kLanes : kAttentionRows;  // rows per group
    alignas(64) float sums[kTileQueries * kMaxHeadDim];
    std::fill(sums, sums + rows * dim, 0.0f);
    for (int g = 0; g < kMostGroups; g++) partials[g].sums = sums + g * each * dim;
    const int64_t first = query_at(shape, batch_.qstart[task.sequence], task.kv_head * heads_per_kv) + task.first_row;
    int64_t from = INT64_MAX, until = 0;
    for (int m = 0; m < rows; m++) {
        const int64_t token = batch_.qstart[task.sequence] + (task.first_row + m) / heads_per_kv;
        const int64_t window = instruction.window, position = batch_.pos[token];
        const int64_t last = shape_.sees_ahead ? batch_.pos[batch_.qstart[task.sequence + 1] - 1] : position;
        const int64_t end = 1 + (window > 0 ? std::min(last, position + window - 1) : last);
        queries[m] = {scratch_.queries + (first + m) * shape.key_dim, scratch_.query_scale[first + m],
                      window > 0 ? std::max<int64_t>(0, position + 1 - window) : 0, end};
        from = std::min(from, queries[m].from);
        until = std::max(until, end);
    }
    const bool in_pairs = model_.unit == KVL_PAIRS;
    const auto of_bf16 = in_pairs ? attend_rows<Bf16Pairs, Bf16Tiles> : attend_rows<Bf16Cache, Bf16Tiles>;
    const auto attend = shape_.kv_format == KVL_KV_INT8 ? attend_rows<Int8Cache, Int8Tiles> : of_bf16;
    attend(head, queries, rows, from, until, in_tiles, partials);
    if (!claim.wins()) return false;
    const float* sinks = vector(instruction.vector);
    const bool is_fused = does_next(instruction);
    for (int m = 0; m < rows; m++) {
        const int64_t token = batch_.qstart[task.sequence] + (task.first_row + m) / heads_per_kv;
        const int64_t own = int64_t(task.kv_head) * heads_per_kv + (task.first_row + m) % heads_per_kv;
        const Partials& group = partials[m / each];
        const F32 inverse = splat(share_beside(sinks ? sinks + own : nullptr, group.peak[m % each], group.weight[m % each]));
        float* const head_sums = sums + m * dim;
        float* const to = is_fused ? head_sums : scratch_.attended.row(token) + own * dim;
        const float* const gates = instruction.is_gated ? scratch_.gates.row(token) + own * dim : nullptr;
        for (int i = 0; i < dim; i += kLanes) {
            const F32 value = mul(load(head_sums + i), inverse);
            store(to + i, gates ? mul(value, sigmoid(load(gates + i))) : value);
        }
        if (is_fused) store_columns((&instruction)[1], token, own * dim, to, dim);
        else if (own == shape.num_heads - 1) clear_behind(scratch_.attended.row(token), int64_t(shape.num_heads) * dim);
    }
    return true;
}

}  // namespace kvl

// Reads `lines` cache lines and returns their sum. Four independent sums, so that the loop waits for memory only.
static int64_t read_all(const uint8_t* data, int64_t lines) {
    kvl::I32 sums[4] = {kvl::splat_int(0), kvl::splat_int(0), kvl::splat_int(0), kvl::splat_int(0)};
    for (int64_t line = 0; line + 4 <= lines; line += 4)
        for (int i = 0; i < 4; i++) {
            const uint8_t* at = data + (line + i) * 64;
            kvl::prefetch(at + kvl::kPrefetchBytes);
            sums[i] = kvl::dot_nibbles(sums[i], kvl::low_nibbles(at), 1);
        }
    return kvl::sum(kvl::add(kvl::add(sums[0], sums[1]), kvl::add(sums[2], sums[3])));
}

static double probe_bandwidth(kvl_model* model, int64_t bytes, int32_t repeats) {
    const kvl::HugeBuffer buffer(bytes);
    std::memset(buffer.as(), 1, size_t(bytes));  // pages never written would all map to one page of zeros
    std::atomic<int64_t> keep{0};  // uses the sums, so that compilers do not drop the reads
    double best = 0;
    for (int i = 0; i < repeats; i++) {
        const auto start = std::chrono::steady_clock::now();
        model->pool.run([&](int thread) {
            const int64_t begin = bytes / 64 * thread / model->pool.size();
            const int64_t end = bytes / 64 * (thread + 1) / model->pool.size();
            keep += read_all(buffer.as() + begin * 64, end - begin);
        });
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        best = std::max(best, double(bytes) / took.count());
    }
    return best;
}

double kvl_probe_bandwidth(kvl_model* model, int64_t bytes, int32_t repeats) {
    return kvl::or_out_of_memory([=] { return probe_bandwidth(model, bytes, repeats); });
}
