"""Mixers of tokens: what a layer does between tokens, and what it keeps of a sequence for that.

Attention keeps keys and values of every token, in blocks, latent attention what it makes both of. The others keep a
state of one size, whatever the length.
"""

import math
from dataclasses import dataclass

Shapes = dict[str, tuple[int, ...]]
UNKNOWN = -1  # as Attention.keys_of


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (Su et al. 2021) of a head's first `dim` dimensions; partners are i and i + dim/2.

    `inv_freq` has dim/2 entries, every scaling rule already applied; `attention_factor` multiplies cos and sin.
    Where no sequence is ever longer than `short_len` tokens, `short_freq` stands for inv_freq (LongRoPE).
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    short_freq: tuple[float, ...] = ()
    short_len: int = 0

    @property
    def dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return 2 * len(self.inv_freq)


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention over keys and values, which are kept of every token. Each KV head serves
    num_heads / num_kv_heads query heads.

    With `keys_of` a layer has no keys and values: its queries meet those of the layer of that number, before it, which
    has as many KV heads of the same sizes. With `values_are_keys` values are what `k` gives, before norm and rotation.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    rope: Rope | None = None  # None = queries and keys without positions
    window: int | None = None  # tokens that a query attends to on each visible side, itself included; None = all
    is_gated: bool = False  # each channel of its output is multiplied by the sigmoid of a channel of `q_gate`
    own_value_dim: int | None = None  # of a value; None = head_dim
    keys_of: int | None = None  # of an assistant: the layer of the model that it assists, UNKNOWN before that is known
    values_are_keys: bool = False

    @property
    def value_dim(self) -> int:
        """Dimensions of a value."""
        return self.head_dim if self.own_value_dim is None else self.own_value_dim

    @property
    def q_size(self) -> int:
        """Channels of all queries of a token."""
        return self.num_heads * self.head_dim

    @property
    def k_size(self) -> int:
        """Channels of all keys of a token."""
        return self.num_kv_heads * self.head_dim

    @property
    def v_size(self) -> int:
        """Channels of all values of a token."""
        return self.num_kv_heads * self.value_dim

    @property
    def out_size(self) -> int:
        """Channels of its output."""
        return self.num_heads * self.value_dim

    def linears(self, hidden: int) -> Shapes:
        """Its matrices, [out, in]."""
        gate = {"q_gate": (self.out_size, hidden)} if self.is_gated else {}
        kv = {} if self.keys_of is not None else {"k": (self.k_size, hidden)}
        if kv and not self.values_are_keys:
            kv["v"] = (self.v_size, hidden)
        return {"q": (self.q_size, hidden), **kv, **gate, "o": (hidden, self.out_size)}


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-AI 2024, section 2.1), computed in its absorbed form: attention with one
    KV head, whose key is RMSNorm of the first `kv_rank` channels of `kv_down` with the weights `kv_down_norm`, then the
    `rope_dim` others, rotated. Its first kv_rank numbers are its value, too; so the cache holds each number once.

    A head of `q` has nope_dim and rope_dim channels; its query is k_up (of this head) times the first ones, then the
    others, rotated. `o` reads v_up (of each head) times the head's sum of values. With `q_rank` queries are instead
    those of `q_up`, which reads RMSNorm of `q_down` with the weights `q_down_norm`.
    """

    num_heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    out_dim: int  # of a head's output
    q_rank: int | None = None
    rope: Rope | None = None
    num_kv_heads: int = 1
    keys_of: None = None  # as of Attention: all keys are its own, and all tokens before are seen
    window: int | None = None  # always None

    @property
    def head_dim(self) -> int:
        """Dimensions of a query that meets keys."""
        return self.kv_rank + self.rope_dim

    @property
    def value_dim(self) -> int:
        """Dimensions of a value."""
        return self.kv_rank

    @property
    def q_name(self) -> str:
        """The matrix that gives queries."""
        return "q" if self.q_rank is None else "q_up"

    @property
    def q_size(self) -> int:
        """Its channels."""
        return self.num_heads * (self.nope_dim + self.rope_dim)

    @property
    def out_size(self) -> int:
        """Channels of its output."""
        return self.num_heads * self.out_dim

    def linears(self, hidden: int) -> Shapes:
        """Its matrices, [out, in]; k_up and v_up are those of the heads, one below the other."""
        down = {} if self.q_rank is None else {"q_down": (self.q_rank, hidden)}
        return {
            **down,
            self.q_name: (self.q_size, self.q_rank or hidden),
            "kv_down": (self.head_dim, hidden),
            "k_up": (self.num_heads * self.kv_rank, self.nope_dim),
            "v_up": (self.out_size, self.kv_rank),
            "o": (hidden, self.out_size),
        }

    def vectors(self) -> Shapes:
        """Its other tensors."""
        own: Shapes = {} if self.q_rank is None else {"q_down_norm": (self.q_rank,)}
        return own | {"kv_down_norm": (self.kv_rank,)}


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """Gated delta rule (Yang et al. 2024) behind a causal convolution, one state [k_dim, v_dim] for each value head.

    x, the channels of `conv_in` in the order q, k, v, become silu(sum_j conv[c, j] x[t - conv_width + 1 + j, c]).
    q and k are divided by their norms, q also by sqrt(k_dim). For each value head, whose channel is a in `decay_in` and
    b in `beta_in`:

      S = exp(decay softplus(a + decay_bias)) S;   S += k (sigmoid(b) (v - S^T k))^T;   o = S^T q

    `out` reads RMSNorm(o) times `out_norm` times silu of the head's channels of `gate_in`. Each key head serves
    num_v_heads / num_k_heads value heads: consecutive ones, or, `is_tiled`, every num_k_heads-th.
    """

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int  # tokens
    is_tiled: bool = False

    @property
    def k_size(self) -> int:
        """Channels of all keys, and of all queries, of a token."""
        return self.num_k_heads * self.k_dim

    @property
    def size(self) -> int:
        """Channels of all values of a token."""
        return self.num_v_heads * self.v_dim

    @property
    def conv_size(self) -> int:
        """Channels that the convolution reads."""
        return 2 * self.k_size + self.size

    @property
    def state_floats(self) -> int:
        """Numbers that are kept of a sequence: inputs of the convolution, then the states of the heads."""
        return (self.conv_width - 1) * self.conv_size + self.num_v_heads * self.k_dim * self.v_dim

    def linears(self, hidden: int) -> Shapes:
        """Its matrices, [out, in]."""
        return {
            "conv_in": (self.conv_size, hidden),
            "gate_in": (self.size, hidden),
            "beta_in": (self.num_v_heads, hidden),
            "decay_in": (self.num_v_heads, hidden),
            "out": (hidden, self.size),
        }

    def vectors(self) -> Shapes:
        """Its other tensors. decay is negative."""
        return {
            "conv": (self.conv_size, self.conv_width),
            "decay": (self.num_v_heads,),
            "decay_bias": (self.num_v_heads,),
            "out_norm": (self.v_dim,),
        }


@dataclass(frozen=True, slots=True)
class KimiDelta:
    """Kimi delta attention (Moonshot AI 2025, section 3): DeltaRule with as many key heads as value heads, all of one
    size, and with a decay for each channel of a key. Its convolution reads `q`, `k` and `v`, with the weights `q_conv`,
    `k_conv` and `v_conv`. For each head, whose channel is b in `beta_in`, with a the head's channels of `decay_up`,
    which reads `decay_down`:

      S = diag(exp(decay softplus(a + decay_bias))) S;   S += k (sigmoid(b) (v - S^T k))^T;   o = S^T q

    `o` reads RMSNorm(o) times `out_norm` times the sigmoid of the head's channels of `out_gate_up`, which reads
    `out_gate_down`.
    """

    num_heads: int
    head_dim: int
    conv_width: int  # tokens

    @property
    def size(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def state_floats(self) -> int:
        """Numbers that are kept of a sequence: inputs of the convolution, then the states of the heads."""
        return (self.conv_width - 1) * 3 * self.size + self.size * self.head_dim

    def linears(self, hidden: int) -> Shapes:
        """Its matrices, [out, in]."""
        return {
            **dict.fromkeys(("q", "k", "v"), (self.size, hidden)),
            "beta_in": (self.num_heads, hidden),
            **dict.fromkeys(("decay_down", "out_gate_down"), (self.head_dim, hidden)),
            **dict.fromkeys(("decay_up", "out_gate_up"), (self.size, self.head_dim)),
            "o": (hidden, self.size),
        }

    def vectors(self) -> Shapes:
        """Its other tensors. decay is negative."""
        return {
            **dict.fromkeys(("q_conv", "k_conv", "v_conv"), (self.size, self.conv_width)),
            "decay": (self.num_heads,),
            "decay_bias": (self.size,),
            "out_norm": (self.head_dim,),
        }


@dataclass(frozen=True, slots=True)
class Mamba2:
    """State space with one decay a head (Dao and Gu 2024) behind a causal convolution, one state [head_dim, state_dim]
    for each head.

    u, the channels of `conv_in` in the order x, B, C, become silu(conv_bias + sum_j conv[j] u[t - conv_width + 1 + j]).
    For each head, whose channel is d in `decay_in`, and whose group of consecutive heads shares B and C:

      step = clip(softplus(d + decay_bias), least_step, most_step)
      S = exp(decay step) S + step x B^T;   y = S C + skip x

    `out` reads y times silu of the head's channels of `gate_in`; with has_norm, RMSNorm of it within each group.
    """

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    conv_width: int  # tokens
    has_conv_bias: bool = True
    has_norm: bool = True
    least_step: float = 0.0
    most_step: float = math.inf

    @property
    def size(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels that the convolution reads."""
        return self.size + 2 * self.num_groups * self.state_dim

    @property
    def state_floats(self) -> int:
        """Numbers that are kept of a sequence: inputs of the convolution, then the states of the heads."""
        return (self.conv_width - 1) * self.conv_size + self.size * self.state_dim

    def linears(self, hidden: int) -> Shapes:
        """Its matrices, [out, in]."""
        return {
            "gate_in": (self.size, hidden),
            "conv_in": (self.conv_size, hidden),
            "decay_in": (self.num_heads, hidden),
            "out": (hidden, self.size),
        }

    def vectors(self) -> Shapes:
        """Its other tensors. decay is negative."""
        return {
            "conv": (self.conv_size, self.conv_width),
            **({"conv_bias": (self.conv_size,)} if self.has_conv_bias else {}),
            **dict.fromkeys(("decay", "decay_bias", "skip"), (self.num_heads,)),
            **({"out_norm": (self.size,)} if self.has_norm else {}),
        }


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Gated short convolution (Liquid AI 2025): `short_in` gives b, c and x, each of `size` channels; `out` reads
    c sum_j conv[c, j] (b x)[t - conv_width + 1 + j].
    """

    size: int
    conv_width: int  # tokens

    @property
    def state_floats(self) -> int:
        """Numbers that are kept of a sequence: b x of the last tokens."""
        return (self.conv_width - 1) * self.size

    def linears(self, hidden: int) -> Shapes:
        """Its matrices, [out, in]."""
        return {"short_in": (3 * self.size, hidden), "out": (hidden, self.size)}

    def vectors(self) -> Shapes:
        """Its other tensors."""
        return {"conv": (self.size, self.conv_width)}


Recurrent = DeltaRule | KimiDelta | Mamba2 | ShortConv  # mixers with a state
Keyed = Attention | LatentAttention  # those with keys in blocks
Mixer = Keyed | Recurrent


def out_name(mixer: Recurrent) -> str:
    """The matrix that reads its output."""
    return "o" if isinstance(mixer, KimiDelta) else "out"
