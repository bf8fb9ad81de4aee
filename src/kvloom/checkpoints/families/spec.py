"""DecoderSpec: what a decoder-only transformer looks like, said once for every backend.

A family (llama.py, qwen2.py, ...) turns a checkpoint's configuration into a DecoderSpec and maps its tensor names;
backends read the spec and know no family.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (Su et al. 2021), "neox" order: partners are i and i + dim/2 within `dim`.

    `inv_freq` has dim/2 entries, every scaling rule already applied; `attention_factor` multiplies cos and sin.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Shapes and switches of a pre-norm decoder: x += attn(norm(x)); x += mlp(norm(x)).

    Canonical tensor names (weights are [out, in]):
      embed [vocab, hidden]   norm [hidden]   head [vocab, hidden] (absent when tie_embeddings)
      layers.N. attn_norm, q, k, v, o, q_bias, k_bias, v_bias, q_norm [head_dim], k_norm [head_dim],
                mlp_norm, gate, up, down
    """

    family: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int
    rope: Rope
    norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3: RMSNorm of each head of q and k before RoPE
    sliding_window: int | None = None  # tokens; Mistral v0.1
    activation: Literal["silu", "gelu_tanh"] = "silu"

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor a checkpoint of this spec must hold, by canonical name."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (self.hidden,),
            "q": (q_size, self.hidden),
            "k": (kv_size, self.hidden),
            "v": (kv_size, self.hidden),
            "o": (self.hidden, q_size),
            "mlp_norm": (self.hidden,),
            "gate": (self.intermediate, self.hidden),
            "up": (self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }
        if self.qkv_bias:
            layer |= {"q_bias": (q_size,), "k_bias": (kv_size,), "v_bias": (kv_size,)}
        if self.qk_norm:
            layer |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, self.hidden), "norm": (self.hidden,)}
        if not self.tie_embeddings:
            shapes["head"] = (self.vocab_size, self.hidden)
        for index in range(self.num_layers):
            shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
        return shapes
