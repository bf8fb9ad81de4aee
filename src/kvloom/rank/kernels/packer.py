"""A checkpoint as the CPU kernels want it: weights in panels, and the layer program that runs them."""

import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvloom.checkpoints.families.spec import DecoderSpec
from kvloom.checkpoints.source import WeightSource
from kvloom.contract.errors import ModelError
from kvloom.contract.messages import Progress
from kvloom.rank.kernels import cpu_abi
from kvloom.rank.kernels.backend import Floats
from kvloom.rank.kernels.cpu_abi import Instruction

WEIGHT_FORMATS = {"w8a8": cpu_abi.INT8, "w4a8": cpu_abi.INT4, "bf16": cpu_abi.BF16}
_NO_OPERANDS = {"linear": cpu_abi.NONE, "vector": cpu_abi.NONE, "vector2": cpu_abi.NONE}
PANEL_HALF = 16  # gate and up rows that share a panel (cpu/layout.hpp)


@dataclass(frozen=True, slots=True)
class Native:
    """The library, a model of its, and the number of that model's threads."""

    library: ctypes.CDLL
    model: int
    num_threads: int


class Packer:
    """Turns a checkpoint into declared, then filled linears, and the layer program that runs them."""

    def __init__(self, native: Native, spec: DecoderSpec, weights: WeightSource, weight_format: str) -> None:
        self._lib, self._model, self._num_threads = native.library, native.model, native.num_threads
        self._spec, self._weights, self._format = spec, weights, WEIGHT_FORMATS[weight_format]
        self._fills: list[tuple[int, str, int, int]] = []  # linear, tensor, first channel, interleave
        self.program: list[Instruction] = []
        self._arenas: list[int] = []  # bytes of each
        self.packed_bytes = 0  # of the linears
        self.num_bytes = 0  # and with the embedding
        self.held: np.ndarray[Any, Any] | None = None  # memory of others that the weights lie in
        self.embed = np.empty((0, 0), np.uint16)  # bfloat16

    @property
    def position_of(self) -> dict[str, tuple[int, int, int]]:
        """Where each matrix went: linear, first channel, interleave."""
        return {name: (linear, first, interleave) for linear, name, first, interleave in self._fills}

    def declare(self) -> None:
        """Every linear in the order of execution, every small vector, and the program."""
        spec = self._spec
        for layer in range(spec.num_layers):
            self._declare_attention(layer, f"layers.{layer}.")
            self._declare_mlp(f"layers.{layer}.")
        head_format = cpu_abi.BF16 if self._format == cpu_abi.BF16 else cpu_abi.INT8
        head = self._linear(spec.vocab_size, spec.hidden, head_format)
        self._fills.append((head, "embed" if spec.tie_embeddings else "head", 0, -1))
        self._emit(cpu_abi.ROWS_NORM_QUANT, linear=head, vector=self._vector("norm"))
        self._emit(cpu_abi.LINEAR, linear=head, epilogue=cpu_abi.LOGITS)
        self._arenas = [self._lib.kvl_arena_bytes(self._model, thread) for thread in range(self._num_threads)]
        self.packed_bytes = sum(self._arenas)
        self.num_bytes = self.packed_bytes + 2 * spec.vocab_size * spec.hidden

    def adopt(self, pages: mmap.mmap, progress: Progress | None) -> None:
        """In place of `fill`: what `pieces` of an equal model gave, one behind the other."""
        self.held = np.frombuffer(pages, np.uint8)
        self._lib.kvl_adopt(self._model, self.held.ctypes.data)
        self.embed = self.held[self.packed_bytes :].view(np.uint16).reshape(self._spec.tensor_shapes()["embed"])
        first = -(-self.packed_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if first < len(pages) and hasattr(mmap, "MADV_DONTNEED"):  # a step reads the rows of its tokens, no others
            pages.madvise(mmap.MADV_DONTNEED, first, len(pages) - first)
        if progress:
            progress(self.packed_bytes, self.packed_bytes)

    def pieces(self) -> list[memoryview]:
        """What `fill` made, as long as the model lives: an arena a thread, then the embedding."""
        ranges = [(self._lib.kvl_arena(self._model, thread), size) for thread, size in enumerate(self._arenas)]
        ranges.append((self.embed.ctypes.data, self.embed.nbytes))
        return [memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B") for address, size in ranges]

    def fill(self, progress: Progress | None) -> None:
        """Reads each tensor once, piece by piece, packs it and forgets it; several tensors at a time."""
        if self._lib.kvl_allocate(self._model) < 0:
            raise ModelError("no memory for the packed weights")
        spec = self._spec
        shapes = spec.tensor_shapes()
        self.embed = np.empty(shapes["embed"], np.uint16)
        if not spec.tie_embeddings:
            for at, values in self._weights.tensor("embed").float32_pieces():
                self._embed_rows(at, values)
        total, done = sum(int(np.prod(shapes[name])) for _, name, _, _ in self._fills), 0
        with ThreadPoolExecutor(self._num_threads) as threads:
            for name in threads.map(self._fill, self._fills):
                done += int(np.prod(shapes[name]))
                if progress:
                    progress(self.packed_bytes * done // total, self.packed_bytes)

    def _declare_attention(self, layer: int, at: str) -> None:
        spec = self._spec
        q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        qkv = self._linear(q_rows + 2 * kv_rows, spec.hidden)
        for part, first in (("q", 0), ("k", q_rows), ("v", q_rows + kv_rows)):
            self._fills.append((qkv, at + part, first, -1))
        out = self._linear(spec.hidden, q_rows)
        self._fills.append((out, at + "o", 0, -1))
        bias = self._vector(*(f"{at}{part}_bias" for part in "qkv")) if spec.qkv_bias else cpu_abi.NONE
        norms = {}
        if spec.qk_norm:
            norms = {"vector": self._vector(at + "q_norm"), "vector2": self._vector(at + "k_norm")}
        self._emit(cpu_abi.NORM_QUANT, linear=qkv, vector=self._vector(at + "attn_norm"))
        self._emit(cpu_abi.LINEAR, linear=qkv, epilogue=cpu_abi.TO_QKV, vector=bias)
        self._emit(cpu_abi.ROPE_KV, layer=layer, **norms)
        self._emit(cpu_abi.ATTENTION, layer=layer)
        self._emit(cpu_abi.QUANT, linear=out, source=cpu_abi.FROM_ATTENTION)
        self._emit(cpu_abi.LINEAR, linear=out, epilogue=cpu_abi.RESIDUAL)

    def _declare_mlp(self, at: str) -> None:
        spec = self._spec
        pairs = -(-spec.intermediate // PANEL_HALF) * PANEL_HALF
        gate_up = self._linear(2 * pairs, spec.hidden)
        self._fills += [(gate_up, at + "gate", 0, 0), (gate_up, at + "up", 0, 1)]
        down = self._linear(spec.hidden, spec.intermediate)
        self._fills.append((down, at + "down", 0, -1))
        activation = cpu_abi.SWIGLU if spec.activation == "silu" else cpu_abi.GEGLU
        self._emit(cpu_abi.NORM_QUANT, linear=gate_up, vector=self._vector(at + "mlp_norm"))
        self._emit(cpu_abi.LINEAR, linear=gate_up, epilogue=activation)
        self._emit(cpu_abi.QUANT, linear=down, source=cpu_abi.FROM_MLP)
        self._emit(cpu_abi.LINEAR, linear=down, epilogue=cpu_abi.RESIDUAL)

    def _linear(self, rows: int, cols: int, weight_format: int | None = None) -> int:
        weight_format = self._format if weight_format is None else weight_format
        return int(self._lib.kvl_add_linear(self._model, rows, cols, weight_format))

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
        if self._format == cpu_abi.INT4 and raw.kind in ("q4_0", "q4_1") and raw.name != "head":
            blocks = np.ascontiguousarray(raw.data)
            has_min = int(raw.kind == "q4_1")
            self._lib.kvl_fill_q4(self._model, linear, blocks.ctypes.data, raw.shape[0], first, interleave, has_min)
        else:
            for at, values in raw.float32_pieces():
                if raw.name == "embed":  # the head of a model that ties them: read once for both
                    self._embed_rows(at, values)
                self._lib.kvl_fill_f32(self._model, linear, values.ctypes.data, len(values), first + at, interleave)
        return name

    def _embed_rows(self, first: int, values: Floats) -> None:
        rows = self.embed[first : first + len(values)]
        self._lib.kvl_round_bf16(values.ctypes.data, values.size, rows.ctypes.data)
