// Packing adapters, and the part of a step that applies them.
#include "lora/lora.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <new>
#include <numeric>

#include "step/step.hpp"

namespace kvl {
namespace {

// A value of A or B as a byte, 128 + value / scale. Values of adapters are finite, so NaN cannot occur.
uint8_t byte_of(float value, float scale) {
    const float number = scale > 0 ? std::nearbyint(value / scale) : 0;
    return uint8_t(int(std::clamp(number, -127.0f, 127.0f)) + 128);
}

// Packs one rank, A[cols], into `lane` of a tile; `scale` is multiplied into the tile's scale of the rank.
void pack_rank(uint8_t* tile, int64_t lane, const float* a, int64_t cols, float scale, bool is_bf16) {
    const float own = is_bf16 ? 1 : peak_of(a, cols) / 127;
    reinterpret_cast<float*>(tile)[lane] = own * scale;
    tile += kLanes * sizeof(float);
    uint16_t* const halves = reinterpret_cast<uint16_t*>(tile);
    for (int64_t k = 0; k < cols; k++) {
        if (is_bf16) halves[k / 2 * 2 * kLanes + 2 * lane + k % 2] = float_to_bf16(a[k]);
        else tile[k / 4 * 4 * kLanes + 4 * lane + k % 4] = byte_of(a[k], own);
    }
}

void fill_zeros(uint8_t* tile, const LoraInput& input) {
    if (!input.is_bf16()) std::fill(tile + kLanes * sizeof(float), tile + input.tile_bytes(), uint8_t(128));
}

// Packs the row of B of one channel into `lane` of a half panel.
void pack_channel(uint8_t* half, int64_t lane, const float* b, int64_t rank, bool is_bf16) {
    uint16_t* const halves = reinterpret_cast<uint16_t*>(half);
    const uint16_t scale = float_to_bf16(peak_of(b, rank) / 127);
    if (!is_bf16) halves[lane] = scale;
    for (int64_t r = 0; r < rank; r++) {
        if (is_bf16) halves[r * kLanes + lane] = float_to_bf16(b[r]);
        else half[kLanes * 2 + r / 4 * 4 * kLanes + 4 * lane + r % 4] = byte_of(b[r], bf16_to_float(scale));
    }
}

// Arguments of kvl_adapter_add.
struct Module {
    const float *a, *b;
    int64_t rank, count;
    float scale;
    int64_t first;
    int32_t interleave;

    int64_t tiles() const { return round_up(rank, kLanes) / kLanes; }
    int64_t halves() const { return round_up(count, kLanes) / kLanes; }
    int64_t b_ranks() const { return round_up(rank, kRankPad); }
    int64_t half_bytes(bool is_bf16) const { return kLanes * (is_bf16 ? 2 * b_ranks() : b_ranks() + 2); }
    // The channels are those to which kvl_fill_f32 packs rows with the same `first` and `interleave`.
    LoraPart part(const uint8_t* own_a, const uint8_t* own_b, const LoraLinear& of) const {
        const int64_t begin = interleave < 0 ? first / kLanes : 2 * (first / kLanes) + interleave;
        return {own_a, own_b, int32_t(of.h_bytes), int32_t(tiles()), int32_t(b_ranks()), int32_t(half_bytes(of.is_bf16)),
                int32_t(begin), int32_t(halves()), interleave >= 0};
    }
};

// Packs A of a module into tiles at `at`.
void pack_a(uint8_t* at, const Module& module, int64_t cols, const LoraInput& input) {
    for (int64_t tile = 0; tile < module.tiles(); tile++) fill_zeros(at + tile * input.tile_bytes(), input);
    for (int64_t r = 0; r < module.rank; r++)
        pack_rank(at + r / kLanes * input.tile_bytes(), r % kLanes, module.a + r * cols, cols, module.scale, input.is_bf16());
}

// Packs B of a module into half panels at `at`.
void pack_b(uint8_t* at, const Module& module, bool is_bf16) {
    const int64_t bytes = module.half_bytes(is_bf16), head = is_bf16 ? 0 : kLanes * 2;
    for (int64_t half = 0; half < module.halves(); half++, at += bytes) {
        if (!is_bf16) std::fill(at + head, at + bytes, uint8_t(128));
        for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, module.count - half * kLanes); lane++)
            pack_channel(at, lane, module.b + (half * kLanes + lane) * module.rank, module.rank, is_bf16);
    }
}

}  // namespace

uint8_t* Adapter::take(int64_t bytes) {
    const int64_t room = round_up(bytes, kLine);
    if (room > left_) {
        left_ = round_up(room, kHugePage);
        memory_.emplace_back(left_);
        next_ = memory_.back().as();
    }
    uint8_t* const taken = next_;
    next_ += room;
    left_ -= room;
    return taken;
}

static bool changes(const Adapter* adapter, int32_t linear) {
    return adapter != nullptr && !adapter->linears[size_t(linear)].parts.empty();
}

