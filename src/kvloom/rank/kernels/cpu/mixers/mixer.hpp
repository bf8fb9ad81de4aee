// Mixers that keep a state of each sequence, of one size. A mixer is a file of its own: it reads rows of a linear's
// output, brings the state up to date token by token, and writes rows of the next linear's input.
//
// All sums of a token have one fixed order and are in float32, so that a sequence has the same bits whole, in chunks,
// alone and in company.
#pragma once

#include <cmath>

#include "model/model.hpp"

namespace kvl {

constexpr int kMixerChannels = 256;  // that a thread takes at once, where channels are independent
constexpr int kMostWidth = 8;  // tokens of a convolution
constexpr int kMixerTokens = 16;  // tokens that a mixer prepares at once: their floats stay in the second-level cache

// The tokens of one sequence of a step at a layer.
struct MixerRows {
    Rows in, out;   // from the sequence's first token on
    int64_t count;  // of tokens
    float* memory;  // what the layer keeps of the sequence
    bool is_first;  // the sequence begins here: its memory counts as zeros, whatever it holds
    float eps;      // of norms
    float* room;    // mixer_room() floats of the thread
};

// Places the scratch memory of the mixers for `tokens` tokens at `at`; returns its end.
uint8_t* lay_out_mixers(Scratch& s, const kvl_model& model, int64_t tokens, uint8_t* at);
// Channels of the widest output of a mixer, padded; 0 = the model has none.
int64_t widest_mixer(const kvl_model& model);

// Floats of a thread that a mixer works in.
int64_t mixer_room(const kvl_delta_rule& mixer);
// Channels that a mixer writes.
inline int64_t mixer_width(const kvl_delta_rule& mixer) { return int64_t(mixer.num_v_heads) * mixer.v_dim; }

inline int64_t mixer_width(const kvl_short_conv& mixer) { return mixer.channels; }
inline int64_t mixer_width(const kvl_mamba2& mixer) { return int64_t(mixer.num_heads) * mixer.head_dim; }

// Computes one key head of the gated delta rule with its value heads; heads may be computed at the same time.
void delta_rule(const kvl_model& model, const kvl_delta_rule& mixer, const MixerRows& rows, int64_t key_head);
// Computes channels [c, c + kLanes) of a short convolution.
void short_conv(const kvl_model& model, const kvl_short_conv& mixer, const MixerRows& rows, int64_t c);
// Replaces channels [c, end) of a convolution's input, at most kMixerChannels, by its output.
void convolve(const kvl_model& model, const kvl_convolution& convolution, const MixerRows& rows, int64_t c, int64_t end);
// Computes one head of Mamba-2; heads may be computed at the same time.
void mamba2(const kvl_model& model, const kvl_mamba2& mixer, const MixerRows& rows, int64_t head);
// The output x of a Mamba-2 mixer for one token after the RMSNorm of its groups, in room[padded], which it returns.
const float* norm_groups(const kvl_model& model, const kvl_mamba2& mixer, const float* x, int64_t padded, float* room);

// Whether the states are up to date behind an instruction of this kind, and its output is all that is read of it.
constexpr bool is_mixing(int kind) { return kind == KVL_DELTA_RULE || kind == KVL_SHORT_CONV || kind == KVL_MAMBA2; }

// log(1 + e^x); from 20 on x itself.
inline double softplus(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }

}  // namespace kvl
