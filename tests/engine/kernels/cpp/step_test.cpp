// Compares whole steps through the C interface with a plain forward pass of the same weights in doubles: ragged batches
// on both sides of every limit of the step, both forms of the cache, one and several threads, logits and candidates.
// Every buffer has exactly the size that abi.h requires, so that sanitizers find accesses beyond it.
#include <algorithm>
#include <memory>
#include <numeric>

#include "plain.hpp"
#include "shortage.hpp"

// A model with the same weights behind the C interface, and its cache.
class Native {
  public:
    explicit Native(const Plain& plain)
        : plain(plain), cache(size_t(kBlocks * 2 * kLayers * side_bytes())) {
        const kvl_shape shape{kHidden, kMlp, kVocab, plain.options.threads, plain.options.kv_format, 1,
                              2 * kLayers * side_bytes(), 1e-5f, 1, 1, 1, 0, 0, 0, float(kLimit), float(kAlpha)};
        model.reset(kvl_new(&shape));
        kvl_add_rope(model.get(), plain.rope.data(), kDim);
        for (int l = 0; l < kLayers; l++) declare(l, plain.layers[size_t(l)]);
        const int32_t head = kvl_add_linear(model.get(), kVocab, kHidden, KVL_BF16);
        emit({KVL_ROWS_NORM_QUANT, 0, head, 0, vector(plain.norm), -1, 0, 0, 0});
        emit({KVL_LINEAR, 0, head, KVL_LOGITS, -1, -1, 0, 0, 0});
        const int32_t table = plain.options.is_apart ? kvl_add_linear(model.get(), kVocab, kHidden, KVL_BF16) : -1;
        near(kvl_allocate(model.get()) > 0, 1, 0, "allocate", 0, 0);
        for (int l = 0; l < kLayers; l++) fill(l * (4 + 2 * plain.options.experts), plain.layers[size_t(l)], plain.mixtures[size_t(l)]);
        kvl_fill_f32(model.get(), head, plain.head.values.data(), kVocab, 0, -1);
        if (plain.options.is_apart) kvl_fill_f32(model.get(), table, plain.embed.values.data(), kVocab, 0, -1);
        for (float value : plain.embed.values) embed.push_back(float_to_bf16(value));
        kvl_set_embed(model.get(), plain.options.is_apart ? nullptr : embed.data(), table);
        kvl_set_program(model.get(), program.data(), int32_t(program.size()));
    }

    struct Part {
        const std::vector<int32_t>* ids;
        int from, until;
        std::vector<int32_t> blocks;
    };

    // Runs tokens [from, until) of each part; checks every row of logits, or the best tops[...] of it.
    void check(const std::vector<Part>& parts, const std::vector<std::vector<Row>>& want, int max_top) {
        std::vector<int32_t> ids, pos, qstart{0}, table, rows, tops;
        std::vector<const Row*> expected;
        for (size_t s = 0; s < parts.size(); s++) {
            for (int p = parts[s].from; p < parts[s].until; p++) {
                ids.push_back((*parts[s].ids)[size_t(p)]);
                pos.push_back(p);
                rows.push_back(int32_t(rows.size()));
                tops.push_back(max_top ? int32_t(rows.size()) % (max_top + 1) : 0);
                expected.push_back(&want[s][size_t(p)]);
            }
            qstart.push_back(int32_t(ids.size()));
            table.insert(table.end(), parts[s].blocks.begin(), parts[s].blocks.end());
            table.resize((s + 1) * kMaxBlocks, -1);
        }
        const size_t num_full = size_t(std::count(tops.begin(), tops.end(), 0));
        std::vector<float> logits(num_full * kVocab), values(rows.size() * size_t(max_top));
        std::vector<int32_t> top_ids(values.size());
        const kvl_batch batch{cache.data(), ids.data(), pos.data(), qstart.data(), table.data(), rows.data(),
                              int32_t(ids.size()), int32_t(parts.size()), kMaxBlocks, int32_t(rows.size()), tops.data(),
                              max_top, logits.data(), values.data(), top_ids.data(), nullptr, 0, nullptr};
        near(kvl_step(model.get(), &batch), 0, 0, "step", 0, 0);
        const float* full = logits.data();
        double difference = 0, size = 1e-9;
        for (size_t r = 0; r < rows.size(); r++) {
            if (tops[r] == 0) {
                for (int i = 0; i < kVocab; i++) {
                    const double logit = (*expected[r])[size_t(i)];
                    near(full[i], logit, tolerance(), "logit", int64_t(r), i);
                    difference += (full[i] - logit) * (full[i] - logit);
                    size += logit * logit;
                }
                full += kVocab;
            }
            Row sorted = *expected[r];
            std::sort(sorted.rbegin(), sorted.rend());
            for (int i = 0; i < tops[r]; i++) {
                const size_t at = r * size_t(max_top) + size_t(i);
                near(values[at], sorted[size_t(i)], tolerance(), "candidate", int64_t(r), i);
                near(values[at], (*expected[r])[size_t(top_ids[at])], tolerance(), "candidate's token", int64_t(r), i);
            }
        }
        const double limit = plain.options.experts ? 0.05 : 0.02;  // of two nearly equal experts another may be chosen
        near(std::sqrt(difference / size), 0, limit, "share of the logits that differs", int64_t(rows.size()), 0);
    }

