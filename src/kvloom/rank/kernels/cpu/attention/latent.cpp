// Step: what stands before and behind latent attention, in its absorbed form: attention runs over latents, so a query is
// taken to the latent, and its output from there, by a product of each head.
#include <algorithm>
#include <cmath>

#include "step/step.hpp"

namespace kvl {

int64_t widest_latent(const kvl_model& model) {
    int64_t width = 0;
    for (const kvl_latent& own : model.latents) {
        const int64_t heads = model.attentions[size_t(own.attention)].num_heads;
        width = std::max({width, round_up(own.q_rank, kPad), round_up(heads * own.out_dim, kPad)});
    }
    return width;
}

uint8_t* lay_out_latents(Scratch& s, const kvl_model& model, uint8_t* at) {
    int64_t cols = 0;
    for (const kvl_latent& own : model.latents)
        cols = std::max({cols, round_up(own.nope_dim, kPad), round_up(model.attentions[size_t(own.attention)].value_dim, kPad)});
    s.heads.resize(size_t(model.pool.size()));
    for (Activations& own : s.heads) own = take_activations(at, cols > 0 ? kTileRows : 0, cols);
    return at;
}

// KVL_LATENT_KEYS. Tokens are shared out among the threads.
void Step::place_latents(const kvl_instruction& instruction, int thread) {
    const bool is_int8 = shape_.kv_format == KVL_KV_INT8;
    share_rows(index_of(instruction), batch_.num_tokens, thread, [&](int64_t token) {
        is_int8 ? place_latent<Int8Cache>(instruction, token) : place_latent<Bf16Cache>(instruction, token);
    });
}

template <class Cache>
void Step::place_latent(const kvl_instruction& instruction, int64_t token) {
    const kvl_latent& latent = model_.latents[size_t(instruction.layer)];
    const kvl_attention& own = model_.attentions[size_t(latent.attention)];
    float *const row = scratch_.qkv.row(token), *const key = row + latent.keys_at;
    rms_norm(key, vector(latent.norm), own.value_dim, own.value_dim, shape_.norm_eps, key);
    turn(key + own.value_dim, instruction.rope, batch_.pos[token]);
    const Place& place = places_[size_t(token)];
    Cache::store_key(key_tile(own, place, 0), key, own.key_dim, place.slot);
    if (latent.q_rank == 0) return;
    float* const query = scratch_.attended.row(token);
    rms_norm(row, vector(latent.q_norm), latent.q_rank, latent.q_rank, shape_.norm_eps, query);
    std::fill(query + latent.q_rank, query + round_up(latent.q_rank, kPad), 0.0f);
}

static_assert(kTileRows * kMaxHeadDim <= kStripFloats, "the products of a head fit the memory of a unit");

// Multiplies, for every token and head, the floats at from(token, head) by the rows of the head in the instruction's linear,
// and calls use(token, head, products). Threads take a head with a strip of tokens at a time.
template <class From, class Use>
void Step::multiply_heads(const kvl_instruction& instruction, const HeadProduct& product, int thread, const From& from, const Use& use) {
    const Linear& linear = model_.linears[size_t(instruction.linear)];
    const int64_t panels = product.out / kPanel, strips = (batch_.num_tokens + kTileRows - 1) / kTileRows;
    const int format = linear.activation_format();
    share_whole(index_of(instruction), product.heads * strips, thread, [&](int64_t item) {
        const int64_t head = item % product.heads, strip = item / product.heads;
        const int64_t first = batch_.num_tokens * strip / strips, rows = batch_.num_tokens * (strip + 1) / strips - first;
        const Activations& x = scratch_.heads[size_t(thread)];
        float *const room = scratch_.row[size_t(thread)], *const to = scratch_.unit[size_t(thread)];
        for (int64_t r = 0; r < rows; r++) {
            const float* const row = from(first + r, head);
            std::copy(row, row + product.in, room);
            std::fill(room + product.in, room + linear.padded_cols, 0.0f);
            store_activations(x, r, room, linear.padded_cols, format);
        }
        alignas(64) float sums[kTileRows * kPanel];
        for (int64_t p = 0; p < panels; p++) {
            const int64_t panel = head * panels + p;
            const Way way(linear.format(panel), rows, model_.unit);
            for (int64_t i = 0; i < way.passes.count; i++) {
                const int64_t begin = way.passes.begin(i), end = way.passes.begin(i + 1);
                way.multiply({x, begin, linear.padded_cols, linear.panel(panel), sums}, int(end - begin));
                for (int64_t r = begin; r < end; r++) std::copy_n(sums + (r - begin) * kPanel, kPanel, to + r * product.out + p * kPanel);
            }
        }
        for (int64_t r = 0; r < rows; r++) use(first + r, head, to + r * product.out);
    });
}

// KVL_LATENT_QUERIES.
void Step::make_queries(const kvl_instruction& instruction, int thread) {
    const kvl_latent& latent = model_.latents[size_t(instruction.layer)];
    const kvl_attention& own = model_.attentions[size_t(latent.attention)];
    const int64_t size = latent.nope_dim + latent.rope_dim;
    const auto from = [&](int64_t token, int64_t head) { return scratch_.qkv.row(token) + head * size; };
    multiply_heads(instruction, {own.num_heads, latent.nope_dim, own.value_dim}, thread, from, [&](int64_t token, int64_t head, const float* products) {
        alignas(64) float query[kMaxHeadDim];
        std::copy_n(products, own.value_dim, query);
        std::copy_n(from(token, head) + latent.nope_dim, latent.rope_dim, query + own.value_dim);
        const int position = batch_.pos[token];
        turn(query + own.value_dim, instruction.rope, position);
        const int64_t at = query_at(own, token, int(head));
        uint16_t* const to = scratch_.queries + at * own.key_dim;
        const float scale = kLog2E * shape_.attention_scale * growth_at(position);
        scratch_.query_scale[at] = shape_.kv_format == KVL_KV_INT8
                                       ? Int8Cache::store_query(reinterpret_cast<int16_t*>(to), query, own.key_dim, scale)
                                       : Bf16Cache::store_query(to, query, own.key_dim, scale);
    });
}

// KVL_LATENT_VALUES.
void Step::make_values(const kvl_instruction& instruction, int thread) {
    const kvl_latent& latent = model_.latents[size_t(instruction.layer)];
    const kvl_attention& own = model_.attentions[size_t(latent.attention)];
    const auto from = [&](int64_t token, int64_t head) { return scratch_.attended.row(token) + head * own.value_dim; };
    const int64_t width = int64_t(own.num_heads) * latent.out_dim;
    multiply_heads(instruction, {own.num_heads, own.value_dim, latent.out_dim}, thread, from, [&](int64_t token, int64_t head, const float* products) {
        float* const row = scratch_.qkv.row(token);
        std::copy_n(products, latent.out_dim, row + head * latent.out_dim);
        if (head == own.num_heads - 1) std::fill(row + width, row + round_up(width, kPad), 0.0f);
    });
}

}  // namespace kvl

int32_t kvl_add_latent(kvl_model* model, const kvl_latent* latent) {
    return kvl::or_out_of_memory([=] {
        model->latents.push_back(*latent);
        return int32_t(model->latents.size()) - 1;
    });
}
