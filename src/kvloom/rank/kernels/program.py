"""Program: a model's linears, small vectors and instructions, declared to the library in the order of execution."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvloom.checkpoints.footprint import STORED, UNQUANTISED_FORM
from kvloom.checkpoints.source import WeightSource
from kvloom.rank.kernels import cpu_abi
from kvloom.rank.kernels.backend import Floats
from kvloom.rank.kernels.cpu_abi import (
    AttentionShape,
    Convolution,
    DeltaRuleShape,
    Instruction,
    LatentShape,
    Mamba2Shape,
    Mixture,
    ShortConvShape,
)

WEIGHT_FORMATS = {"w8a8": cpu_abi.INT8, "w4a8": cpu_abi.INT4, "bf16": cpu_abi.BF16, STORED: cpu_abi.NONE}
FORMS = {
    "int4": cpu_abi.INT4,
    "int5": cpu_abi.INT5,
    "int8": cpu_abi.INT8_32,
    "int8_min": cpu_abi.INT8_MIN,
    "int8_channel": cpu_abi.INT8_CHANNEL,
    "iq4": cpu_abi.IQ4,
    "fp4": cpu_abi.FP4,
    "fp4_16": cpu_abi.FP4_16,
    "int1": cpu_abi.INT1,
    "int2": cpu_abi.INT2,
    "int2_256": cpu_abi.INT2_256,
    "int2_k": cpu_abi.INT2_K,
    "int3_k": cpu_abi.INT3_K,
    "int4_k": cpu_abi.INT4_K,
    "int5_k": cpu_abi.INT5_K,
    "int6_k": cpu_abi.INT6_K,
    "iq1_s": cpu_abi.IQ1_S,
    "iq1_m": cpu_abi.IQ1_M,
    "iq2_xxs": cpu_abi.IQ2_XXS,
    "iq2_xs": cpu_abi.IQ2_XS,
    "iq2_s": cpu_abi.IQ2_S,
    "iq3_xxs": cpu_abi.IQ3_XXS,
    "iq3_s": cpu_abi.IQ3_S,
}  # those of numbers.FORM_BITS
GATES = {
    "silu": cpu_abi.SWIGLU,
    "gelu_tanh": cpu_abi.GEGLU,
    "clamped": cpu_abi.CLAMPED,
    "relu2": cpu_abi.RELU2,
}  # epilogues
PANEL = 32  # output channels of a panel (cpu/layout.hpp)
PANEL_HALF = 16  # rows of gate and up that alternate in a panel
_NO_OPERANDS = dict.fromkeys(("linear", "vector", "vector2", "rope"), cpu_abi.NONE)


@dataclass(frozen=True, slots=True)
class Native:
    """The library, the model's handle in it, and its number of threads."""

    library: ctypes.CDLL
    model: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Lent:
    """What a head that guesses shares of its model, in whose threads' shares the linears are laid out.

    `embed`: the linear whose rows are the embedding; NONE = `table` is that.
    """

    model: int
    num_threads: int
    head: int
    embed: int
    table: np.ndarray[Any, np.dtype[np.uint16]]
    owner: object  # keeps the memory


@dataclass(frozen=True, slots=True)
class Fill:
    """A tensor to be packed into a linear; see kvl_fill_f32."""

    linear: int
    name: str
    first: int
    interleave: int


