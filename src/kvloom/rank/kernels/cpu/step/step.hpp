// One ragged step: every thread runs the program from its first instruction to its last, with a barrier where needed.
#pragma once

#include "activations/rope.hpp"
#include "attention/attention_tiles.hpp"
#include "isa/tile_unit.hpp"
#include "linear/way.hpp"
#include "model/model.hpp"
#include "sampling/candidates.hpp"

namespace kvl {

constexpr int kOwnTokens = 2;        // up to here each thread quantises all rows for itself: cheaper than a barrier
constexpr int kHandOutTokens = 8;    // from here panels are handed out one by one, so a disturbed thread does less
constexpr int kPanelsTogether = 16;  // that rows meet one behind the other, without a pause of the tile unit
// blocks of a context prefetched before attention reads them: 128 KB of bf16 keys and values of 64 dims
constexpr int kAskedBlocks = 32;
constexpr int kFusedTokens = 64;     // from here instructions are fused with the one before (fused.cpp)

// Lays the scratch of the experts out for `tokens` at `at` and returns its end.
uint8_t* lay_out_experts(Scratch& s, const kvl_model& model, int64_t tokens, uint8_t* at);

// A few query rows of one kv head of one sequence, over all keys they see.
struct AttentionTask {
    int32_t sequence, kv_head;
    int32_t first_row, num_rows;  // row = token of the sequence * heads a kv head + head within the group
};

// Rows [begin, end) of a step, or instructions.
struct Span {
    int64_t begin, end;
};

class Step {
  public:
    Step(kvl_model& model, const kvl_batch& batch);
    // Called by every thread, inside the pool's run(): begin() computes the embeddings, work() executes some of the
    // program's instructions, in order.
    void begin(int thread);
    void work(Span instructions, int thread);

  private:
    void reserve();
    void plan_attention();
    void find_adapters();
    void execute(const kvl_instruction& instruction, int thread);
    void embed_tokens(int thread);
    void quantize(const kvl_instruction& instruction, int thread);
    void add_normed(const kvl_instruction& instruction, int thread);
    void add_positions(const kvl_instruction& instruction, int thread);
    void norm_layer(const kvl_instruction& instruction, int thread);
    void keep_states(const kvl_instruction& instruction, int thread);
    void multiply(const kvl_instruction& instruction, int thread);
    void panel(const kvl_instruction& instruction, int64_t index, const Activations& x, Span span, int thread);
    bool does_next(const kvl_instruction& instruction) const;
    bool is_done(const kvl_instruction& instruction) const;
    // Activations that an instruction quantises, or that a linear reads.
    const Activations& activations(const kvl_instruction& instruction, int64_t rows, int thread) const {
        if (is_small(rows)) return scratch_.own[size_t(thread)];
        return scratch_.quantised[model_.turns[size_t(&instruction - model_.program.data())]];
    }
    bool precedes_rows(const kvl_instruction& linear) const;
    Passes strips_of(const kvl_instruction& linear, int64_t rows) const;
    bool has_strips(const kvl_instruction& linear, int64_t floats) const;
    int64_t panels_of_unit(const kvl_instruction& linear) const;
    void unit(const kvl_instruction& instruction, int64_t index, const Activations& x, Span span, int thread);
    void multiply_few(const kvl_instruction& instruction, Span few, const Activations& x, Span rows, Rows floats);
    void follow(const kvl_instruction& next, int64_t row, int64_t index, float* x, int thread);
    void store_columns(const kvl_instruction& quant, int64_t row, int64_t first, const float* x, int64_t count) const;
    Rows target_of(const kvl_instruction& linear) const;
    const float* float_row(const kvl_instruction& instruction, int64_t row, float* room) const;
    bool has_low_rank(int32_t linear) const;
    void prefetch_b(int32_t linear, int64_t panel) const {
        for (const Adapter* adapter : step_adapters_) adapter->linears[size_t(linear)].prefetch_b(panel);
    }
    void ask_for_a(const kvl_instruction& done, int thread) const;
    void shrink_tokens(int32_t linear, Span span, const Activations& x, int thread);
    Epilogue epilogue_of(const kvl_instruction& linear, int64_t panel, int thread) const;
    const float* bias_of(const kvl_instruction& linear, int64_t panel) const {
        const float* bias = vector(linear.vector);
        return bias ? bias + panel * kPanel : nullptr;
    }
    void keep_logits(int64_t row, int64_t channel, const float* logits, int thread);
    void choose_tokens(int thread);
    int32_t choose_token(int64_t row) const;
    void place_heads(const kvl_instruction& instruction, int thread);
    template <class Cache>
    void place_token(const kvl_instruction& instruction, int64_t token);
    template <class Cache>
    void place_head(const kvl_instruction& instruction, int64_t token, int head, float* at);
    int64_t query_at(int64_t token, int head) const;
    void route(const kvl_instruction& instruction, int thread);
    void score_row(const kvl_mixture& mixture, int64_t row, const float* x, int thread);
    void choose_row(const kvl_mixture& mixture, int64_t row, int thread, Choice* out);
    void gather(const Linear& linear, const Activations& from, int thread);
    void multiply_up(const kvl_instruction& instruction, int thread);
    void up_panel(const kvl_instruction& instruction, int64_t group, int64_t index, int thread);
    void multiply_down(const kvl_instruction& instruction, int thread);
    void down_panel(const kvl_instruction& instruction, int64_t group, int64_t index, int thread);
    void attend(const kvl_instruction& instruction, int thread);
    void ask_for(int64_t index, const kvl_instruction& attention) const;
    void attend_task(const AttentionTask& task, const kvl_instruction& instruction);

