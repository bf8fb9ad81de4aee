// A model as the library holds it: packed weights, the layer program, and the scratch memory of a step.
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

// A run of panels in one format: from panel `first` to the first panel of the next stretch.
struct Stretch {
    int64_t first;
    int format;
};

// Panels [share(t), share(t + 1)) lie one after the other at part[t], in thread t's arena.
struct Linear {
    int64_t rows, cols, padded_cols, panels;
    std::vector<Stretch> stretches;
    std::vector<uint8_t*> part;

    int format(int64_t panel) const {
        size_t last = stretches.size() - 1;
        while (panel < stretches[last].first) last--;
        return stretches[last].format;
    }
    // Format that determines how activations are quantised: the same for every stretch.
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

// Row `channel` of a linear, each weight as the float that it stands for; out[cols].
void read_row(const Linear& linear, int64_t channel, float* out);

// Float rows with a padded stride; the padding stays zero.
struct Rows {
    float* at;
    int64_t stride;
    float* row(int64_t index) const { return at + index * stride; }
};

// Scratch memory of a step over a model with experts; empty for other models. A slot is one row of one expert.
struct ExpertScratch {
    Rows logits;                    // [tokens], then [threads], of the router
    Rows gates, apart;              // [slots] what down reads; gate and up where they are in panels of their own
    Choice* chosen;                 // [tokens * per_token]
    float* shared;                  // [tokens] weight of the shared expert
    Activations slots;              // what the experts read: first for gate and up, then for down
    std::vector<Activations> own;   // the latter of small steps, a copy for each thread
    std::vector<std::vector<Choice>> own_chosen;  // [threads][kOwnTokens * per_token] of small steps
    std::vector<Groups> groups;     // of each thread
};

// Cuts `count` off the front of a buffer, kept to whole cache lines.
template <class T>
T* take(uint8_t*& at, int64_t count) {
    T* result = reinterpret_cast<T*>(at);
    at += round_up(count * int64_t(sizeof(T)), 64);
    return result;
}

inline Activations take_activations(uint8_t*& at, int64_t tokens, int64_t cols) {
    tokens += kRowsBehind;
    int8_t* data = take<int8_t>(at, tokens * cols * 2);  // bf16 is the widest form
    float* scale = take<float>(at, tokens * (cols / kFileGroup));
    return {data, scale, take<int32_t>(at, tokens * (cols / kRun))};
}

// Buffers of a step, kept between steps.
struct Scratch {
    HugeBuffer memory;
    int64_t capacity = 0;  // tokens
    Rows residual, qkv, attended, mlp;  // qkv: what any linear with KVL_TO_QKV gives
    Rows branch;                        // output of a branch that is normed before it is added to the residual stream
    uint16_t* queries;                  // [num_kv_heads][tokens][heads of one][head_dim] of what kvcache.hpp stores
    float* query_scale;                 // of each
    Activations quantised[2];           // written by all threads; in turns, so that what is read is not what is written next
    std::vector<float*> unit;           // [threads] of panels that are finished together: their floats, of one pass
    std::vector<Activations> own;       // small steps: every thread quantises for itself and no barrier is needed
    std::vector<float*> row;            // a float row a thread
    int64_t widest;
    ExpertScratch experts;
    std::vector<uint8_t> lora;          // h of the rows with an adapter: of all threads, then of each thread for itself
};

// Cosines and sines of the first `dim` of each head: [positions][dim], the caller's.
struct RopeTable {
    const float* at;
    int dim;
};

}  // namespace kvl

// The model, under the name that the C interface uses.
struct kvl_model {
    explicit kvl_model(const kvl_shape& shape) : shape(shape), pool(shape.num_threads) {}

    int64_t hidden_stride() const { return kvl::round_up(shape.hidden, kvl::kPad); }
    int64_t query_width() const { return int64_t(shape.num_heads) * shape.head_dim; }
    int64_t kv_width() const { return int64_t(shape.num_kv_heads) * shape.head_dim; }

    const kvl_shape shape;
    kvl::Pool pool;
    std::vector<kvl::Linear> linears;
    std::vector<std::vector<float>> vectors;  // padded with zeros to kPad
    // one per thread, linears in execution order: the DRAM stream never jumps
    std::vector<kvl::HugeBuffer> arenas;
    std::vector<kvl_instruction> program;
    int64_t last_attention = -1;  // of its instructions
    std::vector<uint8_t> turns;  // [program] which of Scratch::quantised is the last that has been written
    std::vector<std::unique_ptr<kvl::Adapter>> adapters;  // by id; null = free
    const uint16_t* embed = nullptr;  // null: the rows of embed_linear
    int32_t embed_linear = -1;
    int unit = KVL_NO_UNIT;
    std::vector<kvl::RopeTable> ropes;
    std::vector<kvl_mixture> mixtures;
    kvl::Scratch scratch;
    std::vector<std::atomic<int64_t>> next;  // [program][threads] work handed out one by one: panels, attention tasks
};
