/* The C interface of the CPU backend: what kernels/cpu.py calls through ctypes.
 *
 * Life of a model: kvl_new, then kvl_add_linear / kvl_add_vector for every weight in execution order, kvl_allocate once
 * and kvl_fill_* tensor by tensor, or kvl_adopt, kvl_set_program, then kvl_step as often as wanted (one caller at a
 * time), kvl_free.
 * Adapters come and go between steps: kvl_adapter_new, kvl_adapter_add for each linear they change, kvl_adapter_free.
 * Pointers given to kvl_adopt, kvl_set_embed, kvl_add_rope and kvl_step stay the caller's; the library copies everything else.
 */
#ifndef KVLOOM_CPU_ABI_H
#define KVLOOM_CPU_ABI_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvl_model kvl_model;

/* Shapes of the decoder. Token embeddings are multiplied by embed_scale, what attention and MLP add to the residual stream
 * by residual_scale, logits by logit_scale. attention_scale multiplies q . k; 0 = 1 / sqrt(head_dim). A softcap c makes
 * x into c tanh(x / c), before the mask; 0 = none. KVL_CLAMPED makes gate and up into
 * g sigmoid(glu_alpha g) (clip(up, -glu_limit, glu_limit) + 1) with g = min(gate, glu_limit). */
typedef struct {
    int32_t hidden, intermediate, num_heads, num_kv_heads, head_dim, vocab_size, num_threads, kv_format;
    float norm_eps, embed_scale, residual_scale, logit_scale, attention_scale, attention_softcap, logit_softcap;
    float glu_limit, glu_alpha;
    int32_t sees_ahead; /* not 0: a token attends to those of its sequence that are behind it, too */
} kvl_shape;

/* How a linear's weights are held; see layout.hpp. */
enum {
    KVL_INT8 = 0,
    KVL_INT4 = 1,
    KVL_BF16 = 2,
    KVL_INT8_32 = 3,
    KVL_INT8_MIN = 4,
    KVL_INT5 = 5,
    KVL_INT6 = 6,
    KVL_IQ4 = 7,
    KVL_FP4 = 8,
    KVL_INT8_CHANNEL = 9
};

/* How keys and values are held; see layout.hpp. */
enum { KVL_KV_BF16 = 0, KVL_KV_INT8 = 1 };

/* What steps use of the processor beside the vector unit of the build: nothing; Intel's tile unit (AMX) where a step has many
 * rows, with the same bits; products of bf16 pairs (vdpbf16ps), which are added in an order of their own (pairs.hpp). */
enum { KVL_NO_UNIT = 0, KVL_TILES = 1, KVL_PAIRS = 2 };

/* What an instruction does; `linear`, `vector`, `vector2` index what kvl_add_* returned, -1 = none. */
enum {
    KVL_NORM_QUANT = 0,      /* RMSNorm of the residual stream by `vector`, quantised for `linear`; rows with an
                                adapter make its h = scale * A x of it (lora.hpp), those of QUANT too */
    KVL_QUANT = 1,           /* what the next linear reads, quantised for `linear`: `source` says where it is; `epilogue` =
                                how gate and up become one, when they are apart */
    KVL_LINEAR = 2,          /* `linear` of what was quantised last, plus the adapters' B h, then `epilogue`; `vector` = bias */
    KVL_ROPE_KV = 3,         /* q/k norm (`vector`, `vector2`; of what: `source`), `rope`, keys and values of `layer` into
                                the cache */
    KVL_ATTENTION = 4,       /* every query of the step over the cached keys of `layer`: the nearest `window`, itself among
                                them, on each side that it sees, 0 = all;
                                `vector` = the sinks of its heads, which take part in the softmax and have no value */
    KVL_ROWS_NORM_QUANT = 5, /* as NORM_QUANT, of the asked rows only: what follows works on them alone; and `states` */
    KVL_ADD_NORMED = 6,      /* RMSNorm by `vector` of what KVL_TO_BRANCH left, added to the residual stream */
    KVL_ROUTE = 7,           /* as NORM_QUANT, for gate and up of the experts of mixture `layer`, which it chooses too */
    KVL_EXPERTS_UP = 8,      /* gate and up of the chosen experts of mixture `layer`, then `epilogue` */
    KVL_EXPERTS_DOWN = 9,    /* what UP left, quantised for `linear`, times the down of each token's experts: their sum, as
                                the router weighs them, is added to the residual stream; `epilogue`, `source`: as QUANT's */
    KVL_STATES = 10,         /* `states`, normed by `vector` (-1: as they are): the end of a model without a head */
    KVL_ADD_POSITIONS = 11,  /* to each token of the residual stream the row of `vector` [positions][hidden] that is its
                                position plus `source`, and the row of `vector2` [types][hidden] that is its type */
    KVL_LAYER_NORM = 12      /* LayerNorm of the residual stream, in place: `vector` the weights, `vector2` the biases */
};
/* KVL_GELU: each channel's x Phi(x), into what KVL_FROM_MLP reads. KVL_GATED_RESIDUAL: as RESIDUAL, times the weight that
   KVL_ROUTE gave to the shared expert. */
