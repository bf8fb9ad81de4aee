/* The C interface of the CPU kernels. kernels/cpu.py calls it through ctypes; kernels/cpu_abi.py mirrors its types.
 *
 * Lifetime of a model: kvl_new; kvl_add_linear and kvl_add_vector for every weight, in execution order; kvl_allocate
 * and then kvl_fill_* for each tensor, or kvl_adopt instead of both; kvl_set_program; any number of kvl_step; kvl_free.
 * Adapters are added and removed between steps: kvl_adapter_new, kvl_adapter_add for each linear that the adapter
 * changes, kvl_adapter_free.
 *
 * Threads: kvl_fill_* may run in several threads at once for different rows. No other calls on one model may overlap.
 * Ownership: memory passed to kvl_adopt, kvl_set_embed and kvl_add_rope stays the caller's and must outlive the model;
 * memory passed to kvl_step must stay valid until it returns. The library copies everything else.
 * Errors: arguments are not checked. Functions that return a number return -1, and kvl_new null, when there is not enough
 * memory, or no thread to be had; the model then is as before. A step that failed so may have written to its outputs and
 * to the cache.
 */
#ifndef KVLOOM_CPU_ABI_H
#define KVLOOM_CPU_ABI_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvl_model kvl_model;

/* Shapes and constants of the decoder. embed_scale multiplies token embeddings, residual_scale what attention and MLP
 * add to the residual stream, logit_scale the logits, attention_scale the products q . k (0 = 1 / sqrt(key_dim)). A
 * softcap c replaces a score or logit x by c tanh(x / c), before the mask; 0 = none. KVL_CLAMPED combines gate and up
 * into g sigmoid(glu_alpha g) (clip(up, -glu_limit, glu_limit) + 1) with g = min(gate, glu_limit). A query at position p is
 * multiplied by 1 + query_growth log(1 + floor(p / growth_unit)); query_growth 0 = not. A block of the cache has
 * block_tiles tiles of 16 tokens and block_bytes, a multiple of 32; one of a window's has window_block_bytes. */
typedef struct {
    int32_t hidden, intermediate, vocab_size, num_threads, kv_format, block_tiles;
    int64_t block_bytes;
    float norm_eps, embed_scale, residual_scale, logit_scale, attention_scale, attention_softcap, logit_softcap;
    float glu_limit, glu_alpha;
    float query_growth;
    int32_t growth_unit; /* tokens */
    int32_t sees_ahead; /* not 0: bidirectional attention, a token also attends to later tokens of its sequence */
    int64_t window_block_bytes;
} kvl_shape;

/* Formats of a linear's weights; see layout.hpp. */
enum {
    KVL_INT8 = 0,
    KVL_INT4 = 1,
    KVL_BF16 = 2,
    KVL_INT8_32 = 3,
    KVL_INT8_MIN = 4,
    KVL_INT5 = 5,
    KVL_INT6_K = 6,
    KVL_IQ4 = 7,
    KVL_FP4 = 8,
    KVL_INT8_CHANNEL = 9,
    KVL_INT2 = 10,
    KVL_INT3_K = 11,
    KVL_IQ1_S = 12,
    KVL_IQ1_M = 13,
    KVL_IQ2_XXS = 14,
    KVL_IQ2_XS = 15,
    KVL_FP4_16 = 16,
    KVL_INT4_K = 17,
    KVL_INT5_K = 18,
    KVL_INT2_K = 19,
    KVL_INT2_256 = 20,
    KVL_INT1 = 21,
    KVL_IQ2_S = 22,
    KVL_IQ3_XXS = 23,
    KVL_IQ3_S = 24
};

/* Formats of cached keys and values; see layout.hpp. */
enum { KVL_KV_BF16 = 0, KVL_KV_INT8 = 1 };

/* Units of the processor that steps use besides the build's vector instructions. KVL_TILES: Intel's tile unit (AMX), in
 * steps of many rows; results have the same bits as without it. KVL_PAIRS: products of bf16 pairs (vdpbf16ps), which
 * add in a different order, so results have other bits (isa/pairs.hpp). */
enum { KVL_NO_UNIT = 0, KVL_TILES = 1, KVL_PAIRS = 2 };

/* Kinds of instructions. `linear`, `vector` and `vector2` are indices that kvl_add_linear and kvl_add_vector returned;
 * -1 = none. */
