// One ragged step of a model: every thread runs all instructions of the program, with barriers between them where one
// needs results of other threads.
#pragma once

#include "activations/rope.hpp"
#include "attention/attention_tiles.hpp"
#include "isa/tile_unit.hpp"
#include "linear/way.hpp"
#include "mixers/mixer.hpp"
#include "model/model.hpp"
#include "sampling/candidates.hpp"

namespace kvl {

// A small step has at most so many tokens: each thread quantises all rows for itself, which costs less than a barrier.
constexpr int kOwnTokens = 2;
// From so many tokens on, threads take panels one by one, so that a thread that loses its core does less of the work.
constexpr int kHandOutTokens = 8;
// Panels that a thread takes at once in a step that is not fused: counting them waits for all of its loads.
constexpr int kPanelsTaken = 3;
constexpr int kRowItems = 4;  // items for each thread into which work on rows is divided
constexpr int kPanelsTogether = 16;  // panels multiplied in one call, so that the tile unit does not pause between them
// Tiles of a context that are prefetched before attention reads them: 128 KB of bf16 keys and values of 64 dims, and
// of larger heads at most kAskedKvBytes.
constexpr int kAskedTiles = 32;
constexpr int64_t kAskedKvBytes = 512 << 10;
constexpr int kFusedTokens = 64;     // from so many tokens on, instructions are fused (step/fused.cpp)

// Places the scratch memory of the experts for `tokens` tokens at `at`; returns its end.
uint8_t* lay_out_experts(Scratch& s, const kvl_model& model, int64_t tokens, uint8_t* at);
// The same of latent attention, and the floats of a row that it needs of qkv and attended.
uint8_t* lay_out_latents(Scratch& s, const kvl_model& model, uint8_t* at);
int64_t widest_latent(const kvl_model& model);
// Floats of a row that KVL_JOIN makes; 0 = there is none.
int64_t width_joined(const kvl_model& model);

// Attention of a few query rows of one kv head of one sequence over all keys that they see.
struct AttentionTask {
    int32_t sequence, kv_head;
    int32_t first_row, num_rows;  // row = token of the sequence * heads a kv head + head within the group
};

// Where a token is in the cache: its block of all tokens and that of a window's, the tile there, and its place in the
// tile.
struct Place {
    uint8_t *block, *window;
    int tile, slot;
};

// What the products of all heads have in common: their number, and the sizes of a head's input and output.
struct HeadProduct {
    int64_t heads, in, out;
};

// A range [begin, end) of rows or instructions.
struct Span {
    int64_t begin, end;
};

class Step {
  public:
    Step(kvl_model& model, const kvl_batch& batch);
    // Both are called by every thread inside the pool's run(): begin() computes the embeddings, work() executes a range
    // of the program's instructions in order.
    void begin(int thread);
    void work(Span instructions, int thread);
    bool lacks_memory() const { return lacks_memory_.load(std::memory_order_relaxed); }  // its tokens are not chosen

