"""The part of a layer's program for mixers with a state."""

from collections.abc import Mapping
from typing import NamedTuple

from kvloom.checkpoints.families.mixers import DeltaRule, Mamba2, Recurrent, ShortConv
from kvloom.checkpoints.families.spec import DecoderSpec
from kvloom.rank.kernels import cpu_abi
from kvloom.rank.kernels.cpu_abi import Convolution, DeltaRuleShape, Mamba2Shape, ShortConvShape
from kvloom.rank.kernels.program import PANEL, Program


class DeclaredMixer(NamedTuple):
    """A mixer in the library: its linears, what runs between them, (kind, number), and where `out` reads."""

    linear: int
    out: int
    steps: tuple[tuple[int, int], ...]
    source: int = cpu_abi.FROM_MIXER

    def emit(self, program: Program) -> None:
        """What runs between the norm of its input and `out`."""
        program.emit(cpu_abi.LINEAR, linear=self.linear, epilogue=cpu_abi.TO_QKV)
        for kind, number in self.steps:
            program.emit(kind, layer=number)
        program.emit(cpu_abi.QUANT, linear=self.out, source=self.source, layer=self.steps[-1][1])


class _Place(NamedTuple):
    """Where a mixer is: the beginning of its tensors' names, the channels of the residual stream, and where its part of
    a state begins.
    """

    at: str
    hidden: int
    state_at: int


def declare_mixer(program: Program, spec: DecoderSpec, layer: int) -> DeclaredMixer:
    """Declare the linears and vectors of the layer's mixer."""
    before = [mixer.state_floats for index, mixer in spec.recurrent if index < layer]
    mixer, place = spec.layers[layer].mixer, _Place(f"layers.{layer}.", spec.hidden, sum(before))
    assert isinstance(mixer, Recurrent), "the layer has a state"
    match mixer:
        case DeltaRule():
            return _delta_rule(program, mixer, place)
        case Mamba2():
            return _mamba2(program, mixer, place)
        case ShortConv():
            return _short_conv(program, mixer, place)


def _conv(program: Program, at: str) -> int:
    """The vector of a convolution's weights, [width][channels]."""
    return program.values(program.weights.tensor(at + "conv").float32().T)


def _linears(program: Program, mixer: Recurrent, place: _Place, *names: str) -> tuple[int, int, Mapping[str, int]]:
    """The linear of these matrices below each other, `out`, and the first channel of each."""
    first, rows = {}, 0
    for name in names:
        first[name] = rows
        rows += -(-mixer.linears(place.hidden)[name][0] // PANEL) * PANEL
    linear = program.linear(rows, place.hidden, *((place.at + name, row) for name, row in first.items()))
    out = program.linear(place.hidden, mixer.size, (place.at + "out", 0))
    return linear, out, first


def _short_conv(program: Program, mixer: ShortConv, place: _Place) -> DeclaredMixer:
    shape = ShortConvShape(mixer.size, mixer.conv_width, _conv(program, place.at), place.state_at)
    linear, out, _ = _linears(program, mixer, place, "short_in")
    return DeclaredMixer(linear, out, ((cpu_abi.SHORT_CONV, program.short_conv(shape)),))


def _delta_rule(program: Program, mixer: DeltaRule, place: _Place) -> DeclaredMixer:
    linear, out, first = _linears(program, mixer, place, "conv_in", "gate_in", "beta_in", "decay_in")
    shape = DeltaRuleShape(
        mixer.num_k_heads,
        mixer.num_v_heads,
        mixer.k_dim,
        mixer.v_dim,
        mixer.conv_width,
        mixer.is_tiled,
        *(first[name] for name in ("gate_in", "beta_in", "decay_in")),
        _conv(program, place.at),
        *(program.vector(place.at + name) for name in ("decay", "decay_bias", "out_norm")),
        place.state_at,
    )
    return DeclaredMixer(linear, out, ((cpu_abi.DELTA_RULE, program.delta_rule(shape)),))


def _mamba2(program: Program, mixer: Mamba2, place: _Place) -> DeclaredMixer:
    linear, out, first = _linears(program, mixer, place, "conv_in", "gate_in", "decay_in")
    bias = program.vector(place.at + "conv_bias") if mixer.has_conv_bias else cpu_abi.NONE
    conv = Convolution(
        first["conv_in"], mixer.conv_size, mixer.conv_width, _conv(program, place.at), bias, place.state_at
    )
    shape = Mamba2Shape(
        mixer.num_heads,
        mixer.head_dim,
        mixer.state_dim,
        mixer.num_groups,
        *first.values(),
        *(program.vector(place.at + name) for name in ("decay", "decay_bias", "skip")),
        program.vector(place.at + "out_norm") if mixer.has_norm else cpu_abi.NONE,
        mixer.least_step,
        mixer.most_step,
        place.state_at + (mixer.conv_width - 1) * mixer.conv_size,
    )
    steps = (cpu_abi.CONVOLUTION, program.convolution(conv)), (cpu_abi.MAMBA2, program.mamba2(shape))
    source = cpu_abi.FROM_NORMED_MIXER if mixer.has_norm else cpu_abi.FROM_MIXER
    return DeclaredMixer(linear, out, steps, source)
