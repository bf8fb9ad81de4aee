// Step: mixers with a state, as far as they are alike.
#include "mixers/mixer.hpp"

#include <algorithm>

#include "step/step.hpp"

namespace kvl {

uint8_t* lay_out_mixers(Scratch& s, const kvl_model& model, int64_t tokens, uint8_t* at) {
    int64_t room = 0;
    for (const kvl_delta_rule& mixer : model.delta_rules) room = std::max(room, mixer_room(mixer));
    const int64_t width = widest_mixer(model);
    s.mixed = {take<float>(at, tokens * width), width};
    s.mixer.resize(size_t(model.pool.size()));
    for (float*& own : s.mixer) own = take<float>(at, room);
    return at;
}

int64_t widest_mixer(const kvl_model& model) {
    int64_t width = 0;
    const auto count = [&](const auto& mixers) {
        for (const auto& mixer : mixers) width = std::max(width, mixer_width(mixer));
    };
    count(model.delta_rules), count(model.short_convs), count(model.mamba2s);
    return round_up(width, kPad);
}

// KVL_DELTA_RULE, KVL_SHORT_CONV, KVL_CONVOLUTION, KVL_MAMBA2. Threads take heads of sequences, or a few channels, one by
// one. Nobody helps with them: each changes a state.
void Step::mix(const kvl_instruction& instruction, int thread) {
    const size_t index = size_t(instruction.layer);
    if (instruction.kind == KVL_DELTA_RULE) {
        const kvl_delta_rule& mixer = model_.delta_rules[index];
        return mix_parts(instruction, mixer.num_k_heads, mixer.state_at, thread, [&](const MixerRows& rows, int64_t head) {
            delta_rule(model_, mixer, rows, head);
        });
    }
    if (instruction.kind == KVL_MAMBA2) {
        const kvl_mamba2& mixer = model_.mamba2s[index];
        return mix_parts(instruction, mixer.num_heads, mixer.state_at, thread, [&](const MixerRows& rows, int64_t head) {
            mamba2(model_, mixer, rows, head);
        });
    }
    if (instruction.kind == KVL_CONVOLUTION) {
        const kvl_convolution& own = model_.convolutions[index];
        return mix_channels(instruction, own.channels, own.state_at, thread, [&](const MixerRows& rows, int64_t c, int64_t end) {
            convolve(model_, own, rows, c, end);
        });
    }
    const kvl_short_conv& mixer = model_.short_convs[index];
    mix_channels(instruction, mixer.channels, mixer.state_at, thread, [&](const MixerRows& rows, int64_t c, int64_t end) {
        for (; c < end; c += kLanes) short_conv(model_, mixer, rows, c);
    });
}

// Does a few channels at a time of a mixer with `count` of them: work(rows, first channel, end).
template <class Work>
void Step::mix_channels(const kvl_instruction& instruction, int64_t count, int64_t state_at, int thread, const Work& work) {
    const int64_t parts = (count + kMixerChannels - 1) / kMixerChannels;
    mix_parts(instruction, parts, state_at, thread, [&](const MixerRows& rows, int64_t part) {
        work(rows, part * kMixerChannels, std::min<int64_t>(count, (part + 1) * kMixerChannels));
    });
}

// Does parts [0, count) of a mixer, whose memory begins at float `state_at` of a state, for every sequence.
template <class Work>
void Step::mix_parts(const kvl_instruction& instruction, int64_t count, int64_t state_at, int thread, const Work& work) {
    share_whole(index_of(instruction), batch_.num_seqs * count, thread, [&](int64_t item) {
        const int64_t s = item / count, first = batch_.qstart[s], tokens = batch_.qstart[s + 1] - first;
        if (tokens == 0) return;
        float* const memory = batch_.states_memory + batch_.places[s] * batch_.state_floats + state_at;
        const Rows in{scratch_.qkv.row(first), scratch_.qkv.stride}, out{scratch_.mixed.row(first), scratch_.mixed.stride};
        float* const room = scratch_.mixer[size_t(thread)];
        work({in, out, tokens, memory, batch_.pos[first] == 0, shape_.norm_eps, room}, item % count);
    });
}

}  // namespace kvl
