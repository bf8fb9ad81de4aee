// Whole steps through the C interface, against a plain forward pass of the same weights in doubles: ragged batches on
// both sides of every limit of the step, both forms of the cache, one and several threads, logits and candidates.
//
// Every buffer has exactly the size that abi.h asks for, so that the sanitizers see what reads or writes beyond it.
#include <algorithm>
#include <memory>
#include <numeric>

#include "check.hpp"
#include "layout.hpp"

using namespace kvl;
using Row = std::vector<double>;

// No size is a multiple of a panel or of the padding; a panel of gate and up is shared by 16 channels of each.
constexpr int kHidden = 48, kMlp = 40, kHeads = 6, kKvHeads = 2, kDim = 32, kVocab = 70, kLayers = 2, kBlocks = 40;
constexpr int kQueries = kHeads * kDim, kKeys = kKvHeads * kDim;
constexpr int kMaxPositions = 256, kMaxBlocks = kMaxPositions / kBlockTokens;

struct Options {
    int kv_format, threads, window;
    bool has_bias, has_norms;
    bool is_apart = false;  // gate and up in panels of their own, the embedding in a linear: as files of mixed forms have them
};

// A matrix [rows][cols] of bf16 numbers, so that packing as bf16 loses nothing.
struct Matrix {
    int rows, cols;
    std::vector<float> values;
    Matrix(int rows, int cols) : rows(rows), cols(cols), values(noise(int64_t(rows) * cols, 1 / std::sqrt(float(cols)))) {
        for (float& value : values) value = bf16_to_float(float_to_bf16(value));
    }
    Row times(const Row& x) const {
        Row out(static_cast<size_t>(rows));
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < cols; c++) out[size_t(r)] += double(values[size_t(r * cols + c)]) * x[size_t(c)];
        return out;
    }
};

struct Layer {
    Matrix q{kQueries, kHidden}, k{kKeys, kHidden}, v{kKeys, kHidden}, o{kHidden, kQueries};
    Matrix gate{kMlp, kHidden}, up{kMlp, kHidden}, down{kHidden, kMlp};
    std::vector<float> attention_norm = noise(kHidden), mlp_norm = noise(kHidden), q_norm = noise(kDim), k_norm = noise(kDim);
    std::vector<float> bias = noise(kQueries + 2 * kKeys);
};

static Row normed(const double* x, int count, const std::vector<float>& weight) {
    double squares = 0;
    for (int i = 0; i < count; i++) squares += x[i] * x[i];
    Row out(static_cast<size_t>(count));
    for (int i = 0; i < count; i++) out[size_t(i)] = x[i] / std::sqrt(squares / count + 1e-5) * double(weight[size_t(i)]);
    return out;
}

static void add_to(Row& x, const Row& y) {
    for (size_t i = 0; i < x.size(); i++) x[i] += y[i];
}

// The decoder in plain loops: no pages, no panels, no threads.
class Plain {
  public:
    explicit Plain(const Options& options) : options(options) {}

    // Logits of every token of one sequence.
    std::vector<Row> forward(const std::vector<int32_t>& ids) const {
        std::vector<Row> x;
        for (int32_t id : ids) x.emplace_back(&embed.values[size_t(id * kHidden)], &embed.values[size_t((id + 1) * kHidden)]);
        for (const Layer& layer : layers) {
            attend(layer, x);
            for (Row& row : x) feed(layer, row);
        }
        std::vector<Row> logits;
        for (const Row& row : x) logits.push_back(head.times(normed(row.data(), kHidden, norm)));
        return logits;
    }

    const Options options;
    std::vector<Layer> layers{kLayers};
    Matrix embed{kVocab, kHidden}, head{kVocab, kHidden};
    std::vector<float> norm = noise(kHidden), rope = table();

  private:
    static std::vector<float> table() {
        std::vector<float> rope(size_t(kMaxPositions) * kDim);
        for (int p = 0; p < kMaxPositions; p++)
            for (int i = 0; i < kDim / 2; i++) {
                const double angle = p * std::pow(10000.0, -2.0 * i / kDim);
                rope[size_t(p * kDim + i)] = float(std::cos(angle));
                rope[size_t(p * kDim + kDim / 2 + i)] = float(std::sin(angle));
            }
        return rope;
    }

    void place(Row& row, int heads, const std::vector<float>& weight, int position) const {
        for (int h = 0; h < heads; h++) {
            double* at = &row[size_t(h * kDim)];
            if (options.has_norms) {
                const Row n = normed(at, kDim, weight);
                std::copy(n.begin(), n.end(), at);
            }
            for (int i = 0; i < kDim / 2; i++) {
                const double a = at[i], b = at[kDim / 2 + i];
                const double cosine = rope[size_t(position * kDim + i)], sine = rope[size_t(position * kDim + kDim / 2 + i)];
                at[i] = a * cosine - b * sine;
                at[kDim / 2 + i] = b * cosine + a * sine;
            }
        }
    }

