"""A checkpoint as the CPU kernels want it: weights in panels, and the layer program that runs them."""

import ctypes
import mmap
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvloom.checkpoints.families.spec import DecoderSpec, Rope
from kvloom.checkpoints.footprint import STORED, UNQUANTISED_FORM
from kvloom.checkpoints.quantized.forms import number_bits
from kvloom.checkpoints.source import WeightSource
from kvloom.contract.errors import ModelError
from kvloom.contract.messages import Progress
from kvloom.rank.kernels import cpu_abi
from kvloom.rank.kernels.backend import Floats
from kvloom.rank.kernels.cpu_abi import FileNumbers, Instruction

WEIGHT_FORMATS = {"w8a8": cpu_abi.INT8, "w4a8": cpu_abi.INT4, "bf16": cpu_abi.BF16, STORED: cpu_abi.NONE}
_FORMS = {
    "int4": cpu_abi.INT4,
    "int5": cpu_abi.INT5,
    "int6": cpu_abi.INT6,
    "int8": cpu_abi.INT8_32,
    "int8_min": cpu_abi.INT8_MIN,
    "iq4": cpu_abi.IQ4,
    "fp4": cpu_abi.FP4,
}  # of numbers.FORM_BITS
_NO_OPERANDS = dict.fromkeys(("linear", "vector", "vector2", "rope"), cpu_abi.NONE)
PANEL = 32  # output channels that lie together (cpu/layout.hpp)
PANEL_HALF = 16  # gate and up rows that share a panel


@dataclass(frozen=True, slots=True)
class Native:
    """The library, a model of its, and the number of that model's threads."""

    library: ctypes.CDLL
    model: int
    num_threads: int