    // Draws a token for each of the tokens [from, until) of `part`, from all logits or from candidates; the allocation
    // after `num_allowed` others fails. Returns what the step does.
    int32_t draw(const Part& part, int num_allowed) {
        const int32_t count = part.until - part.from;
        std::vector<int32_t> pos(static_cast<size_t>(count)), rows(pos.size()), tops(pos.size()), tokens(pos.size(), -1);
        std::iota(pos.begin(), pos.end(), part.from);
        std::iota(rows.begin(), rows.end(), 0);
        for (size_t r = 0; r < tops.size(); r++) tops[r] = r % 2 ? 3 : 0;
        const std::vector<kvl_choice> choices(pos.size(), {1, 0.9f, 0, 7, 1});
        const std::vector<int32_t> qstart{0, count};
        std::vector<float> logits(pos.size() * kVocab), values(pos.size() * 3);
        std::vector<int32_t> top_ids(values.size()), table(part.blocks);
        table.resize(kMaxBlocks, -1);
        const kvl_batch batch{cache.data(), part.ids->data() + part.from, pos.data(), qstart.data(), table.data(),
                              rows.data(), count, 1, kMaxBlocks, count, tops.data(), 3, logits.data(), values.data(),
                              top_ids.data(), nullptr, 0, nullptr, nullptr, nullptr, choices.data(), tokens.data()};
        allocations_left = num_allowed;
        const int32_t result = kvl_step(model.get(), &batch);
        allocations_left = -1;
        if (result == 0) near(double(std::count(tokens.begin(), tokens.end(), -1)), 0, 0, "tokens that a step has not drawn", count, num_allowed);
        return result;
    }

  private:
    // Of a block, the keys or the values of a layer.
    int64_t side_bytes() const { return kKvHeads * kv_tile_bytes(plain.options.kv_format, kDim); }

    // For a single logit. Their deviation is about 1; 8-bit mantissas lose about 0.02.
    double tolerance() const { return plain.options.experts ? 1.5 : 0.25; }

    int32_t vector(const std::vector<float>& values) {
        return kvl_add_vector(model.get(), values.data(), int64_t(values.size()));
    }
    void emit(const kvl_instruction& instruction) { program.push_back(instruction); }

    void declare(int index, const Layer& layer) {
        const Options& options = plain.options;
        const kvl_attention heads{kHeads, kKvHeads, kDim, kDim, KVL_ALL, -1, 2 * index * side_bytes(), (2 * index + 1) * side_bytes()};
        near(kvl_add_attention(model.get(), &heads), index, 0, "attention", index, 0);
        const int32_t qkv = kvl_add_linear(model.get(), kQueries + 2 * kKeys, kHidden, KVL_BF16);
        const int32_t o = kvl_add_linear(model.get(), kHidden, kQueries, KVL_BF16);
        const int64_t width = round_up(kMlp, options.is_apart ? kPanel : kLanes);
        const int32_t gate_up = kvl_add_linear(model.get(), 2 * width, kHidden, KVL_BF16);
        const int32_t down = kvl_add_linear(model.get(), kHidden, kMlp, KVL_BF16);
        emit({KVL_NORM_QUANT, index, qkv, 0, vector(layer.attention_norm), -1, 0, 0, 0});
        emit({KVL_LINEAR, index, qkv, KVL_TO_QKV, options.has_bias ? vector(layer.bias) : -1, -1, 0, 0, 0});
        const int32_t q_norm = options.has_norms ? vector(layer.q_norm) : -1;
        emit({KVL_ROPE_KV, index, -1, 0, q_norm, options.has_norms ? vector(layer.k_norm) : -1, 0, 0, 0});
        emit({KVL_ATTENTION, index, -1, 0, options.experts ? vector(layer.sinks) : -1, -1, 0, 0, options.window});
        emit({KVL_QUANT, index, o, 0, -1, -1, KVL_FROM_ATTENTION, 0, 0});
        emit({KVL_LINEAR, index, o, KVL_RESIDUAL, -1, -1, 0, 0, 0});
        if (options.experts) return declare_experts(index, layer, gate_up, down);
        emit({KVL_NORM_QUANT, index, gate_up, 0, vector(layer.mlp_norm), -1, 0, 0, 0});
        emit({KVL_LINEAR, index, gate_up, options.is_apart ? KVL_TO_QKV : KVL_SWIGLU, -1, -1, 0, 0, 0});
        emit({KVL_QUANT, index, down, KVL_SWIGLU, -1, -1, options.is_apart ? KVL_FROM_GATE_UP : KVL_FROM_MLP, 0, 0});
        emit({KVL_LINEAR, index, down, KVL_RESIDUAL, -1, -1, 0, 0, 0});
    }