  private:
    void reserve();
    void plan_attention(const kvl_attention& shape);
    void find_places();
    void find_adapters();
    void execute(const kvl_instruction& instruction, int thread);
    void embed(int64_t token);
    void quantize(const kvl_instruction& instruction, int thread);
    void mix(const kvl_instruction& instruction, int thread);
    template <class Work>
    void mix_parts(const kvl_instruction& instruction, int64_t count, int64_t state_at, int thread, const Work& work);
    template <class Work>
    void mix_channels(const kvl_instruction& instruction, int64_t count, int64_t state_at, int thread, const Work& work);
    void add_normed(const kvl_instruction& instruction, int thread);
    void norm_branch(const kvl_instruction& instruction, int thread);
    void join(const kvl_instruction& instruction, int thread);
    void make_inputs(const kvl_instruction& instruction, int thread);
    const float* gated_inputs(const kvl_instruction& instruction, int64_t row, int64_t size, float* room) const;
    void add_positions(const kvl_instruction& instruction, int thread);
    void norm_layer(const kvl_instruction& instruction, int thread);
    void keep_states(const kvl_instruction& instruction, int thread);
    void multiply(const kvl_instruction& instruction, int thread);
    void panel(const kvl_instruction& instruction, int64_t index, const Activations& x, Span span, int thread);
    bool panels(const kvl_instruction& instruction, Span few, const Activations& x, Span span, Claim& claim, int thread);
    bool does_next(const kvl_instruction& instruction) const;
    bool is_done(const kvl_instruction& instruction) const;
    // The activations that an instruction writes (if it quantises) or reads (if it is a linear).
    const Activations& activations(const kvl_instruction& instruction, int64_t rows, int thread) const {
        if (is_small(rows)) return scratch_.own[size_t(thread)];
        return scratch_.quantised[model_.turns[size_t(&instruction - model_.program.data())]];
    }
    bool precedes_rows(const kvl_instruction& linear) const;
    Passes strips_of(const kvl_instruction& linear, int64_t rows) const;
    bool has_strips(const kvl_instruction& linear, int64_t floats) const;
    int64_t panels_of_unit(const kvl_instruction& linear) const;
    bool unit(const kvl_instruction& instruction, int64_t index, const Activations& x, Span span, Claim& claim, int thread);
    void multiply_few(const kvl_instruction& instruction, Span few, const Activations& x, Span rows, Rows floats);
    void follow(const kvl_instruction& next, int64_t row, int64_t index, float* x, int thread);
    void store_columns(const kvl_instruction& quant, int64_t row, int64_t first, const float* x, int64_t count) const;
    Rows target_of(const kvl_instruction& linear) const;
    const float* float_row(const kvl_instruction& instruction, int64_t row, float* room) const;
    const float* source_row(const kvl_instruction& quant, int64_t row, float* room) const;
    bool has_low_rank(int32_t linear) const;
    void prefetch_b(int32_t linear, int64_t panel) const {
        for (const Adapter* adapter : step_adapters_) adapter->linears[size_t(linear)].prefetch_b(panel);
    }
    void ask_for_a(int64_t index, int thread) const;
    void shrink_tokens(int32_t linear, Span span, const Activations& x, int thread);
    Epilogue epilogue_of(const kvl_instruction& linear, int64_t panel, int thread) const;
    const float* bias_of(const kvl_instruction& linear, int64_t panel) const {
        const float* bias = vector(linear.vector);
        return bias ? bias + panel * kPanel : nullptr;
    }
    void keep_logits(int64_t row, int64_t channel, const float* logits, int thread);
    void choose_tokens();
    int32_t choose_token(int64_t row) const;
    void place_heads(const kvl_instruction& instruction, int thread);
    template <class Cache>
    void place_token(const kvl_instruction& instruction, int64_t token);
    template <class Cache>
    void place_value(const kvl_attention& own, const Place& place, int head, float* at) const;
    template <class Cache>
    void place_head(const kvl_instruction& instruction, int64_t token, int head, float* at);
    int64_t query_at(const kvl_attention& own, int64_t token, int head) const;
    float growth_at(int position) const;
    void route(const kvl_instruction& instruction, int thread);
    void score_row(const kvl_mixture& mixture, int64_t row, const float* x, int thread);
    void choose_row(const kvl_mixture& mixture, int64_t row, int thread, Choice* out);
    void gather(const Linear& linear, const Activations& from, int thread);
    void multiply_up(const kvl_instruction& instruction, int thread);
    void up_panel(const kvl_instruction& instruction, int64_t group, int64_t index, int thread);
    void multiply_down(const kvl_instruction& instruction, int thread);
    void down_panel(const kvl_instruction& instruction, int64_t group, int64_t index, int thread);
    template <class Cache>
    void place_latent(const kvl_instruction& instruction, int64_t token);
    void place_latents(const kvl_instruction& instruction, int thread);
    template <class From, class Use>
    void multiply_heads(const kvl_instruction& instruction, const HeadProduct& product, int thread, const From& from, const Use& use);
    void make_queries(const kvl_instruction& instruction, int thread);
    void make_values(const kvl_instruction& instruction, int thread);
    void attend(const kvl_instruction& instruction, int thread);
    void ask_for(int64_t index, const kvl_instruction& attention) const;
    bool attend_task(const AttentionTask& task, const kvl_instruction& instruction, Claim& claim);

