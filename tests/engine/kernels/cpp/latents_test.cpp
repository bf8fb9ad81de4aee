// Compares whole steps of a layer of latent attention with a plain pass in the form without absorption, which makes keys
// and values of every head of the latents.
#include "plain.hpp"

namespace {

constexpr int kRank = 64, kNope = 24, kOut = 32, kLatentHeads = 5, kQRank = 32, kSize = kNope + kDim, kKeyDim = kRank + kDim;
constexpr float kScale = 0.15f;

struct LatentCase {
    int kv_format, threads;
    bool has_q_rank;
};

class Latents {
  public:
    explicit Latents(const LatentCase& drawn) : drawn(drawn), cache(size_t(kBlocks * kv_tile_bytes(drawn.kv_format, kKeyDim))) {
        kvl_shape shape{kHidden, kMlp, kVocab, drawn.threads, drawn.kv_format, 1, kv_tile_bytes(drawn.kv_format, kKeyDim), 1e-5f, 1, 1, 1};
        shape.attention_scale = kScale;
        model.reset(kvl_new(&shape));
        kvl_add_rope(model.get(), rope.data(), kDim);
        const kvl_attention heads{kLatentHeads, 1, kKeyDim, kRank, KVL_LATENT, -1, 0, kv_tile_bytes(drawn.kv_format, kKeyDim)};
        kvl_add_attention(model.get(), &heads);
        const int32_t keys_at = int32_t(round_up(first().rows, kPanel));
        const kvl_latent latent{0, keys_at, drawn.has_q_rank ? kQRank : 0, kNope, kDim, kOut, vector(norm), vector(q_norm)};
        kvl_add_latent(model.get(), &latent);
        for (const Matrix* matrix : {&q_up, &k_up, &v_up, &o, &head}) kvl_add_linear(model.get(), matrix->rows, int64_t(matrix->values.size()) / matrix->rows, KVL_BF16);
        const int32_t down = kvl_add_linear(model.get(), keys_at + kKeyDim, kHidden, KVL_BF16);
        kvl_allocate(model.get());
        int32_t index = 0;
        for (const Matrix* matrix : {&q_up, &k_up, &v_up, &o, &head}) kvl_fill_f32(model.get(), index++, matrix->values.data(), matrix->rows, 0, -1);
        kvl_fill_f32(model.get(), down, first().values.data(), first().rows, 0, -1);
        kvl_fill_f32(model.get(), down, kv_down.values.data(), kKeyDim, keys_at, -1);
        for (float value : embed.values) table.push_back(float_to_bf16(value));
        kvl_set_embed(model.get(), table.data(), -1);
        const std::vector<kvl_instruction> program = program_of(down);
        kvl_set_program(model.get(), program.data(), int32_t(program.size()));
    }

    // Logits of the last token of each sequence of tokens [from, until), or of all tokens.
    std::vector<float> computed(const std::vector<std::vector<int32_t>>& sequences, int from, int until, bool all) {
        std::vector<int32_t> ids, pos, qstart{0}, blocks, rows;
        for (size_t s = 0; s < sequences.size(); s++) {
            for (int p = from; p < until; p++) {
                if (all || p == until - 1) rows.push_back(int32_t(ids.size()));
                ids.push_back(sequences[s][size_t(p)]), pos.push_back(p);
            }
            qstart.push_back(int32_t(ids.size()));
            for (int block = 0; block < kMaxBlocks; block++) blocks.push_back(int32_t(size_t(kBlocks - 1) - (size_t(block) * sequences.size() + s) % kBlocks));
        }
        const std::vector<int32_t> tops(rows.size());
        std::vector<float> logits(rows.size() * kVocab);
        const kvl_batch batch{cache.data(), ids.data(), pos.data(), qstart.data(), blocks.data(), rows.data(),
                              int32_t(ids.size()), int32_t(sequences.size()), kMaxBlocks, int32_t(rows.size()), tops.data(),
                              0, logits.data(), nullptr, nullptr, nullptr, 0, nullptr};
        near(kvl_step(model.get(), &batch), 0, 0, "step of latents", 0, 0);
        return logits;
    }

    // The same by the formulas.
    std::vector<Row> plain(const std::vector<int32_t>& ids) const {
        std::vector<Row> keys[kLatentHeads], values[kLatentHeads], logits;
        for (size_t t = 0; t < ids.size(); t++) {
            Row x(&embed.values[size_t(ids[t] * kHidden)], &embed.values[size_t((ids[t] + 1) * kHidden)]);
            const Row in = normed(x.data(), kHidden, attention_norm), key = kv_down.times(in);
            const Row latent = normed(key.data(), kRank, norm);
            Row turned(key.begin() + kRank, key.end());
            turn(turned.data(), rope, int(t));
            Row q = drawn.has_q_rank ? q_up.times(normed(q_down.times(in).data(), kQRank, q_norm)) : q_whole.times(in), outputs;
            for (int h = 0; h < kLatentHeads; h++) {
                double* const query = &q[size_t(h * kSize)];
                turn(query + kNope, rope, int(t));
                keys[h].push_back(key_of(h, latent, turned));
                values[h].push_back(value_of(h, latent));
                const Row out = attended(query, keys[h], values[h]);
                outputs.insert(outputs.end(), out.begin(), out.end());
            }
            add_to(x, o.times(outputs));
            logits.push_back(head.times(normed(x.data(), kHidden, last_norm)));
        }
        return logits;
    }

  private:
    const Matrix& first() const { return drawn.has_q_rank ? q_down : q_whole; }
    int32_t vector(const std::vector<float>& values) { return kvl_add_vector(model.get(), values.data(), int64_t(values.size())); }

