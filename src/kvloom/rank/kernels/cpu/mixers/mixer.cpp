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
    for (const kvl_delta_rule& mixer : model.delta_rules) width = std::max(width, round_up(mixer_width(mixer), kPad));
    return width;
}

// KVL_DELTA_RULE. Threads take heads of sequences one by one. Nobody helps with them: each changes a state.
void Step::mix(const kvl_instruction& instruction, int thread) {
    const kvl_delta_rule& mixer = model_.delta_rules[size_t(instruction.layer)];
    const int64_t heads = mixer.num_k_heads;
    share_whole(index_of(instruction), batch_.num_seqs * heads, thread, [&](int64_t item) {
        const int64_t s = item / heads, first = batch_.qstart[s], count = batch_.qstart[s + 1] - first;
        if (count == 0) return;
        float* const memory = batch_.states_memory + batch_.places[s] * batch_.state_floats + mixer.state_at;
        const Rows in{scratch_.qkv.row(first), scratch_.qkv.stride}, out{scratch_.mixed.row(first), scratch_.mixed.stride};
        float* const room = scratch_.mixer[size_t(thread)];
        delta_rule(model_, mixer, {in, out, count, memory, batch_.pos[first] == 0, shape_.norm_eps, room}, item % heads);
    });
}

}  // namespace kvl