enum {
    KVL_TO_QKV = 0,
    KVL_RESIDUAL = 1,
    KVL_SWIGLU = 2,
    KVL_GEGLU = 3,
    KVL_LOGITS = 4,
    KVL_TO_BRANCH = 5,
    KVL_CLAMPED = 6,
    KVL_GATED_RESIDUAL = 7,
    KVL_GELU = 8
};
enum { KVL_FROM_ATTENTION = 0, KVL_FROM_MLP = 1, KVL_FROM_GATE_UP = 2, KVL_FROM_RESIDUAL = 3 }; /* of QUANT */
enum { KVL_NORM_HEADS = 0, KVL_NORM_ROWS = 1 }; /* of ROPE_KV: each head, or all in one */

typedef struct {
    int32_t kind, layer, linear, epilogue, vector, vector2, source, rope, window;
} kvl_instruction;

/* How a step chooses the token behind a row, at the point kvl_uniform(seed, position): of all its logits, or of its candidates.
 * temperature 0 = only where it has one candidate; else -1. */
typedef struct {
    float temperature, top_p, min_p;
    uint64_t seed, position;
} kvl_choice;

/* One ragged step; shapes as in kernels/backend.py. kv: [layers][k|v][num_blocks][kv_heads] tiles. block_table may go on behind
 * num_blocks, where caches of num_blocks blocks lie one behind the other: each entry is counted from a layer's side of the first.
 * Of row r the head gives all logits (tops[r] = 0; `logits` holds such rows in order), or the tops[r] <= max_top largest
 * ones, largest first, of equal ones the smaller token first: top_values and top_ids [num_rows][max_top].
 * states: float [num_states][hidden], what tokens state_rows[] are behind the last norm. */
typedef struct {
    uint8_t *kv;
    int64_t num_blocks;
    const int32_t *ids, *pos, *qstart, *block_table, *rows;
    int32_t num_tokens, num_seqs, max_blocks, num_rows;
    const int32_t *tops;
    int32_t max_top;
    float *logits, *top_values;
    int32_t *top_ids;
    const int32_t *state_rows;
    int32_t num_states;
    float *states;
    const int32_t *adapters; /* [num_seqs] of kvl_adapter_new, -1 = none; null = none at all */
    const int32_t *types;    /* [num_tokens] of tokens, for KVL_ADD_POSITIONS; null = all 0 */
    const kvl_choice *choices; /* [num_rows]; null = no token is chosen */
    int32_t *tokens;           /* [num_rows] what was chosen */
} kvl_batch;

const char *kvl_isa(void);
/* From now on steps use this unit. 1, or 0 = the build or the processor has none, or the system does not let this process use it. */
int32_t kvl_use(kvl_model *model, int32_t unit);
kvl_model *kvl_new(const kvl_shape *shape);
void kvl_free(kvl_model *model);
int32_t kvl_add_linear(kvl_model *model, int64_t rows, int64_t cols, int32_t format);
/* Channels from `first` on, a multiple of 32 above those of earlier calls, are held in `format`. All formats of a linear
 * take the same activations: KVL_INT8, KVL_INT8_CHANNEL and KVL_BF16 their own, the others each other's. */
void kvl_set_format(kvl_model *model, int32_t linear, int64_t first, int32_t format);
int32_t kvl_add_vector(kvl_model *model, const float *values, int64_t count);
/* A mixture of experts. Gate and up of expert e are linear `first` + 2 e, its down is the one behind it; all experts have
 * the same shape. router: vector [num_experts][hidden, padded to a multiple of 64]; router_bias [num_experts]; up_bias
 * [num_experts][rows of gate and up, padded to 32], in the order of their panels; down_bias [num_experts][hidden, padded to
 * 32]; shared: vector [hidden], whose product with a row, through a sigmoid, is the weight of the shared expert; -1 = none.
 * The per_token largest logits of a row are its experts'; a softmax over all logits, or, where weighs_chosen is not 0, over
 * those of the chosen, makes the weights. */