    std::vector<kvl_instruction> program_of(int32_t down) {
        std::vector<kvl_instruction> program{{KVL_NORM_QUANT, 0, down, 0, vector(attention_norm), -1, 0, 0, 0},
                                             {KVL_LINEAR, 0, down, KVL_TO_QKV, -1, -1, 0, 0, 0},
                                             {KVL_LATENT_KEYS, 0, -1, 0, -1, -1, 0, 0, 0}};
        if (drawn.has_q_rank) {
            program.push_back({KVL_QUANT, 0, 0, 0, -1, -1, KVL_FROM_ATTENTION, 0, 0});
            program.push_back({KVL_LINEAR, 0, 0, KVL_TO_QKV, -1, -1, 0, 0, 0});
        }
        program.push_back({KVL_LATENT_QUERIES, 0, 1, 0, -1, -1, 0, 0, 0});
        program.push_back({KVL_ATTENTION, 0, -1, 0, -1, -1, 0, 0, 0});
        program.push_back({KVL_LATENT_VALUES, 0, 2, 0, -1, -1, 0, 0, 0});
        program.push_back({KVL_QUANT, 0, 3, 0, -1, -1, KVL_FROM_QKV, 0, 0});
        program.push_back({KVL_LINEAR, 0, 3, KVL_RESIDUAL, -1, -1, 0, 0, 0});
        program.push_back({KVL_ROWS_NORM_QUANT, 0, 4, 0, vector(last_norm), -1, 0, 0, 0});
        program.push_back({KVL_LINEAR, 0, 4, KVL_LOGITS, -1, -1, 0, 0, 0});
        return program;
    }

    // A head's key of a token: a product of the token's latent, beside the turned part that all heads share.
    Row key_of(int h, const Row& latent, const Row& turned) const {
        Row key(kNope);
        for (int r = 0; r < kRank; r++) {
            const float* const weights = &k_up.values[size_t((h * kRank + r) * kNope)];
            for (size_t i = 0; i < kNope; i++) key[i] += double(weights[i]) * latent[size_t(r)];
        }
        key.insert(key.end(), turned.begin(), turned.end());
        return key;
    }

    // A head's value of a token.
    Row value_of(int h, const Row& latent) const {
        Row value;
        for (int i = 0; i < kOut; i++) value.push_back(dot(&v_up.values[size_t((h * kOut + i) * kRank)], latent.data(), kRank));
        return value;
    }

    // A head's output for its query over all tokens so far.
    static Row attended(const double* query, const std::vector<Row>& keys, const std::vector<Row>& values) {
        Row out(kOut);
        double total = 0;
        for (size_t t = 0; t < keys.size(); t++) {
            const double p = std::exp(double(kScale) * dot(query, keys[t].data(), kSize));
            total += p;
            for (size_t i = 0; i < kOut; i++) out[i] += p * values[t][i];
        }
        for (double& value : out) value /= total;
        return out;
    }

    const LatentCase drawn;
    Matrix q_whole{kLatentHeads * kSize, kHidden}, q_down{kQRank, kHidden}, q_up{kLatentHeads * kSize, kQRank}, kv_down{kKeyDim, kHidden};
    Matrix k_up{kLatentHeads * kRank, kNope}, v_up{kLatentHeads * kOut, kRank}, o{kHidden, kLatentHeads * kOut};
    Matrix embed{kVocab, kHidden}, head{kVocab, kHidden};
    std::vector<float> attention_norm = noise(kHidden), last_norm = noise(kHidden), norm = noise(kRank), q_norm = noise(kQRank);
    std::vector<float> rope = rope_of();
    std::vector<uint16_t> table;
    std::unique_ptr<kvl_model, FreeModel> model;
    std::vector<uint8_t> cache;
};

// Two prompts whole, then again in pieces on both sides of the limits of a step: these have the same bits.
void test_latents_of(const LatentCase& drawn) {
    constexpr int kLength = 140;
    Latents latents(drawn);
    std::vector<std::vector<int32_t>> sequences(2, std::vector<int32_t>(kLength));
    for (std::vector<int32_t>& one : sequences)
        for (int32_t& id : one) id = int32_t(generator() % kVocab);
    const std::vector<float> whole = latents.computed(sequences, 0, kLength, true);
    double difference = 0, size = 0;
    for (int s = 0; s < 2; s++) {
        const std::vector<Row> want = latents.plain(sequences[size_t(s)]);
        for (int t = 0; t < kLength; t++)
            for (int i = 0; i < kVocab; i++) {
                const double got = whole[size_t((s * kLength + t) * kVocab + i)], logit = want[size_t(t)][size_t(i)];
                near(got, logit, 0.2, "logit of latents", t, i);
                difference += (got - logit) * (got - logit), size += logit * logit;
            }
    }
    near(std::sqrt(difference / size), 0, 0.02, "share of the logits of latents that differs", drawn.kv_format, drawn.threads);
    int from = 0;
    for (int count : {1, 2, 3, 7, 16, 33, 77, 1}) {
        const std::vector<float> last = latents.computed(sequences, from, from + count, false);
        from += count;
        for (int s = 0; s < 2; s++)
            for (int i = 0; i < kVocab; i++) near(last[size_t(s * kVocab + i)], whole[size_t((s * kLength + from - 1) * kVocab + i)], 0, "logit in pieces", from, i);
    }
}

}  // namespace

static void test_latents() {
    for (int kv_format : {KVL_KV_BF16, KVL_KV_INT8})
        for (bool has_q_rank : {false, true}) test_latents_of({kv_format, has_q_rank ? 3 : 1, has_q_rank});
}