// Finds the adapter of each token, and divides the tokens among the threads: each gets equally many with and without an
// adapter, sorted by adapter. In a step without adapters all its fields stay empty.
void Step::find_adapters() {
    for (int s = 0; batch_.adapters != nullptr && s < batch_.num_seqs; s++) {
        const int32_t id = batch_.adapters[s];
        if (id < 0) continue;
        tokens_.resize(size_t(batch_.num_tokens));
        const Adapter* const adapter = model_.adapters[size_t(id)].get();
        std::fill(tokens_.begin() + batch_.qstart[s], tokens_.begin() + batch_.qstart[s + 1], LoraToken{adapter});
        lora_stride_ = std::max(lora_stride_, adapter->widest);
        if (std::find(step_adapters_.begin(), step_adapters_.end(), adapter) == step_adapters_.end())
            step_adapters_.push_back(adapter);
    }
    if (lora_stride_ == 0) return;
    std::vector<int32_t> with, without;  // tokens
    for (int32_t t = 0; t < batch_.num_tokens; t++) (tokens_[size_t(t)].adapter ? with : without).push_back(t);
    std::stable_sort(with.begin(), with.end(), [this](int32_t a, int32_t b) {
        return std::less<const Adapter*>()(tokens_[size_t(a)].adapter, tokens_[size_t(b)].adapter);
    });
    for (size_t i = 1; i < with.size(); i++) {
        LoraToken &before = tokens_[size_t(with[i - 1])], &token = tokens_[size_t(with[i])];
        if (before.adapter == token.adapter) before.behind = token.before = with[i] - with[i - 1];
    }
    for (int thread = 0; thread < model_.pool.size(); thread++)
        for (const std::vector<int32_t>* some : {&with, &without}) {
            const int64_t count = int64_t(some->size());
            by_adapter_.insert(by_adapter_.end(), some->begin() + deal(count, thread), some->begin() + deal(count, thread + 1));
        }
    const size_t wanted = size_t((batch_.num_tokens + int64_t(model_.pool.size()) * kOwnTokens) * lora_stride_);
    if (scratch_.lora.size() < wanted) scratch_.lora.resize(wanted);
}

bool Step::has_low_rank(int32_t linear) const {
    return std::any_of(step_adapters_.begin(), step_adapters_.end(), [=](const Adapter* adapter) { return changes(adapter, linear); });
}

// Prefetches the beginning of the A that the thread will multiply after quantising its rows for instruction `index`;
// called before it waits for the other threads at the end of the instruction before.
void Step::ask_for_a(int64_t index, int thread) const {
    if (step_adapters_.empty() || index >= int64_t(model_.program.size())) return;
    const kvl_instruction* const next = &model_.program[size_t(index)];
    if (next->kind != KVL_NORM_QUANT && next->kind != KVL_QUANT) return;
    const int64_t first = is_small(batch_.num_tokens) ? 0 : deal(batch_.num_tokens, thread);
    const Adapter* const adapter = tokens_[size_t(by_adapter_[size_t(first)])].adapter;
    if (changes(adapter, next->linear)) prefetch(adapter->linears[size_t(next->linear)].parts.front().a, kAskedBytes);
}

// Computes h for `linear` of the tokens by_adapter_[span.begin, span.end). Tokens of one adapter share each load of A.
void Step::shrink_tokens(int32_t linear, Span span, const Activations& x, int thread) {
    const Linear& of = model_.linears[size_t(linear)];
    const LoraInput input{x, of.padded_cols, of.activation_format()};
    const auto adapter_at = [this](int64_t i) { return tokens_[size_t(by_adapter_[size_t(i)])].adapter; };
    for (int64_t i = span.begin; i < span.end;) {
        const Adapter* const adapter = adapter_at(i);
        LoraRows rows;
        do {
            rows.rows[rows.count] = by_adapter_[size_t(i)];
            rows.h[rows.count++] = lora_rows(thread) + by_adapter_[size_t(i)] * lora_stride_;
        } while (++i < span.end && rows.count < kLoraTokens && adapter_at(i) == adapter);
        if (!changes(adapter, linear)) continue;
        const Adapter* const next = i < span.end && changes(adapter_at(i), linear) ? adapter_at(i) : adapter;
        shrink(adapter->linears[size_t(linear)], input, rows, next->linears[size_t(linear)].parts.front().a);
    }
}

}  // namespace kvl

int32_t kvl_adapter_new(kvl_model* model) {
    return kvl::or_out_of_memory([=] {
        auto adapter = std::make_unique<kvl::Adapter>();
        adapter->linears.resize(model->linears.size());
        const auto free = std::find(model->adapters.begin(), model->adapters.end(), nullptr);
        const int32_t id = int32_t(free - model->adapters.begin());
        if (free == model->adapters.end()) model->adapters.emplace_back();
        model->adapters[size_t(id)] = std::move(adapter);
        return id;
    });
}

int64_t kvl_adapter_add(kvl_model* model, int32_t id, int32_t linear, const float* a, const float* b, int64_t rank,
                        int64_t count, float scale, int64_t first, int32_t interleave) {
    const kvl::Linear& of = model->linears[size_t(linear)];
    kvl::Adapter& adapter = *model->adapters[size_t(id)];
    kvl::LoraLinear& to = adapter.linears[size_t(linear)];
    const kvl::Module module{a, b, rank, count, scale, first, interleave};
    const kvl::LoraInput input{{}, of.padded_cols, of.activation_format()};
    to.is_bf16 = input.is_bf16();
    const int64_t a_bytes = module.tiles() * input.tile_bytes(), b_bytes = module.halves() * module.half_bytes(to.is_bf16);
    return kvl::or_out_of_memory([&] {
        uint8_t* const own_a = adapter.take(a_bytes);
        uint8_t* const own_b = adapter.take(b_bytes);
        kvl::pack_a(own_a, module, of.cols, input);
        kvl::pack_b(own_b, module, to.is_bf16);
        to.parts.push_back(module.part(own_a, own_b, to));
        to.h_bytes += module.tiles() * kvl::kLanes * (to.is_bf16 ? 4 : 1) + (to.is_bf16 ? 0 : int64_t(sizeof(kvl::IntHead)));
        adapter.widest = std::max(adapter.widest, to.h_bytes);
        return a_bytes + b_bytes;
    });
}

void kvl_adapter_free(kvl_model* model, int32_t id) { model->adapters[size_t(id)].reset(); }