typedef struct {
    int32_t num_experts, per_token, first, weighs_chosen;
    int32_t router, router_bias, up_bias, down_bias, shared;
} kvl_mixture;
int32_t kvl_add_mixture(kvl_model *model, const kvl_mixture *mixture); /* its index; before kvl_allocate */
int64_t kvl_allocate(kvl_model *model); /* bytes of packed weights, -1 = no memory */

/* Packed weights lie in an arena a thread, each a multiple of 64 bytes, which another model of the same linears and number
 * of threads can use as it is: `arenas` are all of them, one behind the other, from a multiple of 64 on. */
int64_t kvl_arena_bytes(const kvl_model *model, int32_t thread);
const uint8_t *kvl_arena(const kvl_model *model, int32_t thread);
void kvl_adopt(kvl_model *model, const uint8_t *arenas);

/* Rows [0, count) go to output channels first + r, or, when `interleave` is 0 or 1, to the gate (0) or up (1) half of
 * channel r's panel. Calls for different rows may run at the same time. `values` is float [count][cols]. */
void kvl_fill_f32(kvl_model *model, int32_t linear, const float *values, int64_t count, int64_t first, int32_t interleave);

/* Weights as a file holds them: `numbers` [count][cols] of one byte each, and for each `run` of them (a multiple of 32, of
 * 16 in KVL_INT6, all of a channel in KVL_INT8_CHANNEL; the last may be short) a scale and a minimum, [count][runs]; null = no minimums. What a number means is
 * said in layout.hpp; the channels are held in a format of the file's, not KVL_INT8 and KVL_BF16. */
typedef struct {
    const uint8_t *numbers;
    const float *scales, *minimums;
    int64_t run;
} kvl_numbers;
void kvl_fill_numbers(kvl_model *model, int32_t linear, const kvl_numbers *from, int64_t count, int64_t first, int32_t interleave);

/* `count` floats as bf16, the nearest, ties to even: rows of the table below. */
void kvl_round_bf16(const float *values, int64_t count, uint16_t *out);
/* embed: bf16 [vocab][hidden], which must outlive the model; or null, then the embedding is the rows of `linear`. */
void kvl_set_embed(kvl_model *model, const uint16_t *embed, int32_t linear);
/* A rotary table, by the index that instructions name: float [positions][dim], dim / 2 cosines, then as many sines, for the
 * first `dim` of each head, a multiple of 32. It must outlive the model. */
int32_t kvl_add_rope(kvl_model *model, const float *table, int32_t dim);
/* An adapter that changes nothing yet; its id, -1 = no memory. */
int32_t kvl_adapter_new(kvl_model *model);
/* y += b (scale * (a x)) on the rows of `linear` that kvl_fill_f32 with the same `first` and `interleave` fills; `first` is
 * a multiple of 16. a: float [rank][cols], b: float [count][rank], all finite, rank at most 512. Bytes taken, -1 = no memory. */
int64_t kvl_adapter_add(kvl_model *model, int32_t id, int32_t linear, const float *a, const float *b, int64_t rank,
                        int64_t count, float scale, int64_t first, int32_t interleave);
void kvl_adapter_free(kvl_model *model, int32_t id);

void kvl_set_program(kvl_model *model, const kvl_instruction *instructions, int32_t count);
void kvl_step(kvl_model *model, const kvl_batch *batch);

/* How a token is drawn: temperature > 0; top_p in (0, 1], 1 = off; min_p in [0, 1], 0 = off; point in [0, 1). */
typedef struct {
    float temperature, top_p, min_p;
    double point;
} kvl_draw_rules;

/* The token that `point` falls on. Runs on the caller's thread. */
int32_t kvl_draw(const float *logits, int64_t count, const kvl_draw_rules *rules);

/* The number in [0, 1) of this position: the first of four that Philox (Salmon et al. 2011) has with 64 bits and 10 rounds,
 * its key the seed, its counter the position plus 1, as numpy counts. */
double kvl_uniform(uint64_t seed, uint64_t position);

/* All threads read `bytes` of fresh memory `repeats` times; returns the best bytes a second: the DRAM ceiling of now. */
double kvl_probe_bandwidth(kvl_model *model, int64_t bytes, int32_t repeats);

#ifdef __cplusplus
}
#endif
#endif
