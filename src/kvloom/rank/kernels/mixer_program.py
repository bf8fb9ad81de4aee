"""The part of a layer's program for mixers with a state."""

from typing import NamedTuple

from kvloom.checkpoints.families.mixers import DeltaRule, Recurrent, ShortConv
from kvloom.checkpoints.families.spec import DecoderSpec
from kvloom.rank.kernels import cpu_abi
from kvloom.rank.kernels.cpu_abi import DeltaRuleShape, ShortConvShape
from kvloom.rank.kernels.program import PANEL, Program


class DeclaredMixer(NamedTuple):
    """A mixer in the library: its linears, and its number among those of its instruction."""

    linear: int
    out: int
    kind: int
    number: int

    def emit(self, program: Program) -> None:
        """What runs between the norm of its input and `out`."""
        program.emit(cpu_abi.LINEAR, linear=self.linear, epilogue=cpu_abi.TO_QKV)
        program.emit(self.kind, layer=self.number)
        program.emit(cpu_abi.QUANT, linear=self.out, source=cpu_abi.FROM_MIXER)


def declare_mixer(program: Program, spec: DecoderSpec, layer: int) -> DeclaredMixer:
    """Declare the linears and vectors of the layer's mixer."""
    before = [mixer.state_floats for index, mixer in spec.recurrent if index < layer]
    mixer, at = spec.layers[layer].mixer, f"layers.{layer}."
    assert isinstance(mixer, Recurrent), "the layer has a state"
    place = spec.hidden, sum(before)
    if isinstance(mixer, DeltaRule):
        return _delta_rule(program, mixer, at, place)
    return _short_conv(program, mixer, at, place)


def _conv(program: Program, at: str) -> int:
    """The vector of a convolution's weights, [width][channels]."""
    return program.values(program.weights.tensor(at + "conv").float32().T)


def _short_conv(program: Program, mixer: ShortConv, at: str, place: tuple[int, int]) -> DeclaredMixer:
    """See _delta_rule."""
    hidden, state_at = place
    number = program.short_conv(ShortConvShape(mixer.size, mixer.conv_width, _conv(program, at), state_at))
    linear = program.linear(3 * mixer.size, hidden, (at + "short_in", 0))
    out = program.linear(hidden, mixer.size, (at + "out", 0))
    return DeclaredMixer(linear, out, cpu_abi.SHORT_CONV, number)


def _delta_rule(program: Program, mixer: DeltaRule, at: str, place: tuple[int, int]) -> DeclaredMixer:
    """`place`: channels of the residual stream, and where the mixer's part of a state begins."""
    (hidden, state_at), parts, rows = place, [], 0
    for name in ("conv_in", "gate_in", "beta_in", "decay_in"):
        parts.append((at + name, rows))
        rows += -(-mixer.linears(hidden)[name][0] // PANEL) * PANEL
    gate_at, beta_at, decay_at = (first for _, first in parts[1:])
    shape = DeltaRuleShape(
        mixer.num_k_heads,
        mixer.num_v_heads,
        mixer.k_dim,
        mixer.v_dim,
        mixer.conv_width,
        mixer.is_tiled,
        gate_at,
        beta_at,
        decay_at,
        _conv(program, at),
        *(program.vector(at + name) for name in ("decay", "decay_bias", "delta_norm")),
        state_at,
    )
    linear = program.linear(rows, hidden, *parts)
    out = program.linear(hidden, mixer.v_size, (at + "out", 0))
    return DeclaredMixer(linear, out, cpu_abi.DELTA_RULE, program.delta_rule(shape))