enum {
    KVL_NORM_QUANT = 0,      /* RMSNorm of the residual stream with weights `vector`, quantised as the input of
                                `linear`. For rows with an adapter it also computes h = scale * A x (lora/lora.hpp), as
                                does QUANT */
    KVL_QUANT = 1,           /* quantises the input of `linear`, which `source` locates; `epilogue` = the activation
                                that combines gate and up, if they are separate (KVL_FROM_GATE_UP) */
    KVL_LINEAR = 2,          /* multiplies `linear` by the activations quantised last, adds the adapters' B h, then
                                applies `epilogue`; `vector` = bias; with KVL_TO_QKV it writes from channel `at` on */
    KVL_ROPE_KV = 3,         /* q/k norm with weights `vector` and `vector2` (`source`: of what, and when), rotation
                                with table `rope`; writes keys and values of attention `layer` to the cache */
    KVL_ATTENTION = 4,       /* attention `layer` of the step's queries over cached keys: on each visible side
                                the nearest `window` keys, the query's own included; 0 = all. `vector` = one sink per
                                head, a logit that takes part in the softmax and has no value */
    KVL_ROWS_NORM_QUANT = 5, /* as NORM_QUANT, but only for the batch's `rows`: later instructions process no others;
                                writes `states` too */
    KVL_ADD_NORMED = 6,      /* RMSNorm with weights `vector` of the output of KVL_TO_BRANCH, or, `source` 1, of the sum
                                that KVL_NORM_BRANCH made, added to the residual stream; then the stream times the
                                number `vector2` */
    KVL_ROUTE = 7,           /* as NORM_QUANT, for gate and up of the experts of mixture `layer`; also chooses the
                                experts */
    KVL_EXPERTS_UP = 8,      /* gate and up of the chosen experts of mixture `layer`, then `epilogue` */
    KVL_EXPERTS_DOWN = 9,    /* quantises the output of UP for `linear`, multiplies it by the down projections of each
                                token's experts and adds their sum, weighted by the router, to the residual stream;
                                `epilogue` and `source` as in QUANT */
    KVL_STATES = 10,         /* writes `states` after RMSNorm with weights `vector` (-1 = without norm): the end of a
                                model without a head */
    KVL_ADD_POSITIONS = 11,  /* adds two rows to each token of the residual stream: row (position + `source`) of
                                `vector` [positions][hidden] (-1 = none), and row (type) of `vector2`
                                [types][hidden] */
    KVL_LAYER_NORM = 12,     /* LayerNorm of the residual stream in place: weights `vector`, biases `vector2` */
    KVL_DELTA_RULE = 13,     /* delta rule `layer` of the rows that a linear wrote with KVL_TO_QKV, and of each sequence's
                                state, which it brings up to date */
    KVL_SHORT_CONV = 14,     /* the same for short convolution `layer` */
    KVL_CONVOLUTION = 15,    /* convolution `layer` of such rows, in place */
    KVL_MAMBA2 = 16,         /* Mamba-2 `layer` of the rows that a convolution has changed, and of the states */
    KVL_LAYER_INPUTS = 17,   /* makes what the layers get of each token, `source` numbers each: (RMSNorm with weights
                                `vector` of the output of KVL_TO_INPUTS / sqrt(hidden) + layer_rows) / sqrt(2) */
    KVL_LATENT_KEYS = 19,    /* of the rows that a linear wrote with KVL_TO_QKV: makes the keys of latent attention
                                `layer` and writes them to the cache, and what KVL_FROM_ATTENTION reads for its queries
                                if these are made of a latent, too; rotates with table `rope`, -1 = not */
    KVL_LATENT_QUERIES = 20, /* makes queries of such rows: `linear` has for each head rows that take its channels to
                                the latent; rotates with table `rope`, -1 = not */
    KVL_LATENT_VALUES = 21,  /* multiplies the output of attention, latents, by the rows of each head in `linear` */
    KVL_JOIN = 22,           /* begins a head that guesses: row t of what KVL_FROM_QKV reads becomes RMSNorm with weights
                                `vector` of the token's embedding, then RMSNorm with weights `vector2` of row t of
                                layer_rows, for `linear`, which reads both; clears the residual stream */
    KVL_NORM_BRANCH = 18     /* RMSNorm with weights `vector` of the output of KVL_TO_BRANCH, kept, or, `source` 1, added
                                to what is kept; clears that output */
};
/* Epilogues of a linear. KVL_GELU: x Phi(x) of each channel, stored where KVL_FROM_MLP reads; KVL_RELU2: max(x, 0)^2, the
   same. KVL_GATED_RESIDUAL: as KVL_RESIDUAL, times the weight that KVL_ROUTE gave to the shared expert. KVL_TO_INPUTS: for
   KVL_LAYER_INPUTS. */