    // First of the items [0, count) that belong to `thread` when they are divided evenly among the threads.
    int64_t deal(int64_t count, int thread) const { return count * thread / model_.pool.size(); }
    int64_t index_of(const kvl_instruction& instruction) const { return &instruction - model_.program.data(); }
    // Takes the next item of an instruction's work for the calling thread; counts beyond the last item.
    int64_t next(const kvl_instruction& instruction) { return counter(index_of(instruction), 0).fetch_add(1, std::memory_order_relaxed); }
    // Takes the next of `count` items of work `index` for `thread`: first those of its own share, whose rows and weights
    // it has used before, then items of other threads' shares that are not taken yet. Returns `count` when none is left.
    int64_t next(int64_t index, int64_t count, int thread) {
        for (int i = 0, of = thread; i < model_.pool.size(); i++, of = (of + 1) % model_.pool.size()) {
            const int64_t item = deal(count, of) + counter(index, of).fetch_add(1, std::memory_order_relaxed);
            if (item < deal(count, of + 1)) return item;
        }
        return count;
    }
    // index: of an instruction in the program, or kvl_model::embedding()
    std::atomic<int64_t>& counter(int64_t index, int thread) { return model_.next[size_t(thread * model_.counters() + index)]; }
    // Does `count` items of work `index` on all threads (Pool::share).
    template <class Work>
    void share(int64_t index, int64_t count, int thread, const Work& work) {
        const auto next_item = [&] {
            const int64_t item = next(index, count, thread);
            if (item == count) ask_for_a(index + 1, thread);
            return item;
        };
        model_.pool.share(thread, count, next_item, work);
    }
    // The same for items that nobody helps with.
    template <class Work>
    void share_whole(int64_t index, int64_t count, int thread, const Work& work) {
        share(index, count, thread, [&](Claim claim) {
            if (!claim.wins()) return false;
            work(claim.item());
            return true;
        });
    }
    // Does the rows of work `index`, a few of them at a time. They take so little time that nobody helps with them.
    template <class Work>
    void share_rows(int64_t index, int64_t rows, int thread, const Work& work) {
        if (rows < kHandOutTokens) {
            for (int64_t r = deal(rows, thread); r < deal(rows, thread + 1); r++) work(r);
            return sync(thread);
        }
        const int64_t each = std::max<int64_t>(1, rows / (kRowItems * model_.pool.size()));
        share_whole(index, (rows + each - 1) / each, thread, [&](int64_t item) {
            for (int64_t r = item * each; r < std::min(rows, (item + 1) * each); r++) work(r);
        });
    }
    void sync(int thread) { model_.pool.barrier(thread); }
    bool is_small(int64_t rows) const { return rows <= kOwnTokens; }
    const float* vector(int32_t index) const { return index < 0 ? nullptr : model_.vectors[size_t(index)].data(); }
    // Address of h of token 0, in the shared area or, in a small step, in the thread's own area. Tokens are
    // lora_stride_ bytes apart.
    uint8_t* lora_rows(int thread) const {
        const bool small = is_small(batch_.num_tokens);
        return scratch_.lora.data() + (small ? batch_.num_tokens + thread * kOwnTokens : 0) * lora_stride_;
    }
    // Rotates a head at a position by a rotary table of the model; -1 = not at all.
    void turn(float* head, int32_t rope, int position) const {
        if (rope < 0) return;
        const RopeTable& table = model_.ropes[size_t(rope)];
        rotate(head, table.at + int64_t(position) * table.dim, table.dim);
    }
    const kvl_attention& attention_of(const kvl_instruction& i) const { return model_.attentions[size_t(i.layer)]; }
    const std::vector<AttentionTask>& tasks_of(const kvl_instruction& i) const {
        return tasks_[size_t(model_.plans[size_t(i.layer)])];
    }
    PagedHead head_of(const AttentionTask& task, const kvl_instruction& attention) const;
    uint8_t* key_tile(const kvl_attention& own, const Place& place, int head) const;
    uint8_t* value_tile(const kvl_attention& own, const Place& place, int head) const;

    kvl_model& model_;
    const kvl_batch& batch_;
    const kvl_shape& shape_;
    Scratch& scratch_;
    const bool attends_in_tiles_;
    bool is_fused_ = false;  // whether instructions are fused with the one before where possible
    std::vector<int32_t> sequence_;  // [num_tokens] the sequence of each token
    std::vector<Place> places_;      // [num_tokens]
    std::vector<std::vector<AttentionTask>> tasks_;  // by kvl_model::plans
    std::vector<int64_t> logits_index_;  // [num_rows] index in batch.logits of a row that returns all logits, else -1
    Candidates candidates_;       // of the other rows
    std::atomic<int64_t> next_row_{0};  // the next of batch_.num_rows rows whose token is to be chosen
    std::atomic<bool> lacks_memory_{false};
    std::vector<LoraToken> tokens_;              // [num_tokens]; empty if the step has no adapter
    std::vector<const Adapter*> step_adapters_;  // the step's adapters, without duplicates
    // [num_tokens] indices of tokens: each thread's share is contiguous and sorted by adapter. Empty if tokens_ is.
    std::vector<int32_t> by_adapter_;
    int64_t lora_stride_ = 0;                    // bytes of a token's h; 0 if the step has no adapter
};

// Runs the whole program for a batch; leaves out what no requested logits or states depend on (step/asked.hpp). Throws
// std::bad_alloc.
void run_step(kvl_model& model, const kvl_batch& batch);

}  // namespace kvl
