#include "step/step.hpp"

#include <algorithm>
#include <new>
#include <optional>

#include "sampling/draw.hpp"
#include "step/asked.hpp"

namespace kvl {

Step::Step(kvl_model& model, const kvl_batch& batch)
    : model_(model), batch_(batch), shape_(model.shape), scratch_(model.scratch),
      attends_in_tiles_(model.unit == KVL_TILES && can_attend_in_tiles(model.shape.kv_format)),
      candidates_(batch.tops, batch.num_rows, batch.max_top, model.pool.size()) {
    reserve();
    for (int64_t row = 0, count = 0; row < batch.num_rows; row++) logits_index_.push_back(batch.tops[row] ? -1 : count++);
    for (int s = 0; s < batch.num_seqs; s++) sequence_.insert(sequence_.end(), size_t(batch.qstart[s + 1] - batch.qstart[s]), s);
    for (size_t i = 0; i < model.attentions.size(); i++)
        if (model.plans[i] == int(tasks_.size())) plan_attention(model.attentions[i]);
    find_places();
    find_adapters();
    is_fused_ = batch.num_tokens >= kFusedTokens && tokens_.empty();
}

// Places the scratch memory for `tokens` tokens at `at`; returns its end.
static uint8_t* lay_out(Scratch& s, const kvl_model& model, int64_t tokens, uint8_t* at) {
    const int64_t hidden = model.hidden_stride(), mlp = round_up(model.shape.intermediate, kPad);
    int64_t heads = 0, queries = 0, outputs = 0, key_dim = kPad;  // of the widest attention
    for (const kvl_attention& a : model.attentions) {
        heads = std::max<int64_t>(heads, a.num_heads);
        queries = std::max(queries, int64_t(a.num_heads) * a.key_dim);
        outputs = std::max(outputs, round_up(int64_t(a.num_heads) * a.value_dim, kPad));
        key_dim = std::max<int64_t>(key_dim, a.key_dim);
    }
    const auto widest_to = [&](int epilogue) {
        int64_t most = 0;
        for (const kvl_instruction& i : model.program)
            if (i.kind == KVL_LINEAR && i.epilogue == epilogue)
                most = std::max(most, round_up(i.at + model.linears[size_t(i.linear)].rows, kPad));
        return most;
    };
    const auto has = [&](const auto& is_one) { return std::any_of(model.program.begin(), model.program.end(), is_one); };
    outputs = std::max(outputs, widest_latent(model));
    const int64_t qkv = std::max({widest_to(KVL_TO_QKV), widest_latent(model), width_joined(model)}), inputs = widest_to(KVL_TO_INPUTS);
    const bool is_gated = has([](const kvl_instruction& i) { return i.is_gated != 0; });
    const int64_t beside = has([](const kvl_instruction& i) { return i.kind == KVL_NORM_BRANCH; }) ? hidden : 0;
    const int64_t widest = s.widest = std::max({hidden, mlp, outputs, widest_mixer(model), width_joined(model)});
    s.residual = {take<float>(at, tokens * hidden), hidden};
    s.branch = {take<float>(at, tokens * hidden), hidden};
    s.beside = {take<float>(at, tokens * beside), beside};
    s.inputs = {take<float>(at, tokens * inputs), inputs};
    s.qkv = {take<float>(at, tokens * qkv), qkv};
    s.attended = {take<float>(at, tokens * outputs), outputs};
    s.gates = {take<float>(at, is_gated ? tokens * outputs : 0), is_gated ? outputs : 0};
    s.mlp = {take<float>(at, tokens * mlp), mlp};
    s.queries = take<uint16_t>(at, tokens * queries + kLanes * key_dim);
    s.query_scale = take<float>(at, tokens * heads);
    for (Activations& quantised : s.quantised) quantised = take_activations(at, tokens, widest);
    s.unit.resize(size_t(model.pool.size()));
    const int64_t unit_floats = std::max<int64_t>(kTileRows * key_dim, kStripFloats);
    for (float*& unit : s.unit) unit = take<float>(at, unit_floats);
    s.own.resize(size_t(model.pool.size()));
    s.row.resize(size_t(model.pool.size()));
    for (Activations& own : s.own) own = take_activations(at, kOwnTokens, widest);
    for (float*& row : s.row) row = take<float>(at, widest);
    at = lay_out_latents(s, model, at);
    return lay_out_mixers(s, model, tokens, lay_out_experts(s, model, tokens, at));
}

void Step::reserve() {
    const int64_t tokens = std::max<int64_t>(batch_.num_tokens, batch_.num_rows);
    if (tokens <= scratch_.capacity) return;
    const int64_t capacity = round_up(tokens, 64);
    scratch_.capacity = 0;  // until there is memory again
    uint8_t* const nowhere = reinterpret_cast<uint8_t*>(kHugePage);  // to compute the size; it is not accessed
    scratch_.memory = HugeBuffer(lay_out(scratch_, model_, capacity, nowhere) - nowhere);
    lay_out(scratch_, model_, capacity, scratch_.memory.as());
    scratch_.capacity = capacity;
}

void Step::begin(int thread) {
    share_rows(model_.embedding(), batch_.num_tokens, thread, [this](int64_t token) { embed(token); });
}

void Step::work(Span instructions, int thread) {
    for (int64_t i = instructions.begin; i < instructions.end; i++)
        if (!is_done(model_.program[size_t(i)])) execute(model_.program[size_t(i)], thread);
}

void Step::execute(const kvl_instruction& instruction, int thread) {
    switch (instruction.kind) {
        case KVL_ROWS_NORM_QUANT: keep_states(instruction, thread); [[fallthrough]];
        case KVL_NORM_QUANT:
        case KVL_QUANT: return quantize(instruction, thread);
        case KVL_LINEAR: return multiply(instruction, thread);
        case KVL_ROPE_KV: return place_heads(instruction, thread);
        case KVL_LATENT_KEYS: return place_latents(instruction, thread);
        case KVL_LATENT_QUERIES: return make_queries(instruction, thread);
        case KVL_LATENT_VALUES: return make_values(instruction, thread);
        case KVL_ATTENTION: return attend(instruction, thread);
        case KVL_SHORT_CONV:
        case KVL_CONVOLUTION:
        case KVL_MAMBA2:
        case KVL_DELTA_RULE: return mix(instruction, thread);
        case KVL_ADD_NORMED: return add_normed(instruction, thread);
        case KVL_NORM_BRANCH: return norm_branch(instruction, thread);
        case KVL_LAYER_INPUTS: return make_inputs(instruction, thread);
        case KVL_JOIN: return join(instruction, thread);
        case KVL_STATES: return keep_states(instruction, thread);
        case KVL_ADD_POSITIONS: return add_positions(instruction, thread);
        case KVL_LAYER_NORM: return norm_layer(instruction, thread);
        case KVL_ROUTE: return route(instruction, thread);
        case KVL_EXPERTS_UP: return multiply_up(instruction, thread);
        case KVL_EXPERTS_DOWN: return multiply_down(instruction, thread);
        default: return;
    }
}

void Step::embed(int64_t token) {
    const int64_t hidden = shape_.hidden;
    float* const to = scratch_.residual.row(token);
    if (model_.embed == nullptr && model_.embed_linear < 0) return void(std::copy_n(batch_.layer_rows + token * hidden, hidden, to));
    if (model_.embed == nullptr) {
        read_row(model_.linears[size_t(model_.embed_linear)], batch_.ids[token], to);
    } else {
        for (int64_t k = 0; k < hidden; k++) to[k] = bf16_to_float(model_.embed[batch_.ids[token] * hidden + k]);
    }
    for (int64_t k = 0; k < hidden; k++) to[k] *= shape_.embed_scale;
}

// KVL_ADD_POSITIONS. Needs no barrier: KVL_LAYER_NORM, which follows it, gives each thread the same tokens.
void Step::add_positions(const kvl_instruction& instruction, int thread) {
    const int64_t hidden = shape_.hidden;
    for (int64_t t = deal(batch_.num_tokens, thread); t < deal(batch_.num_tokens, thread + 1); t++) {
        float* row = scratch_.residual.row(t);
        const float* type = vector(instruction.vector2) + (batch_.types ? batch_.types[t] : 0) * hidden;
        if (instruction.vector < 0) {
            for (int64_t k = 0; k < hidden; k++) row[k] += type[k];
            continue;
        }
        const float* position = vector(instruction.vector) + (batch_.pos[t] + instruction.source) * hidden;
        for (int64_t k = 0; k < hidden; k++) row[k] += position[k] + type[k];
    }
}

// KVL_LAYER_NORM: each thread normalises its share of the rows.
void Step::norm_layer(const kvl_instruction& instruction, int thread) {
    for (int64_t t = deal(batch_.num_tokens, thread); t < deal(batch_.num_tokens, thread + 1); t++) {
        float* row = scratch_.residual.row(t);
        layer_norm(row, vector(instruction.vector), vector(instruction.vector2), model_.hidden_stride(), shape_.hidden,
                   shape_.norm_eps, row);
    }
    sync(thread);
}

// KVL_NORM_QUANT, KVL_QUANT, KVL_ROWS_NORM_QUANT: computes the activations of the next linear. Ends with a barrier,
// except in small steps, where every thread computes a copy of its own.
void Step::quantize(const kvl_instruction& instruction, int thread) {
    const Linear& linear = model_.linears[size_t(instruction.linear)];
    const bool asked_only = instruction.kind == KVL_ROWS_NORM_QUANT;
    const int64_t rows = asked_only ? batch_.num_rows : batch_.num_tokens;
    const bool small = is_small(rows);
    const Activations& to = activations(instruction, rows, thread);
    const bool has_h = !asked_only && !is_fused_ && has_low_rank(instruction.linear);
    const auto quantize_row = [&](int64_t row) {
        const float* const from = float_row(instruction, row, scratch_.row[size_t(thread)]);
        store_activations(to, row, from, linear.padded_cols, linear.activation_format());
    };
    if (!small && !has_h) return share_rows(index_of(instruction), rows, thread, quantize_row);
    const int64_t begin = small ? 0 : deal(rows, thread), end = small ? rows : deal(rows, thread + 1);
    for (int64_t i = begin; i < end; i++) quantize_row(has_h ? by_adapter_[size_t(i)] : i);
    if (has_h) prefetch_b(instruction.linear, linear.share(thread));
    if (has_h) shrink_tokens(instruction.linear, {begin, end}, to, thread);
    if (!small) sync(thread);
}

// The floats of a row to quantise: returns a pointer to them if they are in memory, else computes them into `room`.
const float* Step::float_row(const kvl_instruction& instruction, int64_t row, float* room) const {
    const Linear& linear = model_.linears[size_t(instruction.linear)];
    if (instruction.kind == KVL_QUANT) return source_row(instruction, row, room);
    const float* x = scratch_.residual.row(instruction.kind == KVL_ROWS_NORM_QUANT ? batch_.rows[row] : row);
    rms_norm(x, vector(instruction.vector), linear.padded_cols, shape_.hidden, shape_.norm_eps, room);
    return room;
}

// KVL_STATES: stores the rows, normalised if the instruction has a vector, of tokens whose states are requested. Needs
// no barrier: no later instruction writes to the residual stream.
void Step::keep_states(const kvl_instruction& instruction, int thread) {
    const int64_t hidden = shape_.hidden;
    float* normed = scratch_.row[size_t(thread)];
    for (int64_t i = deal(batch_.num_states, thread); i < deal(batch_.num_states, thread + 1); i++) {
        const float* x = scratch_.residual.row(batch_.state_rows[i]);
        if (instruction.vector < 0) {
            std::copy(x, x + hidden, batch_.states + i * hidden);
            continue;
        }
        rms_norm(x, vector(instruction.vector), model_.hidden_stride(), hidden, shape_.norm_eps, normed);
        std::copy(normed, normed + hidden, batch_.states + i * hidden);
    }
}

// KVL_LINEAR. With few rows each thread multiplies its own panels in order. With more, threads take a few panels at a
// time, or units of panels if the next instruction is fused, each for a strip of rows.
void Step::multiply(const kvl_instruction& instruction, int thread) {
    const Linear& linear = model_.linears[size_t(instruction.linear)];
    const int64_t rows = instruction.epilogue == KVL_LOGITS ? batch_.num_rows : batch_.num_tokens;
    const Activations& x = activations(instruction, rows, thread);
    const bool has_h = instruction.epilogue != KVL_LOGITS && has_low_rank(instruction.linear);
    if (has_h && is_fused_) {  // not computed while quantising, where a thread may have only parts of a row
        shrink_tokens(instruction.linear, {deal(rows, thread), deal(rows, thread + 1)}, x, thread);
        sync(thread);
    }
    if (rows < kHandOutTokens) {
        for (int64_t p = linear.share(thread); p < linear.share(thread + 1); p++) panel(instruction, p, x, {0, rows}, thread);
        ask_for_a(index_of(instruction) + 1, thread);
        sync(thread);
    } else {
        const bool is_fused = does_next(instruction);
        const int64_t together = is_fused ? panels_of_unit(instruction) : rows < kFusedTokens ? kPanelsTaken : 1;
        const int64_t units = (linear.panels + together - 1) / together;
        const Passes strips = strips_of(instruction, rows);
        share(index_of(instruction), units * strips.count, thread, [&](Claim claim) {
            const int64_t index = claim.item() % units, strip = claim.item() / units;
            const Span span{strips.begin(strip), strips.begin(strip + 1)};
            if (is_fused) return unit(instruction, index, x, span, claim, thread);
            return panels(instruction, {index * together, std::min((index + 1) * together, linear.panels)}, x, span, claim, thread);
        });
    }
    if (instruction.epilogue == KVL_LOGITS) choose_tokens();
}

// Multiplies panels [few.begin, few.end) by the rows `span`: at most kTileRows rows, or kPanelsTaken panels by less than
// kFusedTokens. Returns whether the caller wins the claim; else nothing is written. On the tile unit, which multiplies
// while epilogues run, it must win first.
bool Step::panels(const kvl_instruction& instruction, Span few, const Activations& x, Span span, Claim& claim, int thread) {
    static_assert(kPanelsTaken * (kFusedTokens - 1) <= kTileRows);
    const Linear& linear = model_.linears[size_t(instruction.linear)];
    const bool is_head = instruction.epilogue == KVL_LOGITS;
    const int64_t rows = span.end - span.begin;
    if (Way(linear.activation_format(), rows, model_.unit).is_in_tiles) {
        if (!claim.wins()) return false;
        for (int64_t p = few.begin; p < few.end; p++) panel(instruction, p, x, span, thread);
        return true;
    }
    alignas(64) float sums[kTileRows * kPanel];
    const auto sums_of = [&](int64_t panel) { return sums + (panel - few.begin) * rows * kPanel; };
    const auto epilogue = [&](int64_t panel) { return epilogue_of(instruction, panel, thread).from(span.begin); };
    for (int64_t p = few.begin; p < few.end; p++) {
        const Way way(linear.format(p), rows, model_.unit);
        const Epilogue end = epilogue(p);
        for (int64_t r = 0; !is_head && r < rows; r++) end.ask(r);
        for (int64_t i = 0; i < way.passes.count; i++) {
            const int64_t begin = way.passes.begin(i), count = way.passes.begin(i + 1) - begin;
            way.multiply({x, span.begin + begin, linear.padded_cols, linear.panel(p), sums_of(p) + begin * kPanel, nullptr,
                          way.ahead(i, linear.padded_cols), way.is_passing()}, int(count));
        }
        if (!is_head) end.prepare(int(rows), sums_of(p));
    }
    if (!claim.wins()) return false;
    for (int64_t p = few.begin; p < few.end; p++) {
        if (!is_head) epilogue(p).put(int(rows), sums_of(p));
        for (int64_t r = 0; is_head && r < rows; r++) keep_logits(span.begin + r, p * kPanel, sums_of(p) + r * kPanel, thread);
    }
    return true;
}

// Multiplies one panel by the rows `span`, and applies the epilogue while the sums are in the first-level cache.
void Step::panel(const kvl_instruction& instruction, int64_t index, const Activations& x, Span span, int thread) {
    const Linear& linear = model_.linears[size_t(instruction.linear)];
    alignas(64) float sums[kTileRows * kPanel];
    const Way way(linear.format(index), span.end - span.begin, model_.unit);
    const bool is_head = instruction.epilogue == KVL_LOGITS;
    const Epilogue epilogue = epilogue_of(instruction, index, thread);
    for (int64_t i = 0; i < way.passes.count; i++) {
        const int64_t begin = span.begin + way.passes.begin(i), end = span.begin + way.passes.begin(i + 1);
        const Pass pass{x, begin, linear.padded_cols, linear.panel(index), sums, &epilogue, way.ahead(i, linear.padded_cols), way.is_passing()};
        way.multiply(is_head ? pass.without_epilogue() : pass, int(end - begin));
        for (int64_t r = begin; is_head && r < end; r++) keep_logits(r, index * kPanel, sums + (r - begin) * kPanel, thread);
    }
}

// The buffer that a linear's epilogue writes or adds to.
Rows Step::target_of(const kvl_instruction& linear) const {
    switch (linear.epilogue) {
        case KVL_RESIDUAL:
        case KVL_GATED_RESIDUAL: return scratch_.residual;
        case KVL_TO_BRANCH: return scratch_.branch;
        case KVL_TO_QKV: return scratch_.qkv;
        case KVL_TO_INPUTS: return scratch_.inputs;
        default: return scratch_.mlp;
    }
}

// The epilogue of one panel. Rows of float buffers are padded, so whole panels are stored (except logits); padded
// channels are zero.
Epilogue Step::epilogue_of(const kvl_instruction& linear, int64_t panel, int thread) const {
    const Rows target = target_of(linear);
    const bool is_gated = linear.epilogue == KVL_GATED_RESIDUAL, gives_gates = is_gate(linear.epilogue);
    const int64_t channel = panel * kPanel, column = linear.at + (gives_gates ? channel / 2 : channel);
    Epilogue epilogue{linear.epilogue, &shape_, bias_of(linear, panel), target.at + column, target.stride};
    epilogue.adds = is_gated || linear.epilogue == KVL_RESIDUAL;
    epilogue.residual_scale = shape_.residual_scale;
    if (linear.epilogue != KVL_LOGITS && has_low_rank(linear.linear))
        epilogue.low_rank = {tokens_.data(), lora_rows(thread), lora_stride_, panel, linear.linear};
    epilogue.shares = is_gated ? scratch_.experts.shared : nullptr;
    if (gives_gates && panel + 1 == model_.linears[size_t(linear.linear)].panels)  // an MLP is wider than its gates
        epilogue.padding = int((round_up(column + kLanes, kPad) - column) / kLanes) - 1;
    return epilogue;
}

// Scales and caps a panel of logits of one row, then writes them to memory or offers them to the row's candidates.
void Step::keep_logits(int64_t row, int64_t channel, const float* logits, int thread) {
    const int64_t count = std::min<int64_t>(kPanel, shape_.vocab_size - channel);
    alignas(64) float changed[kPanel];
    if (shape_.logit_scale != 1 || shape_.logit_softcap > 0) {
        for (int i = 0; i < kPanel; i += kLanes) {
            const F32 scaled = mul(load(logits + i), splat(shape_.logit_scale));
            store(changed + i, shape_.logit_softcap > 0 ? softcap(scaled, shape_.logit_softcap) : scaled);
        }
        logits = changed;
    }
    if (batch_.tops[row] > 0) return candidates_.offer(thread, row, int32_t(channel), logits, int(count));
    std::copy(logits, logits + count, batch_.logits + logits_index_[size_t(row)] * shape_.vocab_size + channel);
}

// Runs after the head: merges the candidates of each row and, if the batch has choices, chooses its next token. Threads
// take rows one by one, because those whose tokens are drawn from all logits take longest. Memory is taken here alone
// inside the pool's run(), which no exception may leave.
void Step::choose_tokens() try {
    for (int64_t r; (r = next_row_.fetch_add(1, std::memory_order_relaxed)) < batch_.num_rows;) {
        if (batch_.tops[r] > 0) candidates_.merge(r, batch_.top_values + r * batch_.max_top, batch_.top_ids + r * batch_.max_top);
        if (batch_.choices) batch_.tokens[r] = choose_token(r);
    }
} catch (const std::bad_alloc&) {
    lacks_memory_.store(true, std::memory_order_relaxed);
}

int32_t Step::choose_token(int64_t row) const {
    const kvl_choice& choice = batch_.choices[row];
    const int32_t* ids = batch_.top_ids + row * batch_.max_top;
    const int32_t count = batch_.tops[row];
    if (count == 1) return ids[0];
    if (choice.temperature <= 0) return -1;
    const kvl_draw_rules rules{choice.temperature, choice.top_p, choice.min_p, uniform(choice.seed, choice.position)};
    if (count == 0) return draw(batch_.logits + logits_index_[size_t(row)] * shape_.vocab_size, shape_.vocab_size, rules);
    return ids[draw(batch_.top_values + row * batch_.max_top, count, rules)];
}

void run_step(kvl_model& model, const kvl_batch& batch) {
    const Asked asked(model, batch);
    Step all(model, batch);
    std::optional<Step> rest;
    if (asked.has_others() && !asked.is_nobody()) rest.emplace(model, asked.batch());
    const int64_t end = int64_t(model.program.size()), split = asked.has_others() ? model.last_mixer : end;
    for (std::atomic<int64_t>& next : model.next) next.store(0, std::memory_order_relaxed);
    model.pool.run([&](int thread) {
        all.begin(thread);
        all.work({0, split}, thread);
        if (!rest) return;
        if (thread == 0) asked.gather(model.scratch);
        model.pool.barrier(thread);
        rest->work({split, end}, thread);
    });
    if (all.lacks_memory() || (rest && rest->lacks_memory())) throw std::bad_alloc();
}

}  // namespace kvl

const char* kvl_isa(void) { return kvl::kIsaName; }

int32_t kvl_use(kvl_model* model, int32_t unit) {
    if (unit == KVL_TILES && !kvl::has_tiles()) return 0;
    if (unit == KVL_PAIRS && !kvl::has_pairs()) return 0;
    model->unit = unit;
    return 1;
}

int32_t kvl_step(kvl_model* model, const kvl_batch* batch) {
    return kvl::or_out_of_memory([=] {
        kvl::run_step(*model, *batch);
        return 0;
    });
}

int32_t kvl_step_again(kvl_model* model, const kvl_batch* batch) {
    int32_t *ids = const_cast<int32_t*>(batch->ids), *pos = const_cast<int32_t*>(batch->pos);
    kvl_choice* choices = const_cast<kvl_choice*>(batch->choices);
    for (int32_t r = 0; r < batch->num_rows; r++) {
        ids[r] = batch->tokens[r];
        pos[r]++;
        choices[r].position++;
    }
    return kvl_step(model, batch);
}