enum {
    KVL_TO_QKV = 0,
    KVL_RESIDUAL = 1,
    KVL_SWIGLU = 2,
    KVL_GEGLU = 3,
    KVL_LOGITS = 4,
    KVL_TO_BRANCH = 5,
    KVL_CLAMPED = 6,
    KVL_GATED_RESIDUAL = 7,
    KVL_GELU = 8,
    KVL_RELU2 = 9,
    KVL_TO_INPUTS = 10
};
/* `source` of QUANT. KVL_FROM_MIXER: the output of a mixer with a state. KVL_FROM_NORMED_MIXER: that of Mamba-2 `layer`,
 * after the RMSNorm of its groups. KVL_FROM_INPUTS: the inputs of layer `layer`, gated as `epilogue` says by the output of
 * KVL_TO_QKV. */
enum {
    KVL_FROM_ATTENTION = 0,
    KVL_FROM_MLP = 1,
    KVL_FROM_GATE_UP = 2,
    KVL_FROM_RESIDUAL = 3,
    KVL_FROM_MIXER = 4,
    KVL_FROM_NORMED_MIXER = 5,
    KVL_FROM_INPUTS = 6,
    KVL_FROM_QKV = 7 /* what KVL_TO_QKV, KVL_LATENT_VALUES or KVL_JOIN wrote, from channel `at` on */
};
/* `source` of ROPE_KV: norm of each head, of the whole row, or of each head after the rotation. */
enum { KVL_NORM_HEADS = 0, KVL_NORM_ROWS = 1, KVL_NORM_ROTATED = 2 };

typedef struct {
    int32_t kind, layer, linear, epilogue, vector, vector2, source, rope, window;
    int32_t is_gated; /* of ROPE_KV and ATTENTION: behind the values the rows have a gate for each query head, by whose
                         sigmoid its output is multiplied */
    int32_t at;       /* a channel of the rows that KVL_TO_QKV writes, a multiple of 32 */
} kvl_instruction;

/* How a step chooses the next token of a row, at the random point kvl_uniform(seed, position): from all its logits, or
 * from its candidates if it has some. temperature 0 = the token is chosen only if the row has a single candidate, else
 * it is -1. */
typedef struct {
    float temperature, top_p, min_p;
    uint64_t seed, position;
} kvl_choice;

/* One ragged step; shapes as in kernels/backend.py. kv: the blocks of the cache, one behind the other; kvl_attention says
 * what is where in a block.
 * The head gives all logits of row r (tops[r] = 0; `logits` holds these rows in order) or its tops[r] <= max_top
 * largest, in descending order, equal ones by ascending token: top_values and top_ids [num_rows][max_top].
 * states: float [num_states][hidden], the tokens state_rows[] after the last norm. */
typedef struct {
    uint8_t *kv;
    const int32_t *ids, *pos, *qstart, *block_table, *rows;
    int32_t num_tokens, num_seqs, max_blocks, num_rows;
    const int32_t *tops;
    int32_t max_top;
    float *logits, *top_values;
    int32_t *top_ids;
    const int32_t *state_rows;
    int32_t num_states;
    float *states;
    const int32_t *adapters; /* [num_seqs] ids of kvl_adapter_new, -1 = none; null = no sequence has one */
    const int32_t *types;    /* [num_tokens] token types for KVL_ADD_POSITIONS; null = all 0 */
    const kvl_choice *choices; /* [num_rows]; null = no token is chosen */
    int32_t *tokens;           /* [num_rows] output: the chosen tokens */
    float *states_memory;      /* [places][state_floats] what mixers keep of sequences, in 64-byte units */
    int64_t state_floats;
    const int32_t *places;     /* [num_seqs] where each sequence has its own; zeros count where its position is 0 */
    const float *layer_rows;   /* [num_tokens][channels of KVL_TO_INPUTS] rows of the tokens for KVL_LAYER_INPUTS; or, for
                                  KVL_JOIN or in place of embeddings, [num_tokens][hidden] */
    uint8_t *window_kv;        /* as kv and block_table, a window's blocks; null = no layer has its keys there */
    const int32_t *windows;
} kvl_batch;

