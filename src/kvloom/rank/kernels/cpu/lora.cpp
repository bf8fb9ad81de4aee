// Packing adapters, and finding those of a step.
#include "lora.hpp"

#include <algorithm>
#include <new>
#include <numeric>

#include "step.hpp"

namespace kvl {
namespace {

std::vector<uint16_t> packed_a(const float* a, int64_t rank, int64_t cols, int64_t padded_cols) {
    std::vector<uint16_t> packed(size_t(rank * padded_cols), 0);
    for (int64_t r = 0; r < rank; r++)
        std::transform(a + r * cols, a + (r + 1) * cols, packed.begin() + r * padded_cols, float_to_bf16);
    return packed;
}

// Rows [0, count) of B to the channels that pack.cpp gives to the module's own rows.
void pack_b(LoraLinear& to, const LoraPart& part, const float* b, int64_t count, int64_t first, int32_t interleave) {
    const int64_t num_halves = round_up(count, kLanes) / kLanes;
    to.b.emplace_back(size_t(num_halves * part.rank * kLanes), 0);
    uint16_t* at = to.b.back().data();
    for (int64_t half = 0; half < num_halves; half++, at += part.rank * kLanes) {
        to.halves[size_t(interleave < 0 ? first / kLanes + half : 2 * half + interleave)] = {at, part.first, part.rank};
        for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, count - half * kLanes); lane++)
            for (int64_t r = 0; r < part.rank; r++)
                at[r * kLanes + lane] = float_to_bf16(b[(half * kLanes + lane) * part.rank + r]);
    }
}

}  // namespace

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
            return batch_.adapters[scratch_.sequence[size_t(a)]] < batch_.adapters[scratch_.sequence[size_t(b)]];
        });
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
    try {
        to.halves.resize(size_t(of.panels * 2));
        to.parts.push_back({to.rank, rank, scale, kvl::packed_a(a, rank, of.cols, of.padded_cols)});
        kvl::pack_b(to, to.parts.back(), b, count, first, interleave);
    } catch (const std::bad_alloc&) {
        return -1;
    }
    to.rank += rank;
    adapter.widest = std::max(adapter.widest, to.rank);
    return int64_t(to.parts.back().a.size() + to.b.back().size()) * 2;
}

void kvl_adapter_free(kvl_model* model, int32_t id) { model->adapters[size_t(id)].reset(); }
