"""The part of a layer's program for mixers with a state."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvloom.checkpoints.families.mixers import DeltaRule, KimiDelta, Mamba2, Recurrent, ShortConv, out_name
from kvloom.checkpoints.families.spec import DecoderSpec
from kvloom.rank.kernels import cpu_abi
from kvloom.rank.kernels.cpu_abi import Convolution, DeltaRuleShape, Mamba2Shape, ShortConvShape
from kvloom.rank.kernels.program import PANEL, Program

Parts = Sequence[tuple[str, int]]
Steps = tuple[tuple[int, Mapping[str, int]], ...]


class DeclaredMixer(NamedTuple):
    """A mixer in the library: its first and last linear, what runs between them, (kind, fields) of instructions, and
    where `out` reads.
    """

    linear: int
    out: int
    steps: Steps
    source: int = cpu_abi.FROM_MIXER

    def emit_steps(self, program: Program) -> None:
        """What runs behind the linear."""
        for kind, fields in self.steps:
            program.emit(kind, **fields)

    def emit_quant(self, program: Program) -> None:
        """What makes the input of `out`."""
        program.emit(cpu_abi.QUANT, linear=self.out, source=self.source, layer=self.steps[-1][1]["layer"])


class _Place(NamedTuple):
    """Where a mixer is: the beginning of its tensors' names, the channels of the residual stream, where its part of a
    state begins, and what its linear has above its own rows: tensors with their first channels, and how many channels.
    """

    at: str
    hidden: int
    state_at: int
    above: Parts
    rows: int


def declare_mixer(program: Program, spec: DecoderSpec, layer: int, above: Parts = (), rows: int = 0) -> DeclaredMixer:
    """Declare the linears and vectors of the layer's mixer with a state. `above`, `rows`: of a mixer beside it, which
    reads the same.
    """
    mixer = dict(spec.recurrent)[layer]
    before = [own.state_floats for index, own in spec.recurrent if index < layer]
    place = _Place(f"layers.{layer}.", spec.hidden, sum(before), above, rows)
    match mixer:
        case DeltaRule():
            return _delta_rule(program, mixer, place)
        case KimiDelta():
            return _kimi_delta(program, mixer, place)
        case Mamba2():
            return _mamba2(program, mixer, place)
        case ShortConv():
            return _short_conv(program, mixer, place)


def _conv(program: Program, at: str, *parts: str) -> int:
    """The vector of a convolution's weights, [width][channels], of these tensors one behind the other."""
    return program.values(
        np.concatenate([program.weights.tensor(at + part).float32() for part in parts or ("conv",)]).T
    )


def _linear(program: Program, mixer: Recurrent, place: _Place, *names: str) -> tuple[int, Mapping[str, int]]:
    """The linear of these matrices below each other, and the first channel of each; of "" that behind all of them."""
    first, rows = {}, -(-place.rows // PANEL) * PANEL
    for name in names:
        first[name] = rows
        rows += -(-mixer.linears(place.hidden)[name][0] // PANEL) * PANEL
    linear = program.linear(rows, place.hidden, *place.above, *((place.at + name, row) for name, row in first.items()))
    return linear, {**first, "": rows}


def _out(program: Program, mixer: Recurrent, place: _Place) -> int:
    """The linear that reads the mixer's output."""
    return program.linear(place.hidden, mixer.size, (place.at + out_name(mixer), 0))


def _short_conv(program: Program, mixer: ShortConv, place: _Place) -> DeclaredMixer:
    shape = ShortConvShape(mixer.size, mixer.conv_width, _conv(program, place.at), place.state_at)
    linear, _ = _linear(program, mixer, place, "short_in")
    steps = ((cpu_abi.SHORT_CONV, {"layer": program.short_conv(shape)}),)
    return DeclaredMixer(linear, _out(program, mixer, place), steps)


def _delta_rule(program: Program, mixer: DeltaRule, place: _Place) -> DeclaredMixer:
    linear, first = _linear(program, mixer, place, "conv_in", "gate_in", "beta_in", "decay_in")
    out = _out(program, mixer, place)
    shape = DeltaRuleShape(
        mixer.num_k_heads,
        mixer.num_v_heads,
        mixer.k_dim,
        mixer.v_dim,
        mixer.conv_width,
        mixer.is_tiled,
        False,
        False,
        *(first[name] for name in ("gate_in", "beta_in", "decay_in")),
        _conv(program, place.at),
        *(program.vector(place.at + name) for name in ("decay", "decay_bias", "out_norm")),
        place.state_at,
    )
    return DeclaredMixer(linear, out, ((cpu_abi.DELTA_RULE, {"layer": program.delta_rule(shape)}),))


def _kimi_delta(program: Program, mixer: KimiDelta, place: _Place) -> DeclaredMixer:
    """Its low-rank gates are linears of their own, which write behind the channels of the first one."""
    linear, first = _linear(program, mixer, place, "q", "k", "v", "beta_in", "decay_down", "out_gate_down")
    decay_at, gate_at = first[""], first[""] + mixer.size
    steps: Steps = ()
    for name, at in (("decay", decay_at), ("out_gate", gate_at)):
        up = program.linear(mixer.size, mixer.head_dim, (f"{place.at}{name}_up", 0))
        steps += ((cpu_abi.QUANT, {"linear": up, "source": cpu_abi.FROM_QKV, "at": first[f"{name}_down"]}),)
        steps += ((cpu_abi.LINEAR, {"linear": up, "epilogue": cpu_abi.TO_QKV, "at": at}),)
    shape = DeltaRuleShape(
        mixer.num_heads,
        mixer.num_heads,
        mixer.head_dim,
        mixer.head_dim,
        mixer.conv_width,
        False,
        True,
        True,
        gate_at,
        first["beta_in"],
        decay_at,
        _conv(program, place.at, "q_conv", "k_conv", "v_conv"),
        *(program.vector(place.at + name) for name in ("decay", "decay_bias", "out_norm")),
        place.state_at,
    )
    steps += ((cpu_abi.DELTA_RULE, {"layer": program.delta_rule(shape)}),)
    return DeclaredMixer(linear, _out(program, mixer, place), steps)


def _mamba2(program: Program, mixer: Mamba2, place: _Place) -> DeclaredMixer:
    linear, first = _linear(program, mixer, place, "conv_in", "gate_in", "decay_in")
    out = _out(program, mixer, place)
    bias = program.vector(place.at + "conv_bias") if mixer.has_conv_bias else cpu_abi.NONE
    conv = Convolution(
        first["conv_in"], mixer.conv_size, mixer.conv_width, _conv(program, place.at), bias, place.state_at
    )
    shape = Mamba2Shape(
        mixer.num_heads,
        mixer.head_dim,
        mixer.state_dim,
        mixer.num_groups,
        *(first[name] for name in ("conv_in", "gate_in", "decay_in")),
        *(program.vector(place.at + name) for name in ("decay", "decay_bias", "skip")),
        program.vector(place.at + "out_norm") if mixer.has_norm else cpu_abi.NONE,
        mixer.least_step,
        mixer.most_step,
        place.state_at + (mixer.conv_width - 1) * mixer.conv_size,
    )
    steps: Steps = ((cpu_abi.CONVOLUTION, {"layer": program.convolution(conv)}),)
    steps += ((cpu_abi.MAMBA2, {"layer": program.mamba2(shape)}),)
    source = cpu_abi.FROM_NORMED_MIXER if mixer.has_norm else cpu_abi.FROM_MIXER
    return DeclaredMixer(linear, out, steps, source)