const char *kvl_isa(void);
/* Makes later steps use this unit. Returns 1; or 0, without a change, if the build or the processor lacks it or the
 * system does not let this process use it. */
int32_t kvl_use(kvl_model *model, int32_t unit);
kvl_model *kvl_new(const kvl_shape *shape); /* starts the threads of its steps */
void kvl_free(kvl_model *model);
int32_t kvl_add_linear(kvl_model *model, int64_t rows, int64_t cols, int32_t format);
/* A linear of another model with as many threads, whose weights it shares: `other` must outlive the model. Not the first
 * of a model. Returns its number. */
int32_t kvl_share_linear(kvl_model *model, const kvl_model *other, int32_t linear);
/* Holds channels from `first` on in `format`; `first` is a multiple of 32 and larger than in earlier calls. All formats
 * of one linear must read the same activations: KVL_INT8, KVL_INT8_CHANNEL and KVL_BF16 each read their own, the others
 * share theirs. Returns 0. */
int32_t kvl_set_format(kvl_model *model, int32_t linear, int64_t first, int32_t format);
int32_t kvl_add_vector(kvl_model *model, const float *values, int64_t count);
/* A mixture of experts of one shape. Linear `first` + 2 e holds gate and up of expert e, the next one its down
 * projection. router: vector [num_experts][hidden, padded to a multiple of 64]; router_bias: [num_experts]; up_bias:
 * [num_experts][rows of gate and up, padded to 32], in the order of their panels; down_bias: [num_experts][hidden,
 * padded to 32]; shared: vector [hidden], the sigmoid of whose product with a row weighs the shared expert. -1 = none.
 * A row is given to the experts with its per_token largest scores: softmax of all logits, or sigmoid of each. They are
 * its weights, divided by their sum if weighs_chosen is not 0, times `scale`. correction: vector [num_experts], added to
 * the scores for the choice alone. Of `groups` (at most 64) groups of equal size only the kept_groups with the largest
 * sums of their group_best largest scores are chosen from. */
typedef struct {
    int32_t num_experts, per_token, first, weighs_chosen;
    int32_t router, router_bias, up_bias, down_bias, shared;
    int32_t is_sigmoid, correction, groups, kept_groups;
    float scale;
    int32_t group_best; /* 1 or 2: groups are judged by the sum of so many largest scores */
    int32_t router_norm; /* vector [hidden]: the router reads the residual stream after RMSNorm with these weights; -1 =
                            what the experts read */
    int32_t to_branch;   /* not 0: the sum is added to the output of KVL_TO_BRANCH, not to the residual stream */
} kvl_mixture;
int32_t kvl_add_mixture(kvl_model *model, const kvl_mixture *mixture); /* returns its index; before kvl_allocate */
/* Attention of one layer. The linear before it has channels of num_heads queries and num_kv_heads keys of key_dim, then
 * num_kv_heads values of value_dim. Both sizes are multiples of 32, at most 576. A block of the cache has its keys from
 * byte keys_at on and its values from values_at on: tiles [block_tiles][num_kv_heads]; both are multiples of 32.
 * projected: KVL_ALL; KVL_KEYS, without values, which are the keys before norm and rotation; KVL_QUERIES, of a layer that
 * reads the keys and values that another one has written; KVL_LATENT, whose values are the first numbers of its keys in
 * the cache, and are nowhere else. value_norm: vector [value_dim], the weights of an RMSNorm of each value; -1 = none.
 * of_windows: not 0 = they are in a window's blocks. */
enum { KVL_QUERIES = 0, KVL_KEYS = 1, KVL_ALL = 2, KVL_LATENT = 3 };
typedef struct {
    int32_t num_heads, num_kv_heads, key_dim, value_dim, projected, value_norm;
    int64_t keys_at, values_at;
    int32_t of_windows;
} kvl_attention;
int32_t kvl_add_attention(kvl_model *model, const kvl_attention *attention); /* returns its index */
/* Latent attention around attention `attention`, which has one kv head and is KVL_LATENT. The linear before KVL_LATENT_KEYS
 * has, from channel keys_at on, value_dim channels of the latent, then rope_dim others, all of the key; its first q_rank
 * channels are the latent of queries, 0 = there is none. A head of a query has nope_dim channels, then rope_dim. out_dim: of
 * a head's output. norm, q_norm: vectors [value_dim], [q_rank]. All sizes but nope_dim are multiples of 32. */