class Packer:
    """Turns a checkpoint into declared, then filled linears, and the layer program that runs them."""

    def __init__(
        self, native: Native, spec: DecoderSpec, ropes: dict[Rope, int], weights: WeightSource, weight_format: str
    ) -> None:
        """`ropes`: of the layers, by what the library calls them."""
        self._lib, self._model, self._num_threads = native.library, native.model, native.num_threads
        self._spec, self._ropes, self._weights, self._weight_format = spec, ropes, weights, weight_format
        self._fills: list[tuple[int, str, int, int]] = []  # linear, tensor, first channel, interleave
        self.program: list[Instruction] = []
        self._arenas: list[int] = []  # bytes of each
        self.streamed_bytes = 0  # of the linears that every step reads
        self.num_bytes = 0  # and with the embedding
        self.embed_linear = cpu_abi.NONE  # whose rows are the embedding, when it is held as the file has it
        self.held: np.ndarray[Any, Any] | None = None  # memory of others that the weights lie in
        self.embed = np.empty((0, 0), np.uint16)  # bfloat16; empty when a linear holds it

    @property
    def position_of(self) -> dict[str, tuple[int, int, int]]:
        """Where each matrix went: linear, first channel, interleave."""
        return {name: (linear, first, interleave) for linear, name, first, interleave in self._fills}

    def describe(self) -> str:
        """How the weights are kept, for people."""
        if self._weight_format != STORED:
            return "in bfloat16" if self._weight_format == "bf16" else f"in {self._weight_format[1]} bits"
        forms = (self._weights.form(name) or UNQUANTISED_FORM for _, name, _, _ in self._fills)
        bits = Counter(number_bits(form) for form in forms)
        told = ", ".join(f"{bits[b]} in {b} bits" for b in sorted(bits))
        return f"as the file has them ({told})"

    def declare(self) -> None:
        """Every linear in the order of execution, every small vector, and the program."""
        spec = self._spec
        for layer in range(spec.num_layers):
            self._declare_attention(layer, f"layers.{layer}.")
            self._declare_mlp(f"layers.{layer}.")
        head = self._linear(spec.vocab_size, spec.hidden, ("embed" if spec.tie_embeddings else "head", 0))
        self._emit(cpu_abi.ROWS_NORM_QUANT, linear=head, vector=self._vector("norm"))
        self._emit(cpu_abi.LINEAR, linear=head, epilogue=cpu_abi.LOGITS)
        self.streamed_bytes = sum(self._measure())
        if self._weight_format == STORED and self._weights.form("embed"):
            is_tied = spec.tie_embeddings
            self.embed_linear = head if is_tied else self._linear(spec.vocab_size, spec.hidden, ("embed", 0))
        else:
            self.embed = np.empty(spec.tensor_shapes()["embed"], np.uint16)
        self._arenas = self._measure()
        self.num_bytes = sum(self._arenas) + self.embed.nbytes

    def adopt(self, pages: mmap.mmap, progress: Progress | None) -> None:
        """In place of `fill`: what `pieces` of an equal model gave, one behind the other."""
        self.held = np.frombuffer(pages, np.uint8)
        self._lib.kvl_adopt(self._model, self.held.ctypes.data)
        arena_bytes = sum(self._arenas)
        self.embed = self.held[arena_bytes:].view(np.uint16).reshape(self.embed.shape)
        first = -(-arena_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if first < len(pages) and hasattr(mmap, "MADV_DONTNEED"):  # a step reads the rows of its tokens, no others
            pages.madvise(mmap.MADV_DONTNEED, first, len(pages) - first)
        if progress:
            progress(self.num_bytes, self.num_bytes)

    def pieces(self) -> list[memoryview]:
        """What `fill` made, as long as the model lives: an arena a thread, then the embedding."""
        ranges = [(self._lib.kvl_arena(self._model, thread), size) for thread, size in enumerate(self._arenas)]
        if self.embed.size:
            ranges.append((self.embed.ctypes.data, self.embed.nbytes))
        return [memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B") for address, size in ranges]

    def fill(self, progress: Progress | None) -> None:
        """Reads each tensor once, piece by piece, packs it and forgets it; several tensors at a time."""
        if self._lib.kvl_allocate(self._model) < 0:
            raise ModelError("no memory for the packed weights")
        shapes = self._spec.tensor_shapes()
        if self.embed.size and not self._spec.tie_embeddings:
            for at, values in self._weights.tensor("embed").float32_pieces():
                self._embed_rows(at, values)
        total, done = sum(int(np.prod(shapes[name])) for _, name, _, _ in self._fills), 0
        with ThreadPoolExecutor(self._num_threads) as threads:
            for name in threads.map(self._fill, self._fills):
                done += int(np.prod(shapes[name]))
                if progress:
                    progress(self.num_bytes * done // total, self.num_bytes)

    def _declare_attention(self, layer: int, at: str) -> None:
        spec = self._spec
        q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        parts = ((at + "q", 0), (at + "k", q_rows), (at + "v", q_rows + kv_rows))
        qkv = self._linear(q_rows + 2 * kv_rows, spec.hidden, *parts)
        out = self._linear(spec.hidden, q_rows, (at + "o", 0))
        bias = self._vector(*(f"{at}{part}_bias" for part in "qkv")) if spec.qkv_bias else cpu_abi.NONE
        norms = {}
        if spec.qk_norm:
            source = cpu_abi.NORM_ROWS if spec.qk_norm == "row" else cpu_abi.NORM_HEADS
            norms = {"vector": self._vector(at + "q_norm"), "vector2": self._vector(at + "k_norm"), "source": source}
        own = spec.layers[layer]
        self._emit_input(qkv, at + "attn_norm")
        self._emit(cpu_abi.LINEAR, linear=qkv, epilogue=cpu_abi.TO_QKV, vector=bias)
        rope = cpu_abi.NONE if own.rope is None else self._ropes[own.rope]
        self._emit(cpu_abi.ROPE_KV, layer=layer, rope=rope, **norms)
        self._emit(cpu_abi.ATTENTION, layer=layer, window=own.window or 0)
        self._emit(cpu_abi.QUANT, linear=out, source=cpu_abi.FROM_ATTENTION)
        self._emit_output(out, at + "attn_post_norm")

    def _declare_mlp(self, at: str) -> None:
        """Gate and up share panels, as the fast epilogue needs, unless they are held in different forms."""
        spec = self._spec
        gate, up = at + "gate", at + "up"
        activation = cpu_abi.SWIGLU if spec.activation == "silu" else cpu_abi.GEGLU
        is_joint = self._format_of(gate) == self._format_of(up)
        if is_joint:
            rows = 2 * -(-spec.intermediate // PANEL_HALF) * PANEL_HALF
            gate_up = int(self._lib.kvl_add_linear(self._model, rows, spec.hidden, self._format_of(gate)))
            self._fills += [(gate_up, gate, 0, 0), (gate_up, up, 0, 1)]
        else:
            rows = -(-spec.intermediate // PANEL) * PANEL
            gate_up = self._linear(2 * rows, spec.hidden, (gate, 0), (up, rows))
        down = self._linear(spec.hidden, spec.intermediate, (at + "down", 0))
        self._emit_input(gate_up, at + "mlp_norm")
        if is_joint:
            self._emit(cpu_abi.LINEAR, linear=gate_up, epilogue=activation)
            self._emit(cpu_abi.QUANT, linear=down, source=cpu_abi.FROM_MLP)
        else:
            self._emit(cpu_abi.LINEAR, linear=gate_up, epilogue=cpu_abi.TO_QKV)
            self._emit(cpu_abi.QUANT, linear=down, epilogue=activation, source=cpu_abi.FROM_GATE_UP)
        self._emit_output(down, at + "mlp_post_norm")

    def _emit_input(self, linear: int, norm: str) -> None:
        """The residual stream as `linear` reads it, normed where the model norms before a branch."""
        if self._spec.norms == "post":
            self._emit(cpu_abi.QUANT, linear=linear, source=cpu_abi.FROM_RESIDUAL)
        else:
            self._emit(cpu_abi.NORM_QUANT, linear=linear, vector=self._vector(norm))

    def _emit_output(self, linear: int, norm: str) -> None:
        """The last linear of a branch, added to the residual stream, normed first where the model norms behind it."""
        if self._spec.norms == "pre":
            self._emit(cpu_abi.LINEAR, linear=linear, epilogue=cpu_abi.RESIDUAL)
        else:
            self._emit(cpu_abi.LINEAR, linear=linear, epilogue=cpu_abi.TO_BRANCH)
            self._emit(cpu_abi.ADD_NORMED, vector=self._vector(norm))

    def _linear(self, rows: int, cols: int, *parts: tuple[str, int]) -> int:
        """Of tensors (name, first channel), each held in its own format."""
        formats = [self._format_of(name) for name, _ in parts]
        linear = int(self._lib.kvl_add_linear(self._model, rows, cols, formats[0]))
        for (_, first), before, own in zip(parts[1:], formats, formats[1:], strict=False):
            if own != before:
                self._lib.kvl_set_format(self._model, linear, first, own)
        self._fills += [(linear, name, first, -1) for name, first in parts]
        return linear

    def _format_of(self, name: str) -> int:
        """In which the kernels hold a matrix."""
        if self._weight_format == STORED:
            return _FORMS[self._weights.form(name) or UNQUANTISED_FORM]
        if self._weight_format == "w4a8" and name in ("embed", "head"):
            return cpu_abi.INT8
        return WEIGHT_FORMATS[self._weight_format]

    def _measure(self) -> list[int]:
        """Bytes of each arena, of what is declared by now."""
        return [self._lib.kvl_arena_bytes(self._model, thread) for thread in range(self._num_threads)]

    def _vector(self, *names: str) -> int:
        values = np.concatenate([self._weights.tensor(name).float32() for name in names])
        return int(self._lib.kvl_add_vector(self._model, values.ctypes.data, len(values)))

    def _emit(self, kind: int, **fields: int) -> None:
        """One more instruction; of `fields`, linear and vectors that are not given are none, others 0."""
        self.program.append(Instruction(kind, **(_NO_OPERANDS | fields)))

    def _fill(self, fill: tuple[int, str, int, int]) -> str:
        """One tensor, in a thread of its own: decoding and packing let other threads run. Returns its name."""
        linear, name, first, interleave = fill
        raw = self._weights.tensor(name)
        if _FORMS.get(raw.form) == self._format_of(name):
            for at, part in raw.number_pieces():
                own = [np.ascontiguousarray(array) for array in (part.values, part.scales)]
                lowest = None if part.minimums is None else np.ascontiguousarray(part.minimums)
                at_lowest = None if lowest is None else lowest.ctypes.data
                numbers = FileNumbers(*(array.ctypes.data for array in own), at_lowest, part.run)
                count, channel = len(part.values), first + at
                self._lib.kvl_fill_numbers(self._model, linear, ctypes.byref(numbers), count, channel, interleave)
            return name
        for at, values in raw.float32_pieces():
            if name == "embed" and self.embed.size:  # the head of a model that ties them: read once for both
                self._embed_rows(at, values)
            self._lib.kvl_fill_f32(self._model, linear, values.ctypes.data, len(values), first + at, interleave)
        return name

    def _embed_rows(self, first: int, values: Floats) -> None:
        rows = self.embed[first : first + len(values)]
        self._lib.kvl_round_bf16(values.ctypes.data, values.size, rows.ctypes.data)
