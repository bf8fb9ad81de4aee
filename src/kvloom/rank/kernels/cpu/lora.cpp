// Packing adapters, and finding those of a step.
#include "lora.hpp"

#include <algorithm>
#include <new>
#include <numeric>

#include "step.hpp"

namespace kvl {
namespace {

void pack_a(uint16_t* to, const float* a, int64_t rank, int64_t cols, int64_t padded_cols) {
    for (int64_t r = 0; r < rank; r++) std::transform(a + r * cols, a + (r + 1) * cols, to + r * padded_cols, float_to_bf16);
}

// Rows [0, count) of B to the channels that pack.cpp gives to the module's own rows.
void pack_b(LoraLinear& to, uint16_t* at, const float* b, int64_t count, int64_t first, int32_t interleave) {
    const LoraPart& part = to.parts.back();
    const int64_t num_halves = round_up(count, kLanes) / kLanes;
    for (int64_t half = 0; half < num_halves; half++, at += part.rank * kLanes) {
        to.halves[size_t(interleave < 0 ? first / kLanes + half : 2 * half + interleave)] = {at, part.first, part.rank};
        for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, count - half * kLanes); lane++)
            for (int64_t r = 0; r < part.rank; r++)
                at[r * kLanes + lane] = float_to_bf16(b[(half * kLanes + lane) * part.rank + r]);
    }
}

}  // namespace

uint16_t* Adapter::take(int64_t count) {
    const int64_t room = round_up(count, kLine);
    if (room > left_) {
        left_ = round_up(2 * room, kHugePage) / 2;
        memory_.emplace_back(2 * left_);
        next_ = memory_.back().as<uint16_t>();
    }
    uint16_t* const taken = next_;
    next_ += room;
    left_ -= room;
    return taken;
}

// Leaves everything empty in a step without adapters.
void Step::find_adapters() {
    if (batch_.adapters == nullptr) return;
    for (int s = 0; s < batch_.num_seqs; s++) {
        const int32_t id = batch_.adapters[s];
        adapters_.push_back(id < 0 ? nullptr : model_.adapters[size_t(id)].get());
        if (adapters_.back() != nullptr) lora_stride_ = std::max(lora_stride_, round_up(adapters_.back()->widest, kLanes));
    }
    if (lora_stride_ > 0) {
        by_adapter_.resize(size_t(batch_.num_tokens));
        std::iota(by_adapter_.begin(), by_adapter_.end(), 0);
        std::stable_sort(by_adapter_.begin(), by_adapter_.end(), [this](int32_t a, int32_t b) {
            return batch_.adapters[sequence_[size_t(a)]] < batch_.adapters[sequence_[size_t(b)]];
        });
        next_of_adapter_.assign(size_t(batch_.num_tokens), batch_.num_tokens);
        for (size_t i = 0; i < by_adapter_.size(); i++) {
            const Adapter* adapter = adapters_[size_t(sequence_[size_t(by_adapter_[i])])];
            const bool is_first = i == 0 || adapter != adapters_[size_t(sequence_[size_t(by_adapter_[i - 1])])];
            if (!is_first) next_of_adapter_[size_t(by_adapter_[i - 1])] = by_adapter_[i];
            if (is_first && adapter) step_adapters_.push_back(adapter);
        }
    }
    const size_t wanted = size_t((batch_.num_tokens + int64_t(model_.pool.size()) * kOwnTokens) * lora_stride_);
    if (scratch_.lora.size() < wanted) scratch_.lora.resize(wanted);
}

}  // namespace kvl

int32_t kvl_adapter_new(kvl_model* model) {
    try {
        auto adapter = std::make_unique<kvl::Adapter>();
        adapter->linears.resize(model->linears.size());
        const auto free = std::find(model->adapters.begin(), model->adapters.end(), nullptr);
        const int32_t id = int32_t(free - model->adapters.begin());
        if (free == model->adapters.end()) model->adapters.emplace_back();
        model->adapters[size_t(id)] = std::move(adapter);
        return id;
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

int64_t kvl_adapter_add(kvl_model* model, int32_t id, int32_t linear, const float* a, const float* b, int64_t rank,
                        int64_t count, float scale, int64_t first, int32_t interleave) {
    const kvl::Linear& of = model->linears[size_t(linear)];
    kvl::Adapter& adapter = *model->adapters[size_t(id)];
    kvl::LoraLinear& to = adapter.linears[size_t(linear)];
    const int64_t num_a = rank * of.padded_cols, num_b = kvl::round_up(count, kvl::kLanes) * rank;
    try {
        to.halves.resize(size_t(of.panels * 2));
        uint16_t* const own_a = adapter.take(num_a);
        uint16_t* const own_b = adapter.take(num_b);
        kvl::pack_a(own_a, a, rank, of.cols, of.padded_cols);
        to.parts.push_back({to.rank, rank, scale, own_a});
        kvl::pack_b(to, own_b, b, count, first, interleave);
    } catch (const std::bad_alloc&) {
        return -1;
    }
    to.rank += rank;
    adapter.widest = std::max(adapter.widest, to.rank);
    return (num_a + num_b) * 2;
}

void kvl_adapter_free(kvl_model* model, int32_t id) { model->adapters[size_t(id)].reset(); }
