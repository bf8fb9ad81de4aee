// The gated short convolution of LFM2; ShortConv of families/mixers.py says what it computes. It keeps of a sequence the
// last conv_width - 1 products of gate and input, [conv_width - 1][channels], oldest first.
#include "isa/simd.hpp"
#include "mixers/mixer.hpp"

namespace kvl {
namespace {

// What the convolution reads of channels [c, c + kLanes) at token t of the step; below 0 are those of earlier steps.
F32 gated_input(const kvl_short_conv& mixer, const MixerRows& rows, int64_t t, int64_t c) {
    if (t < 0) return rows.is_first ? splat(0) : load(rows.memory + (mixer.conv_width - 1 + t) * mixer.channels + c);
    return mul(load(rows.in.row(t) + c), load(rows.in.row(t) + 2 * mixer.channels + c));
}

}  // namespace

void short_conv(const kvl_model& model, const kvl_short_conv& mixer, const MixerRows& rows, int64_t c) {
    const float* const weights = model.vectors[size_t(mixer.conv)].data() + c;
    const int64_t kept = mixer.conv_width - 1;
    for (int64_t t = 0; t < rows.count; t++) {
        F32 total = splat(0);
        for (int64_t j = 0; j <= kept; j++)
            total = fma(load(weights + j * mixer.channels), gated_input(mixer, rows, t - kept + j, c), total);
        store(rows.out.row(t) + c, mul(load(rows.in.row(t) + mixer.channels + c), total));
    }
    F32 last[kMostWidth];
    for (int64_t j = 0; j < kept; j++) last[j] = gated_input(mixer, rows, rows.count - kept + j, c);
    for (int64_t j = 0; j < kept; j++) store(rows.memory + j * mixer.channels + c, last[j]);
}

}  // namespace kvl

int32_t kvl_add_short_conv(kvl_model* model, const kvl_short_conv* mixer) {
    return kvl::or_out_of_memory([=] {
        model->short_convs.push_back(*mixer);
        return int32_t(model->short_convs.size()) - 1;
    });
}
