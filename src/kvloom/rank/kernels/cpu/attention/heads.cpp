// Step: heads and the paged KV cache (q/k norm, RoPE, cache writes, attention), and the probe of memory bandwidth.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "step/step.hpp"

namespace kvl {

// The tiles of a layer: side 0 = keys, 1 = values. The cache is [layers][side][blocks][kv_heads] tiles.
uint8_t* Step::cache(int layer, int side) const {
    return batch_.kv + (int64_t(layer) * 2 + side) * batch_.num_blocks * shape_.num_kv_heads * tile_bytes_;
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

// Normalises and rotates a query or key head of a token in place and stores it; a value head is only stored. `head`
// counts queries first, then keys, then values, then gates. Queries and gates go to the step's scratch memory, keys and
// values to the cache.
template <class Cache>
void Step::place_head(const kvl_instruction& instruction, int64_t token, int head, float* at) {
    const int dim = shape_.head_dim, position = batch_.pos[token];
    const float scale = shape_.attention_scale > 0 ? kLog2E * shape_.attention_scale : kLog2E / std::sqrt(float(dim));
    const int32_t* table = batch_.block_table + int64_t(sequence_[size_t(token)]) * batch_.max_blocks;
    const int64_t block = int64_t(table[position / kBlockTokens]) * shape_.num_kv_heads * tile_bytes_;
    const int slot = position % kBlockTokens;
    const RopeTable rope = instruction.rope < 0 ? RopeTable{nullptr, 0} : model_.ropes[size_t(instruction.rope)];
    const float* weight = vector(head < shape_.num_heads ? instruction.vector : instruction.vector2);
    const auto norm_at = [&](int when) {
        if (weight != nullptr && instruction.source == when) rms_norm(at, weight, dim, dim, shape_.norm_eps, at);
    };
    const int key = head - shape_.num_heads, value = key - shape_.num_kv_heads, gate = value - shape_.num_kv_heads;
    if (gate >= 0) {
        std::copy(at, at + dim, scratch_.gates.row(token) + int64_t(gate) * dim);
        return;
    }
    if (value >= 0) return Cache::store_value(cache(instruction.layer, 1) + block + value * tile_bytes_, at, dim, slot);
    norm_at(KVL_NORM_HEADS);
    if (rope.dim > 0) rotate(at, rope.at + int64_t(position) * rope.dim, rope.dim);
    norm_at(KVL_NORM_ROTATED);
    if (key >= 0) return Cache::store_key(cache(instruction.layer, 0) + block + key * tile_bytes_, at, dim, slot);
    const int64_t query = query_at(token, head);
    auto* to = reinterpret_cast<typename Cache::Stored*>(scratch_.queries + query * dim);
    scratch_.query_scale[query] = Cache::store_query(to, at, dim, scale * growth_at(position));
}

// What a query at `position` is multiplied by.
float Step::growth_at(int position) const {
    if (shape_.query_growth == 0) return 1;
    return float(1 + double(shape_.query_growth) * std::log1p(double(position / shape_.growth_unit)));
}

// Index of a query in the scratch memory: [kv head][token][heads per kv head].
int64_t Step::query_at(int64_t token, int head) const {
    return (head / heads_per_kv_ * batch_.num_tokens + token) * heads_per_kv_ + head % heads_per_kv_;
}

// Handles all heads of a token's row of the qkv buffer, and overwrites the row.
template <class Cache>
void Step::place_token(const kvl_instruction& instruction, int64_t token) {
    float* row = scratch_.qkv.row(token);
    if (instruction.source == KVL_NORM_ROWS) {
        const int64_t queries = model_.query_width(), keys = model_.kv_width();
        rms_norm(row, vector(instruction.vector), queries, queries, shape_.norm_eps, row);
        rms_norm(row + queries, vector(instruction.vector2), keys, keys, shape_.norm_eps, row + queries);
    }
    const int gates = instruction.is_gated ? shape_.num_heads : 0;
    for (int head = 0; head < shape_.num_heads + 2 * shape_.num_kv_heads + gates; head++, row += shape_.head_dim)
        place_head<Cache>(instruction, token, head, row);
}

template void Step::place_head<Bf16Cache>(const kvl_instruction&, int64_t, int, float*);
template void Step::place_head<Int8Cache>(const kvl_instruction&, int64_t, int, float*);

// KVL_ATTENTION. Threads take tasks one by one, because the cost of a task depends on the length of its sequence.
void Step::attend(const kvl_instruction& instruction, int thread) {
    const int64_t count = int64_t(tasks_.size());
    const auto next_task = [&] {
        const int64_t task = next(instruction);
        if (task >= count) ask_for_a(index_of(instruction) + 1, thread);
        return task;
    };
    model_.pool.share(thread, count, next_task, [&](Claim claim) {
        ask_for(claim.item() + model_.pool.size(), instruction);
        return attend_task(tasks_[size_t(claim.item())], instruction, claim);
    });
}

// Prefetches the first keys and values of task `index` if its sequence has one token in this step: they come from
// memory, in pieces of one block, too short for the hardware prefetcher. Sequences with more tokens find them in the
// processor's cache, or read them more than once.
void Step::ask_for(int64_t index, const kvl_instruction& attention) const {
    if (index >= int64_t(tasks_.size())) return;
    const AttentionTask& task = tasks_[size_t(index)];
    const int64_t token = batch_.qstart[task.sequence], position = batch_.pos[token];
    if (batch_.qstart[task.sequence + 1] - token > 1) return;
    const int32_t* table = batch_.block_table + int64_t(task.sequence) * batch_.max_blocks;
    const int64_t passed = attention.window > 0 ? std::max<int64_t>(0, position + 1 - attention.window) : 0;
    const int64_t first = passed / kBlockTokens, end = std::min(position / kBlockTokens + 1, first + kAskedBlocks);
    for (int64_t block = first; block < end; block++)
        for (int side = 0; side < 2; side++) {
            const int64_t tile = table[block] * int64_t(shape_.num_kv_heads) + task.kv_head;
            const uint8_t* from = cache(attention.layer, side) + tile * tile_bytes_;
            for (int64_t at = 0; at < tile_bytes_; at += 64) prefetch(from + at);
        }
}

// Returns whether the caller wins the claim; else nothing is written.
bool Step::attend_task(const AttentionTask& task, const kvl_instruction& instruction, Claim& claim) {
    const int dim = shape_.head_dim, rows = task.num_rows, layer = instruction.layer;
    const int64_t tile = task.kv_head * tile_bytes_;
    const PagedHead head{cache(layer, 0) + tile, cache(layer, 1) + tile,
                         batch_.block_table + int64_t(task.sequence) * batch_.max_blocks,
                         shape_.num_kv_heads * tile_bytes_, dim, shape_.attention_softcap * kLog2E};
    Query queries[kTileQueries];
    Partials partials[kMostGroups];
    const int each = attends_in_tiles_ ? kLanes : kAttentionRows;  // rows per group
    alignas(64) float sums[kTileQueries * kMaxHeadDim];
    std::fill(sums, sums + rows * dim, 0.0f);
    for (int g = 0; g < kMostGroups; g++) partials[g].sums = sums + g * each * dim;
    const int64_t first = query_at(batch_.qstart[task.sequence], task.kv_head * heads_per_kv_) + task.first_row;
    int64_t from = INT64_MAX, until = 0;
    for (int m = 0; m < rows; m++) {
        const int64_t token = batch_.qstart[task.sequence] + (task.first_row + m) / heads_per_kv_;
        const int64_t window = instruction.window, position = batch_.pos[token];
        const int64_t last = shape_.sees_ahead ? batch_.pos[batch_.qstart[task.sequence + 1] - 1] : position;
        const int64_t end = 1 + (window > 0 ? std::min(last, position + window - 1) : last);
        queries[m] = {scratch_.queries + (first + m) * dim, scratch_.query_scale[first + m],
                      window > 0 ? std::max<int64_t>(0, position + 1 - window) : 0, end};
        from = std::min(from, queries[m].from);
        until = std::max(until, end);
    }
    const bool in_pairs = model_.unit == KVL_PAIRS;
    const auto of_bf16 = in_pairs ? attend_rows<Bf16Pairs, Bf16Tiles> : attend_rows<Bf16Cache, Bf16Tiles>;
    const auto attend = shape_.kv_format == KVL_KV_INT8 ? attend_rows<Int8Cache, Int8Tiles> : of_bf16;
    attend(head, queries, rows, from, until, attends_in_tiles_, partials);
    if (!claim.wins()) return false;
    const float* sinks = vector(instruction.vector);
    const bool is_fused = does_next(instruction);
    for (int m = 0; m < rows; m++) {
        const int64_t token = batch_.qstart[task.sequence] + (task.first_row + m) / heads_per_kv_;
        const int64_t own = int64_t(task.kv_head) * heads_per_kv_ + (task.first_row + m) % heads_per_kv_;
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