    void attend(const Layer& layer, std::vector<Row>& x) const {
        std::vector<Row> q, k, v;
        for (size_t t = 0; t < x.size(); t++) {
            const Row in = normed(x[t].data(), kHidden, layer.attention_norm);
            q.push_back(layer.q.times(in));
            k.push_back(layer.k.times(in));
            v.push_back(layer.v.times(in));
            if (options.has_bias) {
                add_to(q[t], {layer.bias.begin(), layer.bias.begin() + kQueries});
                add_to(k[t], {layer.bias.begin() + kQueries, layer.bias.begin() + kQueries + kKeys});
                add_to(v[t], {layer.bias.begin() + kQueries + kKeys, layer.bias.end()});
            }
            place(q[t], kHeads, layer.q_norm, int(t));
            place(k[t], kKvHeads, layer.k_norm, int(t));
        }
        for (size_t t = 0; t < x.size(); t++) {
            Row out(kQueries);
            for (int h = 0; h < kHeads; h++) attend_head(q[t].data() + h * kDim, k, v, h / (kHeads / kKvHeads), t, &out[size_t(h * kDim)]);
            add_to(x[t], layer.o.times(out));
        }
    }

    void attend_head(const double* q, const std::vector<Row>& k, const std::vector<Row>& v, int kv_head, size_t t, double* out) const {
        const size_t from = options.window && t + 1 > size_t(options.window) ? t + 1 - size_t(options.window) : 0;
        double total = 0;
        for (size_t key = from; key <= t; key++) {
            const double p = std::exp(std::inner_product(q, q + kDim, &k[key][size_t(kv_head * kDim)], 0.0) / std::sqrt(kDim));
            total += p;
            for (int d = 0; d < kDim; d++) out[d] += p * v[key][size_t(kv_head * kDim + d)];
        }
        for (int d = 0; d < kDim; d++) out[d] /= total;
    }

    void feed(const Layer& layer, Row& x) const {
        const Row in = normed(x.data(), kHidden, layer.mlp_norm), up = layer.up.times(in);
        Row gate = layer.gate.times(in);
        for (size_t i = 0; i < gate.size(); i++) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
        add_to(x, layer.down.times(gate));
    }
};

struct FreeModel {
    void operator()(kvl_model* model) const { kvl_free(model); }
};

// The same weights behind the C interface, and a cache.
class Native {
  public:
    explicit Native(const Plain& plain)
        : plain(plain), cache(size_t(kLayers * 2 * kBlocks * kKvHeads * kv_tile_bytes(plain.options.kv_format, kDim))) {
        const kvl_shape shape{kHidden, kMlp, kHeads, kKvHeads, kDim, kVocab, plain.options.threads,
                              plain.options.kv_format, 1e-5f, 1, 1, 1, 0, 0, 0};
        model.reset(kvl_new(&shape));
        kvl_add_rope(model.get(), plain.rope.data(), kDim);
        for (int l = 0; l < kLayers; l++) declare(l, plain.layers[size_t(l)]);
        const int32_t head = kvl_add_linear(model.get(), kVocab, kHidden, KVL_BF16);
        emit({KVL_ROWS_NORM_QUANT, 0, head, 0, vector(plain.norm), -1, 0, 0, 0});
        emit({KVL_LINEAR, 0, head, KVL_LOGITS, -1, -1, 0, 0, 0});
        const int32_t table = plain.options.is_apart ? kvl_add_linear(model.get(), kVocab, kHidden, KVL_BF16) : -1;
        near(kvl_allocate(model.get()) > 0, 1, 0, "allocate", 0, 0);
        for (int l = 0; l < kLayers; l++) fill(l * 4, plain.layers[size_t(l)]);
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
        const kvl_batch batch{cache.data(), kBlocks, ids.data(), pos.data(), qstart.data(), table.data(), rows.data(),
                              int32_t(ids.size()), int32_t(parts.size()), kMaxBlocks, int32_t(rows.size()), tops.data(),
                              max_top, logits.data(), values.data(), top_ids.data(), nullptr, 0, nullptr};
        kvl_step(model.get(), &batch);
        const float* full = logits.data();
        double difference = 0, size = 1e-9;
        for (size_t r = 0; r < rows.size(); r++) {
            if (tops[r] == 0) {
                for (int i = 0; i < kVocab; i++) {
                    const double logit = (*expected[r])[size_t(i)];
                    near(full[i], logit, kTolerance, "logit", int64_t(r), i);
                    difference += (full[i] - logit) * (full[i] - logit);
                    size += logit * logit;
                }
                full += kVocab;
            }
            Row sorted = *expected[r];
            std::sort(sorted.rbegin(), sorted.rend());
            for (int i = 0; i < tops[r]; i++) {
                const size_t at = r * size_t(max_top) + size_t(i);
                near(values[at], sorted[size_t(i)], kTolerance, "candidate", int64_t(r), i);
                near(values[at], (*expected[r])[size_t(top_ids[at])], kTolerance, "candidate's token", int64_t(r), i);
            }
        }
        near(std::sqrt(difference / size), 0, 0.02, "share of the logits that differs", int64_t(rows.size()), 0);
    }

