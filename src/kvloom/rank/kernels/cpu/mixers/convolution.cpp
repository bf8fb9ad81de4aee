// The causal convolution of each channel, with SiLU, in front of a mixer. It keeps of a sequence the last width - 1 inputs,
// [width - 1][channels], oldest first.
//
// It works in place, from the last token to the first, so that every input is there until it is not needed any more.
#include <algorithm>

#include "isa/simd.hpp"
#include "mixers/mixer.hpp"

namespace kvl {

void convolve(const kvl_model& model, const kvl_convolution& convolution, const MixerRows& rows, int64_t c, int64_t end) {
    const int64_t kept = convolution.width - 1, channels = convolution.channels, size = end - c;
    const float* const weights = model.vectors[size_t(convolution.conv)].data() + c;
    const float* const bias = convolution.bias < 0 ? nullptr : model.vectors[size_t(convolution.bias)].data() + c;
    float* const memory = rows.memory + c;
    if (rows.is_first)
        for (int64_t j = 0; j < kept; j++) std::fill_n(memory + j * channels, size, 0.0f);
    // what it reads at token t of the step; below 0 are those of earlier steps
    const auto input = [&](int64_t t) { return t < 0 ? memory + (kept + t) * channels : rows.in.row(t) + convolution.first + c; };
    alignas(64) float last[(kMostWidth - 1) * kMixerChannels];
    for (int64_t j = 0; j < kept; j++) std::copy_n(input(rows.count - kept + j), size, last + j * kMixerChannels);
    for (int64_t t = rows.count - 1; t >= 0; t--) {
        const float* inputs[kMostWidth];
        for (int64_t j = 0; j <= kept; j++) inputs[j] = input(t - kept + j);
        for (int64_t i = 0; i < size; i += kLanes) {
            F32 total = bias ? load(bias + i) : splat(0);
            for (int64_t j = 0; j <= kept; j++) total = fma(load(weights + j * channels + i), load(inputs[j] + i), total);
            store(input(t) + i, silu(total));
        }
    }
    for (int64_t j = 0; j < kept; j++) std::copy_n(last + j * kMixerChannels, size, memory + j * channels);
}

}  // namespace kvl

int32_t kvl_add_convolution(kvl_model* model, const kvl_convolution* convolution) {
    return kvl::or_out_of_memory([=] {
        model->convolutions.push_back(*convolution);
        return int32_t(model->convolutions.size()) - 1;
    });
}