typedef struct {
    int32_t attention, keys_at, q_rank, nope_dim, rope_dim, out_dim, norm, q_norm;
} kvl_latent;
int32_t kvl_add_latent(kvl_model *model, const kvl_latent *latent); /* returns its index */
/* A gated delta rule with its causal convolution. The linears before it wrote channels q, k (num_k_heads heads of k_dim),
 * v (num_v_heads heads of v_dim), all of which pass the convolution, then, from these channels on: gate_at as many as v,
 * beta_at and decay_at one for each value head; decay_at k_dim for each if decays_channels is not 0, when each channel of a
 * key has a decay. Value head h has key head h % num_k_heads if is_tiled is not 0, else h / (num_v_heads / num_k_heads).
 * conv: vector [conv_width][channels]; decay (negative) [num_v_heads]; decay_bias: as many as from decay_at on; norm
 * [v_dim]. gates_by_sigmoid: not 0 = the output's gate is the sigmoid of its channel, else SiLU. k_dim and v_dim are
 * multiples of 16. It keeps (conv_width - 1) * channels + num_v_heads * k_dim * v_dim floats of a sequence, from float
 * `state_at` on. */
typedef struct {
    int32_t num_k_heads, num_v_heads, k_dim, v_dim, conv_width, is_tiled, decays_channels, gates_by_sigmoid;
    int32_t gate_at, beta_at, decay_at;
    int32_t conv, decay, decay_bias, norm;
    int64_t state_at;
} kvl_delta_rule;
int32_t kvl_add_delta_rule(kvl_model *model, const kvl_delta_rule *mixer); /* returns its index */
/* A gated short convolution. The linear before it has `channels`, a multiple of 16, of b, as many of c, and of x. conv:
 * vector [conv_width][channels], conv_width at most 8. It keeps (conv_width - 1) * channels floats from `state_at` on. */
typedef struct {
    int32_t channels, conv_width, conv;
    int64_t state_at;
} kvl_short_conv;
int32_t kvl_add_short_conv(kvl_model *model, const kvl_short_conv *mixer); /* returns its index */
/* A causal convolution of each channel, then SiLU: of `channels`, a multiple of 16, from channel `first` of the linear
 * before it on. conv: vector [width][channels], width at most 8; bias: [channels], -1 = none. It keeps (width - 1) *
 * channels floats from `state_at` on. */
typedef struct {
    int32_t first, channels, width, conv, bias;
    int64_t state_at;
} kvl_convolution;
int32_t kvl_add_convolution(kvl_model *model, const kvl_convolution *convolution); /* returns its index */
/* A Mamba-2 mixer behind its convolution. From these channels of the linear on: x_at num_heads heads of head_dim, then B
 * and C, num_groups of state_dim each; gate_at as many as x; decay_at one for each head. Head h has group h / (num_heads /
 * num_groups). decay (negative), decay_bias, skip: vectors [num_heads]; norm: [num_heads * head_dim], -1 = none. head_dim
 * and state_dim are multiples of 16. It keeps num_heads * head_dim * state_dim floats from `state_at` on. */
typedef struct {
    int32_t num_heads, head_dim, state_dim, num_groups;
    int32_t x_at, gate_at, decay_at;
    int32_t decay, decay_bias, skip, norm;
    float least_step, most_step;
    int64_t state_at;
} kvl_mamba2;
int32_t kvl_add_mamba2(kvl_model *model, const kvl_mamba2 *mixer); /* returns its index */
int64_t kvl_allocate(kvl_model *model); /* returns the bytes of packed weights */

/* Each thread has an arena of packed weights, a multiple of 64 bytes long. Another model with the same linears and
 * number of threads can use them as they are: `arenas` holds all of them in order, from an address that is a multiple
 * of 64. */
int64_t kvl_arena_bytes(const kvl_model *model, int32_t thread);
const uint8_t *kvl_arena(const kvl_model *model, int32_t thread);
void kvl_adopt(kvl_model *model, const uint8_t *arenas);

