"""Mixers of tokens: what a layer does between tokens, and what it keeps of a sequence for that.

Attention keeps keys and values of every token, in blocks. The others keep a state of one size, whatever the length.
"""

from dataclasses import dataclass

Shapes = dict[str, tuple[int, ...]]


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
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None = None  # None = queries and keys without positions
    window: int | None = None  # tokens that a query attends to on each visible side, itself included; None = all
    is_gated: bool = False  # each channel of its output is multiplied by the sigmoid of a channel of `q_gate`

    @property
    def q_size(self) -> int:
        """Channels of all queries of a token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Channels of all keys, and of all values, of a token."""
        return self.num_kv_heads * self.head_dim

    def linears(self, hidden: int) -> Shapes:
        """Its matrices, [out, in]."""
        gate = {"q_gate": (self.q_size, hidden)} if self.is_gated else {}
        kv = (self.kv_size, hidden)
        return {"q": (self.q_size, hidden), "k": kv, "v": kv, **gate, "o": (hidden, self.q_size)}


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """Gated delta rule (Yang et al. 2024) behind a causal convolution, one state [k_dim, v_dim] for each value head.

    x, the channels of `conv_in` in the order q, k, v, become silu(sum_j conv[c, j] x[t - conv_width + 1 + j, c]).
    q and k are divided by their norms, q also by sqrt(k_dim). For each value head, whose channel is a in `decay_in` and
    b in `beta_in`:

      S = exp(decay softplus(a + decay_bias)) S;   S += k (sigmoid(b) (v - S^T k))^T;   o = S^T q

    `out` reads RMSNorm(o) times `delta_norm` times silu of the head's channels of `gate_in`. Each key head serves
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
    def v_size(self) -> int:
        """Channels of all values of a token."""
        return self.num_v_heads * self.v_dim

    @property
    def conv_size(self) -> int:
        """Channels that the convolution reads."""
        return 2 * self.k_size + self.v_size

    @property
    def state_floats(self) -> int:
        """Numbers that are kept of a sequence: inputs of the convolution, then the states of the heads."""
        return (self.conv_width - 1) * self.conv_size + self.num_v_heads * self.k_dim * self.v_dim

    def linears(self, hidden: int) -> Shapes:
        """Its matrices, [out, in]."""
        return {
            "conv_in": (self.conv_size, hidden),
            "gate_in": (self.v_size, hidden),
            "beta_in": (self.num_v_heads, hidden),
            "decay_in": (self.num_v_heads, hidden),
            "out": (hidden, self.v_size),
        }

    def vectors(self) -> Shapes:
        """Its other tensors. decay is negative."""
        return {
            "conv": (self.conv_size, self.conv_width),
            "decay": (self.num_v_heads,),
            "decay_bias": (self.num_v_heads,),
            "delta_norm": (self.v_dim,),
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


Recurrent = DeltaRule | ShortConv  # mixers with a state
Mixer = Attention | Recurrent