    // Rows of `from`, each padded with zeros to a multiple of `unit`; with two of them, halves of panels by turns.
    static std::vector<float> panels_of(const std::vector<std::vector<float>>& from, bool is_apart) {
        std::vector<float> all;
        for (const std::vector<float>& row : from) {
            const int64_t width = round_up(kMlp, is_apart ? kPanel : kLanes);
            std::vector<float> own(size_t(2 * width), 0.0f);
            for (int64_t i = 0; i < kMlp; i++) {
                own[size_t(is_apart ? i : i / kLanes * kPanel + i % kLanes)] = row[size_t(i)];
                own[size_t(is_apart ? width + i : i / kLanes * kPanel + kLanes + i % kLanes)] = row[size_t(kMlp + i)];
            }
            all.insert(all.end(), own.begin(), own.end());
        }
        return all;
    }

    static std::vector<float> padded(const std::vector<std::vector<float>>& rows, int64_t unit) {
        std::vector<float> all;
        for (const std::vector<float>& row : rows) {
            all.insert(all.end(), row.begin(), row.end());
            all.resize(size_t(round_up(int64_t(all.size()), unit)), 0.0f);
        }
        return all;
    }

    // Linears follow those of the layer, whose own MLP is the shared expert.
    void declare_experts(int index, const Layer& layer, int32_t gate_up, int32_t down) {
        const Options& options = plain.options;
        const ExpertsOf& experts = plain.mixtures[size_t(index)];
        const int64_t width = round_up(kMlp, options.is_apart ? kPanel : kLanes);
        for (int e = 0; e < options.experts; e++) {
            kvl_add_linear(model.get(), 2 * width, kHidden, KVL_BF16);
            kvl_add_linear(model.get(), kHidden, kMlp, KVL_BF16);
        }
        std::vector<std::vector<float>> router;
        for (int e = 0; e < options.experts; e++)
            router.emplace_back(experts.router.values.begin() + e * kHidden, experts.router.values.begin() + (e + 1) * kHidden);
        const bool has_bias = options.has_bias;
        const kvl_mixture mixture{options.experts, kPerToken, down + 1, has_bias, vector(padded(router, kPad)),
                                  has_bias ? vector(experts.router_bias) : -1,
                                  has_bias ? vector(panels_of(experts.up_bias, options.is_apart)) : -1,
                                  has_bias ? vector(padded(experts.down_bias, kPanel)) : -1, vector(experts.shared),
                                  0, -1, 1, 1, 1, 2, -1, 0};
        const int32_t id = kvl_add_mixture(model.get(), &mixture);
        const int32_t gate = has_bias ? KVL_CLAMPED : KVL_SWIGLU, up = options.is_apart ? KVL_TO_QKV : gate;
        const int32_t source = options.is_apart ? KVL_FROM_GATE_UP : KVL_FROM_MLP;
        emit({KVL_ROUTE, id, down + 1, 0, vector(layer.mlp_norm), -1, 0, 0, 0});
        emit({KVL_LINEAR, index, gate_up, up, -1, -1, 0, 0, 0});
        emit({KVL_EXPERTS_UP, id, -1, up, -1, -1, 0, 0, 0});
        emit({KVL_EXPERTS_DOWN, id, down + 2, gate, -1, -1, source, 0, 0});
        emit({KVL_QUANT, index, down, gate, -1, -1, source, 0, 0});
        emit({KVL_LINEAR, index, down, KVL_GATED_RESIDUAL, -1, -1, 0, 0, 0});
    }

    void fill(int32_t first, const Layer& layer, const ExpertsOf& experts) {
        for (int e = 0; e < plain.options.experts; e++) {
            const ExpertsOf::Mlp& mlp = experts.mlps[size_t(e)];
            fill_mlp(first + 4 + 2 * e, mlp.gate, mlp.up, mlp.down);
        }
        kvl_fill_f32(model.get(), first, layer.q.values.data(), kQueries, 0, -1);
        kvl_fill_f32(model.get(), first, layer.k.values.data(), kKeys, kQueries, -1);
        kvl_fill_f32(model.get(), first, layer.v.values.data(), kKeys, kQueries + kKeys, -1);
        kvl_fill_f32(model.get(), first + 1, layer.o.values.data(), kHidden, 0, -1);
        fill_mlp(first + 2, layer.gate, layer.up, layer.down);
    }