/* Packs row r of [0, count) as output channel first + r; or, if `interleave` is 0 or 1, as channel first + r of gate
 * (0) or up (1) in panels that hold 16 channels of each. Calls for different rows may run at the same time. values:
 * float [count][cols]. */
void kvl_fill_f32(kvl_model *model, int32_t linear, const float *values, int64_t count, int64_t first, int32_t interleave);

/* Weights as a file stores them. numbers: [count][cols], one byte each. scales, minimums: [count][runs], one for each
 * `run` numbers of a row, of which the last may be shorter; minimums null = none. run: a multiple of 32, or of 16 in
 * formats that have a scale for as many, and all of a block in those whose blocks have one scale; all columns in
 * KVL_INT8_CHANNEL. scale_factors, minimum_factors: of formats with super-blocks alone, [count][cols / 256]: scales and
 * minimums, which are then small integers, are multiples of them. layout.hpp says what a number means; in formats with a
 * grid the sizes of each eight numbers are those of one of its points. The channels must
 * be held in a format of files, which KVL_INT8 and KVL_BF16 are not. */
typedef struct {
    const uint8_t *numbers;
    const float *scales, *minimums;
    int64_t run;
    const float *scale_factors, *minimum_factors;
} kvl_numbers;
void kvl_fill_numbers(kvl_model *model, int32_t linear, const kvl_numbers *from, int64_t count, int64_t first, int32_t interleave);

/* Rounds `count` floats to the nearest bf16, ties to even: for the rows of the table below. */
void kvl_round_bf16(const float *values, int64_t count, uint16_t *out);
/* embed: token embeddings, bf16 [vocab][hidden]; must outlive the model. null = the embeddings are the rows of
 * `linear`. */
void kvl_set_embed(kvl_model *model, const uint16_t *embed, int32_t linear);
/* Adds a rotary table and returns its index for instructions. table: float [positions][dim], each row dim / 2 cosines
 * and then as many sines, for the first `dim` dimensions of each head; dim is a multiple of 32. It must outlive the
 * model. */
int32_t kvl_add_rope(kvl_model *model, const float *table, int32_t dim);
/* Creates an adapter that changes nothing yet. Returns its id. */
int32_t kvl_adapter_new(kvl_model *model);
/* Adds y += b (scale * (a x)) to the rows of `linear` that kvl_fill_f32 with the same `first` and `interleave` fills;
 * `first` is a multiple of 16. a: float [rank][cols], b: float [count][rank], all finite; rank is at most 512. Returns
 * the bytes used. */
int64_t kvl_adapter_add(kvl_model *model, int32_t id, int32_t linear, const float *a, const float *b, int64_t rank,
                        int64_t count, float scale, int64_t first, int32_t interleave);
void kvl_adapter_free(kvl_model *model, int32_t id);

int32_t kvl_set_program(kvl_model *model, const kvl_instruction *instructions, int32_t count);
int32_t kvl_step(kvl_model *model, const kvl_batch *batch); /* returns 0 */
/* The step behind one in which each token was the only one of its sequence and row r chose the next one of token r: moves
 * ids, pos and the choices on by a token, in memory that must be writable, then is kvl_step. */
int32_t kvl_step_again(kvl_model *model, const kvl_batch *batch);

/* How a token is drawn. temperature > 0; top_p in (0, 1], 1 = off; min_p in [0, 1], 0 = off; point in [0, 1). */
typedef struct {
    float temperature, top_p, min_p;
    double point;
} kvl_draw_rules;

/* Returns the token in whose share of the kept probability `point` lies. Runs in the caller's thread. */
int32_t kvl_draw(const float *logits, int64_t count, const kvl_draw_rules *rules);

/* The random number in [0, 1) of a position: from the first of the four 64-bit words of Philox 4x64 with 10 rounds
 * (Salmon et al. 2011), with `seed` as the key and position + 1 as the counter, as in numpy. */
double kvl_uniform(uint64_t seed, uint64_t position);

/* All threads together read `bytes` of fresh memory, `repeats` times. Returns the highest rate in bytes per second,
 * which is the present limit of the memory. */
double kvl_probe_bandwidth(kvl_model *model, int64_t bytes, int32_t repeats);

#ifdef __cplusplus
}
#endif
#endif
