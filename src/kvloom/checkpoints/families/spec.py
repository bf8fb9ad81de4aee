"""DecoderSpec: the shape of a decoder-only transformer, in one form for every backend.

A family (llama.py, gemma.py, ...) turns a checkpoint's configuration into a DecoderSpec and maps its tensor names;
backends read the spec and know no family.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvloom.checkpoints.families.mixers import Attention, Keyed, LatentAttention, Mixer, Recurrent, Rope, Shapes

PROJECTIONS = ("pre_projection", "post_projection")  # of an assistant, which no kernel reads


@dataclass(frozen=True, slots=True)
class Layer:
    """Properties in which the layers of one model may differ."""

    mixer: Mixer | None  # None = its MLP alone
    has_experts: bool = False  # in place of one MLP, or beside it (Experts.has_dense)
    has_mlp: bool = True  # otherwise its mixer alone
    beside: Recurrent | None = None  # a second mixer, which reads what the first one reads; both outputs are added
    intermediate: int | None = None  # channels of its MLP; None = the model's


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: each token passes `per_token` of `count` small MLPs, those of largest router weight.

    A router's logits become `scores` by a softmax over all or a sigmoid each. Those of the chosen ones are their
    weights; with `weighs_chosen` they are divided by their sum; times `scale`. A correction is added to scores for the
    choice alone. Of `groups` of experts in order only the `kept_groups` with the largest sums of their `group_best`
    largest are chosen from (DeepSeek-AI 2024, section 2.1.2). A `shared` MLP with so many channels runs on every token,
    weighted by a sigmoid of its own if `weighs_shared`; 0 = none.

    With `has_dense` a layer has its MLP too (Gemma 4), and the branch is

      dense_post_norm(mlp(mlp_norm(x))) + experts_post_norm(experts(experts_norm(x)))

    whose router reads x with the norm `router_norm`, divided by sqrt(hidden).
    """

    count: int
    per_token: int
    intermediate: int
    weighs_chosen: bool = True
    has_bias: bool = False  # of router, gate, up and down
    shared: int = 0
    weighs_shared: bool = True
    scores: Literal["softmax", "sigmoid"] = "softmax"
    has_correction: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_best: Literal[1, 2] = 2
    scale: float = 1.0
    has_dense: bool = False


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """`size` numbers that each layer gets of a token besides the residual stream (Gemma 4): of all layers, in order,

      (RMSNorm(layer_mix x / sqrt(hidden)) + sqrt(size) layer_embed[token]) / sqrt(2)

    x the scaled embedding, the norm over `size` numbers with the weights `layer_mix_norm`. A layer adds at its end
    input_post_norm(input_out (activation(input_gate x) times its numbers)). `num_tokens`: rows of layer_embed.
    """

    size: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Encoder:
    """BERT's shape (Devlin et al. 2019): rows for positions and token types are added to embeddings, which are normed;
    MLPs have an exact gelu and no gate; every linear has a bias; norms are LayerNorms, none of them behind the last.

    Without `num_positions` there are no rows for positions; with `is_gated` MLPs have a gate, and no linear of them has
    a bias (Nomic Embed, arXiv 2402.01613, section 3).
    """

    num_positions: int
    first_position: int  # row of a sequence's first token
    num_types: int
    is_gated: bool = False


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Shapes and switches of a decoder: x += attn(norm(x)); x += mlp(norm(x)).

    Canonical tensor names (weights are [out, in]):
      embed [vocab, hidden]   norm [hidden]   head [vocab, hidden] (absent when tie_embeddings)
      layers.N. attn_norm, q, k, v, o, q_gate, q_bias, k_bias, v_bias, q_norm, k_norm, attn_post_norm,
                mlp_norm, gate, up, down, mlp_post_norm, o_bias, sinks
    and in place of q to v_bias, o_bias and sinks of a layer with latents or a state, what mixers.py says of its mixer
    of an encoder, without norm, head, gate and the norms before branches:
      positions [num_positions, hidden]   types [num_types, hidden]   embed_norm, embed_norm_bias [hidden]
      layers.N. up_bias, down_bias, attn_post_norm_bias, mlp_post_norm_bias
    and in place of gate, up and down of a layer with experts:
      router [experts, hidden]   router_bias, router_correction [experts]
      router_norm, experts_norm, experts_post_norm, dense_post_norm [hidden]
      experts.E. gate, up, down, gate_bias, up_bias, down_bias
      shared_gate, shared_up, shared_down, shared_router [1, hidden]
    and of a model whose layers have inputs of their own (size: LayerInputs'), or are scaled at their end:
      layer_embed [tokens, layers * size]   layer_mix [layers * size, hidden]   layer_mix_norm [size]
      layers.N. input_gate [size, hidden], input_out [hidden, size], input_post_norm [hidden], scalar [1]
    and of a head that guesses (joins_states):
      join [hidden, 2 hidden]   join_embed_norm, join_state_norm [hidden]
    and of an assistant: PROJECTIONS
      pre_projection [hidden, 2 assists]   post_projection [assists, hidden]
    """

    family: str
    hidden: int
    intermediate: int
    vocab_size: int
    max_seq_len: int
    layers: tuple[Layer, ...]
    norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool = False  # Qwen2
    # RMSNorm of each head of q and k before RoPE, of all heads as one row before RoPE, or of each head behind RoPE
    qk_norm: Literal["", "head", "row", "rotated"] = ""
    norms_values: bool = False  # RMSNorm of each head of v, without weights
    query_growth: float = 0.0  # b: q at position p is multiplied by 1 + b log(1 + floor(p / growth_unit))
    growth_unit: int = 1  # tokens
    norms: Literal["pre", "post", "both", "sum"] = "pre"  # x += post(branch(pre(x))); sum: x = post(x + branch(x))
    # clamped: see glu_limit; relu2: the square of relu, in MLPs without a gate
    activation: Literal["silu", "gelu_tanh", "clamped", "relu2"] = "silu"
    glu_limit: float = 0.0  # l, a: g = min(gate, l); g sigmoid(a g) (clip(up, -l, l) + 1)
    glu_alpha: float = 0.0
    embed_scale: float = 1.0  # of token embeddings on their way in
    residual_scale: float = 1.0  # of a branch before it is added
    logit_scale: float = 1.0
    attention_scale: float = 0.0  # of q . k; 0 = 1 / sqrt(head_dim of the layer)
    attention_softcap: float = 0.0  # c: scores s become c tanh(s / c); 0 = none
    logit_softcap: float = 0.0
    o_bias: bool = False
    has_sinks: bool = False  # each head has an additional score in the softmax, without a value
    experts: Experts | None = None  # of the layers that have them
    sees_ahead: bool = False  # tokens also attend to later ones: a sequence is computed in one step
    encoder: Encoder | None = None
    interleaved: bool = False  # adapters have rotary partners of q and k side by side (interleaved.py), weights do not
    is_multiplied: bool = False  # multipliers that adapters do not have are in its weights
    layer_inputs: LayerInputs | None = None
    scales_layers: bool = False  # what a layer gives to the next one is multiplied by its `scalar`
    has_logits: bool = True  # otherwise it has no head, and gives states
    # its first layer reads, of each token, join [join_embed_norm(embed), join_state_norm(state)]: the state behind the
    # last norm that another model has of the token before; embed and head are that model's
    joins_states: bool = False
    # An assistant guesses for a model whose states have so many numbers (Gemma 4); 0 = it is none. Its first layer
    # reads pre_projection [embed(token); state], both of that model, the state that of the token before. Its layers
    # read that model's keys, all before the token. post_projection of its own normed state is the next such state.
    assists: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> list[tuple[int, Keyed]]:
        """(number of the layer, its mixer) of the layers with attention."""
        return [(index, own.mixer) for index, own in enumerate(self.layers) if isinstance(own.mixer, Keyed)]

    @property
    def cached(self) -> list[tuple[int, Keyed]]:
        """The same of those that have keys and values of their own, in the order of these in the cache."""
        return [(index, mixer) for index, mixer in self.attention if mixer.keys_of is None]

    @property
    def recurrent(self) -> list[tuple[int, Recurrent]]:
        """(number of the layer, its mixer) of the layers with a state, in the order of these in a sequence's memory."""
        both = [(index, mixer) for index, own in enumerate(self.layers) for mixer in (own.mixer, own.beside)]
        return [(index, mixer) for index, mixer in both if isinstance(mixer, Recurrent)]

    @property
    def has_latents(self) -> bool:
        """Whether layers have latent attention."""
        return any(isinstance(layer.mixer, LatentAttention) for layer in self.layers)

    @property
    def state_floats(self) -> int:
        """Numbers that all layers together keep of a sequence besides keys and values; 0 = none."""
        return sum(mixer.state_floats for _, mixer in self.recurrent)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The distinct Ropes of all layers."""
        return tuple(dict.fromkeys(mixer.rope for _, mixer in self.attention if mixer.rope is not None))

    def without_head(self) -> "DecoderSpec":
        """The same model without a head, for its states."""
        return replace(self, has_logits=False, tie_embeddings=False)

    def served(self, max_seq_len: int) -> "DecoderSpec":
        """The spec to compute with if no sequence is longer than `max_seq_len` tokens: a window that is no shorter is
        none.
        """
        short = {rope: replace(rope, inv_freq=rope.short_freq) for rope in self.ropes if max_seq_len <= rope.short_len}
        changed = {
            index: replace(
                mixer,
                rope=mixer.rope and short.get(mixer.rope, mixer.rope),
                window=None if mixer.window is None or mixer.window >= max_seq_len else mixer.window,
            )
            for index, mixer in self.attention
        }
        mixers = [changed.get(index, layer.mixer) for index, layer in enumerate(self.layers)]
        return self if changed == dict(self.attention) else self.with_mixers(mixers)

    @property
    def gates_mlps(self) -> bool:
        """Whether MLPs have a gate."""
        return self.activation != "relu2" and (self.encoder is None or self.encoder.is_gated)

    def with_mixers(self, mixers: Sequence[Mixer | None]) -> "DecoderSpec":
        """The same model with other mixers, one for each layer."""
        return replace(
            self, layers=tuple(replace(layer, mixer=own) for layer, own in zip(self.layers, mixers, strict=True))
        )

    def tensor_shapes(self) -> Shapes:
        """Every tensor a checkpoint of this spec must hold, by canonical name."""
        shapes: Shapes = {"embed": (self.vocab_size, self.hidden)} | self._outer_shapes()
        if self.has_logits and not self.tie_embeddings:
            shapes["head"] = (self.vocab_size, self.hidden)
        sparse = _expert_shapes(self.hidden, self.experts, self.gates_mlps) if self.experts else {}
        for index, layer in enumerate(self.layers):
            own = self._layer_shapes(layer) | self._input_shapes()
            own |= self._dense_shapes(index) if self.has_dense(index) else {}
            own |= sparse if layer.has_mlp and layer.has_experts else {}
            shapes |= {f"layers.{index}.{name}": shape for name, shape in own.items()}
        return shapes

    def mlp_size(self, layer: int) -> int:
        """Channels of a layer's dense MLP."""
        return self.layers[layer].intermediate or self.intermediate

    def has_dense(self, layer: int) -> bool:
        """Whether a layer has a dense MLP."""
        own, beside = self.layers[layer], self.experts is not None and self.experts.has_dense
        return own.has_mlp and (not own.has_experts or beside)

    def _dense_shapes(self, layer: int) -> Shapes:
        """Of a layer's dense MLP."""
        size = self.mlp_size(layer)
        has_biases = self.encoder is not None and not self.encoder.is_gated
        biases: Shapes = {"up_bias": (size,), "down_bias": (self.hidden,)} if has_biases else {}
        return _mlp_shapes(self.hidden, size, self.gates_mlps) | biases

    def _input_shapes(self) -> Shapes:
        """Of what a layer does at its end."""
        own: Shapes = {"scalar": (1,)} if self.scales_layers else {}
        if self.layer_inputs is not None:
            size = self.layer_inputs.size
            own |= {"input_gate": (size, self.hidden), "input_out": (self.hidden, size)}
            own["input_post_norm"] = (self.hidden,)
        return own

    def _outer_shapes(self) -> Shapes:
        """Shapes of the small tensors around the layers."""
        own, inputs = self.encoder, self.layer_inputs
        if inputs is not None:
            channels = self.num_layers * inputs.size
            table = {"layer_embed": (inputs.num_tokens, channels), "layer_mix": (channels, self.hidden)}
            return {"norm": (self.hidden,), **table, "layer_mix_norm": (inputs.size,)}
        if self.assists:
            ends: Shapes = {"pre_projection": (self.hidden, 2 * self.assists)}
            return {"norm": (self.hidden,), **ends, "post_projection": (self.assists, self.hidden)}
        if self.joins_states:
            norms = dict.fromkeys(("norm", "join_embed_norm", "join_state_norm"), (self.hidden,))
            return {**norms, "join": (self.hidden, 2 * self.hidden)}
        if own is None:
            return {"norm": (self.hidden,)}
        table = {"positions": (own.num_positions, self.hidden)} if own.num_positions else {}
        return table | {
            "types": (own.num_types, self.hidden),
            "embed_norm": (self.hidden,),
            "embed_norm_bias": (self.hidden,),
        }

    def _layer_shapes(self, layer: Layer) -> Shapes:
        """Of its mixers and norms."""
        mixers = [mixer for mixer in (layer.mixer, layer.beside) if mixer is not None]
        branches = [name for name, has in (("attn", bool(mixers)), ("mlp", layer.has_mlp)) if has]
        has_before = self.norms in ("pre", "both")
        own: Shapes = {"attn_norm": (self.hidden,)} if mixers and has_before else {}
        for mixer in mixers:
            own |= mixer.linears(self.hidden)
        ends = {"_norm": has_before, "_post_norm": self.norms != "pre", "_post_norm_bias": self.encoder is not None}
        own |= {f"{name}{end}": (self.hidden,) for end, has in ends.items() if has for name in branches}
        for mixer in mixers:
            own |= self._attention_shapes(mixer) if isinstance(mixer, Attention) else mixer.vectors()
        return own

    def _attention_shapes(self, mixer: Attention) -> Shapes:
        """Its tensors that are no matrices."""
        own: Shapes = {}
        has_keys = mixer.keys_of is None
        if self.qkv_bias:
            own |= {f"{part}_bias": shape[:1] for part, shape in mixer.linears(self.hidden).items() if part in "qkv"}
        if self.qk_norm:
            sizes = (mixer.q_size, mixer.k_size) if self.qk_norm == "row" else (mixer.head_dim, mixer.head_dim)
            own |= {"q_norm": sizes[:1]} | ({"k_norm": sizes[1:]} if has_keys else {})
        if self.o_bias:
            own["o_bias"] = (self.hidden,)
        if self.has_sinks:
            own["sinks"] = (mixer.num_heads,)
        return own


def _mlp_shapes(hidden: int, intermediate: int, has_gate: bool) -> Shapes:
    names = ("gate", "up") if has_gate else ("up",)
    return {**dict.fromkeys(names, (intermediate, hidden)), "down": (hidden, intermediate)}


def _expert_shapes(hidden: int, experts: Experts, has_gate: bool) -> Shapes:
    one = _mlp_shapes(hidden, experts.intermediate, has_gate)
    shapes: Shapes = {"router": (experts.count, hidden)}
    if experts.has_correction:
        shapes["router_correction"] = (experts.count,)
    if experts.has_dense:
        norms = ("router_norm", "experts_norm", "experts_post_norm", "dense_post_norm")
        shapes |= dict.fromkeys(norms, (hidden,))
    if experts.has_bias:
        shapes["router_bias"] = (experts.count,)
        one |= {f"{name}_bias": shape[:1] for name, shape in one.items()}
    shapes |= {f"experts.{index}.{name}": shape for index in range(experts.count) for name, shape in one.items()}
    if experts.shared:
        shared = _mlp_shapes(hidden, experts.shared, has_gate)
        shapes |= {f"shared_{name}": shape for name, shape in shared.items()}
    if experts.shared and experts.weighs_shared:
        shapes["shared_router"] = (1, hidden)
    return shapes