  private:
    static constexpr double kTolerance = 0.25;  // of any one logit; their deviation is about 1, 8-bit mantissas lose 0.02

    int32_t vector(const std::vector<float>& values) {
        return kvl_add_vector(model.get(), values.data(), int64_t(values.size()));
    }
    void emit(const kvl_instruction& instruction) { program.push_back(instruction); }

    void declare(int index, const Layer& layer) {
        const Options& options = plain.options;
        const int32_t qkv = kvl_add_linear(model.get(), kQueries + 2 * kKeys, kHidden, KVL_BF16);
        const int32_t o = kvl_add_linear(model.get(), kHidden, kQueries, KVL_BF16);
        const int64_t width = round_up(kMlp, options.is_apart ? kPanel : kLanes);
        const int32_t gate_up = kvl_add_linear(model.get(), 2 * width, kHidden, KVL_BF16);
        const int32_t down = kvl_add_linear(model.get(), kHidden, kMlp, KVL_BF16);
        emit({KVL_NORM_QUANT, index, qkv, 0, vector(layer.attention_norm), -1, 0, 0, 0});
        emit({KVL_LINEAR, index, qkv, KVL_TO_QKV, options.has_bias ? vector(layer.bias) : -1, -1, 0, 0, 0});
        const int32_t q_norm = options.has_norms ? vector(layer.q_norm) : -1;
        emit({KVL_ROPE_KV, index, -1, 0, q_norm, options.has_norms ? vector(layer.k_norm) : -1, 0, 0, 0});
        emit({KVL_ATTENTION, index, -1, 0, -1, -1, 0, 0, options.window});
        emit({KVL_QUANT, index, o, 0, -1, -1, KVL_FROM_ATTENTION, 0, 0});
        emit({KVL_LINEAR, index, o, KVL_RESIDUAL, -1, -1, 0, 0, 0});
        emit({KVL_NORM_QUANT, index, gate_up, 0, vector(layer.mlp_norm), -1, 0, 0, 0});
        emit({KVL_LINEAR, index, gate_up, options.is_apart ? KVL_TO_QKV : KVL_SWIGLU, -1, -1, 0, 0, 0});
        emit({KVL_QUANT, index, down, KVL_SWIGLU, -1, -1, options.is_apart ? KVL_FROM_GATE_UP : KVL_FROM_MLP, 0, 0});
        emit({KVL_LINEAR, index, down, KVL_RESIDUAL, -1, -1, 0, 0, 0});
    }

    void fill(int32_t first, const Layer& layer) {
        const bool is_apart = plain.options.is_apart;
        kvl_fill_f32(model.get(), first, layer.q.values.data(), kQueries, 0, -1);
        kvl_fill_f32(model.get(), first, layer.k.values.data(), kKeys, kQueries, -1);
        kvl_fill_f32(model.get(), first, layer.v.values.data(), kKeys, kQueries + kKeys, -1);
        kvl_fill_f32(model.get(), first + 1, layer.o.values.data(), kHidden, 0, -1);
        kvl_fill_f32(model.get(), first + 2, layer.gate.values.data(), kMlp, 0, is_apart ? -1 : 0);
        kvl_fill_f32(model.get(), first + 2, layer.up.values.data(), kMlp, is_apart ? round_up(kMlp, kPanel) : 0, is_apart ? -1 : 1);
        kvl_fill_f32(model.get(), first + 3, layer.down.values.data(), kHidden, 0, -1);
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

// Three prompts prefilled together, then decoded together; one in chunks whose sizes are on both sides of the limits at
// which a step quantises once for all threads and hands panels out.
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

// What has several threads, once with each form of the cache and once with all matrices apart.
static void test_threads() {
    for (int kv_format : {KVL_KV_BF16, KVL_KV_INT8}) test_steps({kv_format, 3, 0, false, true});
    test_steps({KVL_KV_BF16, 2, 0, true, false, true});
}

static void test_whole_steps() {
    test_threads();
    for (int kv_format : {KVL_KV_BF16, KVL_KV_INT8}) test_steps({kv_format, 1, 0, true, false});
    test_steps({KVL_KV_BF16, 2, 21, false, false});
    test_steps({KVL_KV_INT8, 2, 140, true, true});
}