class Program:
    """The program of a model; no weights are read yet, except vectors."""

    def __init__(self, native: Native, weights: WeightSource, weight_format: str, has_gates: bool = True) -> None:
        """`has_gates`: of MLPs."""
        self._lib, self._model, self._num_threads = native.library, native.model, native.num_threads
        self.weights, self.weight_format, self._has_gates = weights, weight_format, has_gates
        self.fills: list[Fill] = []
        self.instructions: list[Instruction] = []
        self._in_groups: set[str] = (
            set()
        )  # tensors with one scale a channel in their file that are stored with one for 32 values

    def share(self, *names: str) -> None:
        """Announce tensors that read the same activations: these have one scale a token for all of them, or for
        none.
        """
        if len({self.format_of(name) == cpu_abi.INT8_CHANNEL for name in names}) > 1:
            self._in_groups.update(names)

    def linear(self, rows: int, cols: int, *parts: tuple[str, int]) -> int:
        """Declare a linear of tensors (name, first channel), each stored in its own format. Returns its number."""
        self.share(*(name for name, _ in parts))
        formats = [self.format_of(name) for name, _ in parts]
        linear = int(self._lib.kvl_add_linear(self._model, rows, cols, formats[0]))
        for (_, first), before, own in zip(parts[1:], formats, formats[1:], strict=False):
            if own != before:
                self._lib.kvl_set_format(self._model, linear, first, own)
        self.fills += [Fill(linear, name, first, -1) for name, first in parts]
        return linear

    def share_linear(self, model: int, linear: int) -> int:
        """Declare a linear whose weights are those of another model. Returns its number."""
        return int(self._lib.kvl_share_linear(self._model, model, linear))

    def gate_up(self, at: str, channels: int, cols: int, is_joint: bool) -> int:
        """Declare a linear of the tensors `at`gate and `at`up, which share panels where is_joint; of `at`up alone where
        MLPs have no gate.
        """
        gate, up = at + "gate", at + "up"
        if not self._has_gates:
            return self.linear(channels, cols, (up, 0))
        if not is_joint:
            rows = -(-channels // PANEL) * PANEL
            return self.linear(2 * rows, cols, (gate, 0), (up, rows))
        rows = 2 * -(-channels // PANEL_HALF) * PANEL_HALF
        linear = int(self._lib.kvl_add_linear(self._model, rows, cols, self.format_of(gate)))
        self.fills += [Fill(linear, gate, 0, 0), Fill(linear, up, 0, 1)]
        return linear

    def is_joint(self, at: str) -> bool:
        """Whether `at`gate and `at`up can share panels, which the fused epilogue needs: they have one format."""
        return len({self.format_of(name) for name in self.up_names(at)}) == 1

    def up_names(self, at: str) -> list[str]:
        """The tensors whose products an MLP's activation reads."""
        return [at + "gate", at + "up"] if self._has_gates else [at + "up"]

    def vector(self, *names: str) -> int:
        return self.values(np.concatenate([self.weights.tensor(name).float32() for name in names]))

    def values(self, values: Floats) -> int:
        """Copy a vector into the library. Returns its number."""
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        return int(self._lib.kvl_add_vector(self._model, flat.ctypes.data, len(flat)))

    def mixture(self, mixture: Mixture) -> int:
        return int(self._lib.kvl_add_mixture(self._model, ctypes.byref(mixture)))

    def attention(self, shape: AttentionShape) -> int:
        return int(self._lib.kvl_add_attention(self._model, ctypes.byref(shape)))

    def latent(self, shape: LatentShape) -> int:
        return int(self._lib.kvl_add_latent(self._model, ctypes.byref(shape)))

    def delta_rule(self, shape: DeltaRuleShape) -> int:
        return int(self._lib.kvl_add_delta_rule(self._model, ctypes.byref(shape)))

    def short_conv(self, shape: ShortConvShape) -> int:
        return int(self._lib.kvl_add_short_conv(self._model, ctypes.byref(shape)))

    def convolution(self, shape: Convolution) -> int:
        return int(self._lib.kvl_add_convolution(self._model, ctypes.byref(shape)))

    def mamba2(self, shape: Mamba2Shape) -> int:
        return int(self._lib.kvl_add_mamba2(self._model, ctypes.byref(shape)))

    def emit(self, kind: int, **fields: int) -> None:
        """Append an instruction. Fields that are not given: no linear, no vector, else 0."""
        self.instructions.append(Instruction(kind, **(_NO_OPERANDS | fields)))

    def format_of(self, name: str) -> int:
        """In which the kernels hold a matrix."""
        is_head = name in ("embed", "head")  # reads activations that no other tensor reads
        if self.weight_format == STORED:
            form = self.weights.form(name)
            found = cpu_abi.INT8 if is_head and not form else FORMS[form or UNQUANTISED_FORM]
            return cpu_abi.INT8_32 if found == cpu_abi.INT8_CHANNEL and name in self._in_groups else found
        if self.weight_format == "w4a8" and is_head:
            return cpu_abi.INT8
        if self.weight_format == "w4a8" and self.weights.form(name) == "int4_k":
            return cpu_abi.INT4_K
        return WEIGHT_FORMATS[self.weight_format]

    def keeps(self, name: str, form: str) -> bool:
        """Whether the kernels store a tensor of this file format without loss."""
        held = self.format_of(name)
        return FORMS.get(form) == held or (form == "int8_channel" and held == cpu_abi.INT8_32)

    def measure(self) -> list[int]:
        """Bytes of each arena for what is declared so far."""
        return [self._lib.kvl_arena_bytes(self._model, thread) for thread in range(self._num_threads)]
