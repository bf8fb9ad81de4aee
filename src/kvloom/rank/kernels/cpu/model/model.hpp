// A model in memory: packed weights, the program of instructions, and the scratch memory of steps.
#pragma once

#include <atomic>
#include <cstdlib>
#include <memory>
#include <vector>

#include "activations/quant.hpp"
#include "experts/experts.hpp"
#include "layout.hpp"
#include "lora/lora.hpp"
#include "runtime/memory.hpp"
#include "runtime/pool.hpp"

namespace kvl {

// Consecutive panels in one format: from panel `first` up to the first panel of the next stretch.
struct Stretch {
    int64_t first;
    int format;
};

// A linear layer. Panels [share(t), share(t + 1)) are contiguous at part[t], in the arena of thread t.
struct Linear {
    int64_t rows, cols, padded_cols, panels;
    std::vector<Stretch> stretches;
    std::vector<uint8_t*> part;
    bool is_shared = false;  // its panels lie in the arenas of another model

    int format(int64_t panel) const {
        size_t last = stretches.size() - 1;
        while (panel < stretches[last].first) last--;
        return stretches[last].format;
    }
    // The format that determines how activations are quantised; the result is the same for every stretch.
    int activation_format() const { return stretches.front().format; }
    // Bytes of the panels before `panel`.
    int64_t offset(int64_t panel) const {
        int64_t bytes = 0;
        for (size_t s = 0; s < stretches.size(); s++) {
            const int64_t end = s + 1 < stretches.size() ? stretches[s + 1].first : panels;
            const int64_t held = end < panel ? end : panel;
            if (held > stretches[s].first) bytes += (held - stretches[s].first) * panel_bytes(stretches[s].format, padded_cols);
        }
        return bytes;
    }
    int64_t share(int thread) const { return panels * thread / int64_t(part.size()); }
    int owner(int64_t panel) const {
        int thread = 0;
        while (panel >= share(thread + 1)) thread++;
        return thread;
    }
    uint8_t* panel(int64_t index) const {
        const int thread = owner(index);
        return part[size_t(thread)] + offset(index) - offset(share(thread));
    }
};

// Reads the weights of an output channel of a linear, dequantised, into out[cols].
void read_row(const Linear& linear, int64_t channel, float* out);

// Rows of floats, `stride` floats apart. The padding of a row stays zero.
struct Rows {
    float* at;
    int64_t stride;
    float* row(int64_t index) const { return at + index * stride; }
};

// Scratch memory of a step over a model with experts; empty for other models. A slot is one row of one expert.
struct ExpertScratch {
    Rows logits;                    // of the router: [tokens] rows, then a copy to work on for each thread
    // [slots] the inputs of the down projections; gate and up, if these are in separate panels
    Rows gates, apart;
    Choice* chosen;                 // [tokens * per_token]
    float* shared;                  // [tokens] weight of the shared expert
    Activations slots;              // the experts' inputs: first of gate and up, then of down
    std::vector<Activations> own;   // small steps: each thread's own inputs of down
    std::vector<std::vector<Choice>> own_chosen;  // small steps: [threads][kOwnTokens * per_token]
    std::vector<Groups> groups;     // each thread's
};

// Takes `count` elements from the front of a buffer and advances `at` past them, to the next whole cache line.
template <class T>
T* take(uint8_t*& at, int64_t count) {
    T* result = reinterpret_cast<T*>(at);
    at += round_up(count * int64_t(sizeof(T)), 64);
    return result;
}

inline Activations take_activations(uint8_t*& at, int64_t tokens, int64_t cols) {
    tokens += kRowsBehind;
    int8_t* data = take<int8_t>(at, tokens * cols * 2);  // room for bf16, the widest type
    float* scale = take<float>(at, tokens * (cols / kFileGroup));
    return {data, scale, take<int32_t>(at, tokens * (cols / kRun))};
}

// Buffers of a step, kept between steps.
struct Scratch {
    HugeBuffer memory;
    int64_t capacity = 0;  // tokens
    Rows residual, qkv, attended, mlp;  // qkv: output of every linear with KVL_TO_QKV
    Rows branch;                        // output of KVL_TO_BRANCH, not yet normalised
    Rows beside;                        // what KVL_NORM_BRANCH keeps; empty if there is none
    Rows inputs;                        // what the layers get besides the residual stream; empty if there is none
    Rows gates;                         // of attention, before the sigmoid; empty if no layer has such
    Rows mixed;                         // output of mixers with a state; empty if there are none
    uint16_t* queries;                  // [num_kv_heads][tokens][heads per kv head][key_dim], as attention/kvcache.hpp
    float* query_scale;                 // one per query
    // Activations that all threads write together. Two, used in turns: an instruction may quantise the input of the
    // next linear while other threads still read that of the last one.
    Activations quantised[2];
    std::vector<float*> unit;           // [threads] floats of the unit that a thread computes (step/fused.cpp)
    std::vector<Activations> own;       // small steps: every thread quantises for itself, so no barrier is needed
    std::vector<float*> row;            // one row of floats per thread
    std::vector<Activations> heads;     // [threads] inputs of the products of heads (attention/latent.cpp)
    std::vector<float*> mixer;          // [threads] what mixers work in
    int64_t widest;
    ExpertScratch experts;
    std::vector<uint8_t> lora;          // h: an area that all threads share, then an area for each thread
};

// Cosines and sines for the first `dim` dimensions of each head: [positions][dim]. The caller owns the memory.
struct RopeTable {
    const float* at;
    int dim;
};

}  // namespace kvl

// The model, under the name of the C interface.
struct kvl_model {
    explicit kvl_model(const kvl_shape& shape) : shape(shape), pool(shape.num_threads) {}

    int64_t hidden_stride() const { return kvl::round_up(shape.hidden, kvl::kPad); }
    // Index of the counter of the embeddings.
    int64_t embedding() const { return int64_t(program.size()); }
    // Counters of a thread, one an instruction and one of the embeddings: no line of the cache has those of two threads,
    // who each count at every panel.
    int64_t counters() const { return kvl::round_up(int64_t(program.size()), 8) + 8; }

    const kvl_shape shape;
    kvl::Pool pool;
    std::vector<kvl::Linear> linears;
    std::vector<std::vector<float>> vectors;  // padded with zeros to kPad
    // one per thread; linears are in execution order, so that a thread reads its arena sequentially
    std::vector<kvl::HugeBuffer> arenas;
    std::vector<kvl_instruction> program;
    // index of the instruction from which on only requested tokens are needed: the last attention whose keys are its own,
    // or behind the last mixer with a state; -1 = there is neither
    int64_t last_mixer = -1;
    std::vector<uint8_t> turns;  // [program] index of the element of Scratch::quantised that was written last
    std::vector<std::unique_ptr<kvl::Adapter>> adapters;  // by id; null = free
    const uint16_t* embed = nullptr;  // null = the embeddings are the rows of embed_linear
    int32_t embed_linear = -1;
    int unit = KVL_NO_UNIT;
    std::vector<kvl::RopeTable> ropes;
    std::vector<kvl_attention> attentions;
    std::vector<int> plans;  // [attentions] number among those with other numbers of heads: these share a step's tasks
    std::vector<kvl_mixture> mixtures;
    std::vector<kvl_latent> latents;
    std::vector<kvl_delta_rule> delta_rules;
    std::vector<kvl_short_conv> short_convs;
    std::vector<kvl_convolution> convolutions;
    std::vector<kvl_mamba2> mamba2s;
    kvl::Scratch scratch;
    std::vector<std::atomic<int64_t>> next;  // [threads][counters()] work items that threads took
};