    void fill_mlp(int32_t first, const Matrix& gate, const Matrix& up, const Matrix& down) {
        const bool is_apart = plain.options.is_apart;
        kvl_fill_f32(model.get(), first, gate.values.data(), kMlp, 0, is_apart ? -1 : 0);
        kvl_fill_f32(model.get(), first, up.values.data(), kMlp, is_apart ? round_up(kMlp, kPanel) : 0, is_apart ? -1 : 1);
        kvl_fill_f32(model.get(), first + 1, down.values.data(), kHidden, 0, -1);
    }

    const Plain& plain;
    std::unique_ptr<kvl_model, FreeModel> model;
    std::vector<kvl_instruction> program;
    std::vector<uint16_t> embed;
    std::vector<uint8_t> cache;
};

static std::vector<int32_t> random_ids(int count) {
    std::vector<int32_t> ids(static_cast<size_t>(count));
    for (int32_t& id : ids) id = int32_t(generator() % kVocab);
    return ids;
}

// Three prompts prefilled together, then decoded together; one of them in chunks of sizes on both sides of the limits
// from which threads share quantised rows and take panels one by one.
static void test_steps(const Options& options) {
    const Plain plain(options);
    Native native(plain);
    const std::vector<std::vector<int32_t>> ids{random_ids(150), random_ids(20), random_ids(3)};
    std::vector<std::vector<Row>> want;
    for (const std::vector<int32_t>& one : ids) want.push_back(plain.forward(one));
    std::vector<int32_t> blocks(kBlocks);
    std::iota(blocks.rbegin(), blocks.rend(), 0);
    const std::vector<std::vector<int32_t>> tables{
        {blocks.begin(), blocks.begin() + 10}, {blocks.begin() + 20, blocks.begin() + 22}, {blocks.begin() + 30, blocks.begin() + 31}};
    const auto part = [&](size_t s, int from, int until) { return Native::Part{&ids[s], from, until, tables[s]}; };
    native.check({part(0, 0, 149), part(1, 0, 19), part(2, 0, 2)}, want, 0);
    native.check({part(0, 149, 150), part(1, 19, 20), part(2, 2, 3)}, want, 5);
    int from = 0;
    for (int count : {1, 2, 3, 7, 8, 9, 15, 16, 17, 72}) {
        native.check({part(0, from, from + count)}, {want[0]}, count % 4 ? 0 : kVocab);
        from += count;
    }
}

// Whichever allocation of a step fails, the step says so, and the next one is right.
static void test_shortage(const Options& options) {
    const Plain plain(options);
    Native native(plain);
    const std::vector<int32_t> ids = random_ids(90);
    const std::vector<Row> want = plain.forward(ids);
    const std::vector<int32_t> blocks{5, 4, 3, 2, 1, 0};
    int num_failed = 0;
    for (int until : {2, 4, 80}) {  // on both sides of the limits of small steps and of fused ones
        const Native::Part part{&ids, 0, until, blocks};
        for (int num_allowed = 0, result = -1; result != 0; num_allowed += 1 + num_allowed / 8) {
            result = native.draw(part, num_allowed);
            near(result == 0 || result == -1, 1, 0, "result of a step short of memory", until, num_allowed);
            num_failed += result != 0;
            if (num_failed % 8 == 0) native.check({part}, {want}, 0);
        }
    }
    near(num_failed > 20, 1, 0, "steps that failed", num_failed, 0);
}

// What has several threads, once with each form of the cache and once with all matrices apart; experts.
static void test_threads() {
    for (int kv_format : {KVL_KV_BF16, KVL_KV_INT8}) test_steps({kv_format, 3, 0, false, true});
    test_steps({KVL_KV_BF16, 2, 0, true, false, true});
    for (bool is_apart : {false, true}) test_steps({KVL_KV_BF16, 2, 21, true, false, is_apart, 5});
}

static void test_whole_steps() {
    test_threads();
    for (int experts : {0, 5}) test_shortage({KVL_KV_BF16, 2, 0, true, false, false, experts});
    for (int kv_format : {KVL_KV_BF16, KVL_KV_INT8}) test_steps({kv_format, 1, 0, true, false});
    test_steps({KVL_KV_BF16, 2, 21, false, false});
    test_steps({KVL_KV_INT8, 2, 140, true, true});
    for (bool has_bias : {false, true}) test_steps({KVL_KV_BF16, 1, 21, has_bias, false, !has_bias, 5});
}
