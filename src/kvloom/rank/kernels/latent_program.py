"""The part of a layer's program for latent attention."""

from typing import NamedTuple

from kvloom.checkpoints.families.mixers import LatentAttention
from kvloom.rank.kernels import cpu_abi
from kvloom.rank.kernels.cpu_abi import AttentionShape, LatentShape
from kvloom.rank.kernels.cpu_cache import At
from kvloom.rank.kernels.program import PANEL, Program


class DeclaredLatents(NamedTuple):
    """Latent attention in the library: its linears (q_up: NONE if `down` gives queries), and its numbers there."""

    down: int
    q_up: int
    k_up: int
    v_up: int
    out: int
    attention: int
    latent: int

    def emit_steps(self, program: Program, rope: int) -> None:
        """What runs between the normed residual stream and `out`. `rope`: the library's number of its rotary table;
        NONE = without positions.
        """
        program.emit(cpu_abi.LINEAR, linear=self.down, epilogue=cpu_abi.TO_QKV)
        program.emit(cpu_abi.LATENT_KEYS, layer=self.latent, rope=rope)
        if self.q_up != cpu_abi.NONE:
            program.emit(cpu_abi.QUANT, linear=self.q_up, source=cpu_abi.FROM_ATTENTION)
            program.emit(cpu_abi.LINEAR, linear=self.q_up, epilogue=cpu_abi.TO_QKV)
        program.emit(cpu_abi.LATENT_QUERIES, layer=self.latent, linear=self.k_up, rope=rope)
        program.emit(cpu_abi.ATTENTION, layer=self.attention)
        program.emit(cpu_abi.LATENT_VALUES, layer=self.latent, linear=self.v_up)
        program.emit(cpu_abi.QUANT, linear=self.out, source=cpu_abi.FROM_QKV)


def declare_latents(program: Program, own: LatentAttention, at: str, hidden: int, memory: At) -> DeclaredLatents:
    """`at`: the beginning of the names of its tensors; `memory`: where its keys are in a block."""
    shapes = own.linears(hidden)
    first = own.q_name if own.q_rank is None else "q_down"
    keys_at = -(-shapes[first][0] // PANEL) * PANEL
    down = program.linear(keys_at + own.head_dim, hidden, (at + first, 0), (at + "kv_down", keys_at))

    def linear(name: str) -> int:
        rows, cols = shapes[name]
        return program.linear(rows, cols, (at + name, 0))

    q_up = cpu_abi.NONE if own.q_rank is None else linear(own.q_name)
    k_up, v_up, out = linear("k_up"), linear("v_up"), linear("o")
    attention = program.attention(
        AttentionShape(
            own.num_heads, own.num_kv_heads, own.head_dim, own.value_dim, cpu_abi.LATENT, cpu_abi.NONE, *memory[:3]
        )
    )
    norm = program.vector(at + "kv_down_norm")
    q_norm = cpu_abi.NONE if own.q_rank is None else program.vector(at + "q_down_norm")
    sizes = own.q_rank or 0, own.nope_dim, own.rope_dim, own.out_dim
    latent = program.latent(LatentShape(attention, keys_at, *sizes, norm, q_norm))
    return DeclaredLatents(down, q_up, k_up, v_up, out, attention, latent)