    // First of the items [0, count) that belong to `thread` when they are dealt out evenly.
    int64_t deal(int64_t count, int thread) const { return count * thread / model_.pool.size(); }
    // The next item of an instruction's work, for the calling thread.
    int64_t next(const kvl_instruction& instruction) { return counter(instruction, 0).fetch_add(1, std::memory_order_relaxed); }
    // The next of `count` items: first those dealt to the thread, so that it reuses the rows and weights that it used
    // before, then items that other threads have not taken yet. Returns `count` when none is left.
    int64_t next(const kvl_instruction& instruction, int64_t count, int thread) {
        for (int i = 0, of = thread; i < model_.pool.size(); i++, of = (of + 1) % model_.pool.size()) {
            const int64_t item = deal(count, of) + counter(instruction, of).fetch_add(1, std::memory_order_relaxed);
            if (item < deal(count, of + 1)) return item;
        }
        return count;
    }
    std::atomic<int64_t>& counter(const kvl_instruction& instruction, int thread) {
        return model_.next[size_t((&instruction - model_.program.data()) * model_.pool.size() + thread)];
    }
    void sync() { model_.pool.barrier(); }
    bool is_small(int64_t rows) const { return rows <= kOwnTokens; }
    const Rows& source_of(const kvl_instruction& quant) const {
        if (quant.source == KVL_FROM_RESIDUAL) return scratch_.residual;
        return quant.source == KVL_FROM_MLP ? scratch_.mlp : scratch_.attended;
    }
    const float* vector(int32_t index) const { return index < 0 ? nullptr : model_.vectors[size_t(index)].data(); }
    // h of token 0: in the shared area, or in this thread's own area in a small step, like the activations. Tokens are
    // lora_stride_ bytes apart.
    uint8_t* lora_rows(int thread) const {
        const bool small = is_small(batch_.num_tokens);
        return scratch_.lora.data() + (small ? batch_.num_tokens + thread * kOwnTokens : 0) * lora_stride_;
    }
    uint8_t* cache(int layer, int side) const;

    kvl_model& model_;
    const kvl_batch& batch_;
    const kvl_shape& shape_;
    Scratch& scratch_;
    const int heads_per_kv_;
    const int64_t tile_bytes_;  // of a block of one kv head, keys or values
    const bool attends_in_tiles_;
    bool is_fused_ = false;  // what can be done with the instruction before it is
    std::vector<int32_t> sequence_;  // [num_tokens] which one a token belongs to
    std::vector<AttentionTask> tasks_;
    std::vector<int64_t> place_;  // [num_rows] of a row that wants all its logits: where they go
    Candidates candidates_;       // of the other rows
    std::atomic<int64_t> next_row_{0};  // of those whose tokens are drawn of all logits
    std::vector<LoraToken> tokens_;              // [num_tokens]; empty when the step has no adapter
    std::vector<const Adapter*> step_adapters_;  // each of them once
    std::vector<int32_t> by_adapter_;            // [num_tokens] tokens, a thread's of one adapter together; empty as tokens_
    int64_t lora_stride_ = 0;                    // bytes of a token's h; 0 when the step has no adapter
};

// Runs the whole program, without the parts that no request needs.
void run_step(kvl_model& model, const kvl_batch& batch);

}  // namespace kvl
