"""The CPU backend: one native call computes a whole ragged step (kernels/cpu). A model is translated into a short
program.
"""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvloom.checkpoints.families.mixers import DeltaRule, KimiDelta, LatentAttention, Mamba2, Recurrent, Rope, ShortConv
from kvloom.checkpoints.families.spec import DecoderSpec
from kvloom.checkpoints.lora import FIELD, AdapterFile
from kvloom.checkpoints.lora_tensors import pairs_of
from kvloom.checkpoints.source import WeightSource
from kvloom.contract.config import MAX_BATCH
from kvloom.contract.errors import BadRequest, ModelError, OutOfMemory
from kvloom.contract.messages import Progress
from kvloom.rank.kernels import build, cpu_abi
from kvloom.rank.kernels.backend import Choices, Floats, Head, Ints, Ragged
from kvloom.rank.kernels.cpu_abi import Batch, DrawRules, Instruction, Shape
from kvloom.rank.kernels.cpu_cache import BlockShape, layers_of, lazy_zeros
from kvloom.rank.kernels.file_table import layer_table
from kvloom.rank.kernels.packed import Packed
from kvloom.rank.kernels.packer import Packer, widest_mlp
from kvloom.rank.kernels.program import WEIGHT_FORMATS, Lent, Native
from kvloom.rank.kernels.rope_table import rope_table

KV_FORMATS = {"bf16": cpu_abi.KV_BF16, "int8": cpu_abi.KV_INT8}
_UNITS = {build.TILES: cpu_abi.TILES, build.PAIRS: cpu_abi.PAIRS}
BLOCK_SIZE = 16
_MAX_HEAD_DIM = 576  # cpu/attention/attention.hpp
# version of the order in which attention, bf16 linears and adapters add: another order gives other keys and values
_SUMS = "s5"


@dataclass(frozen=True, slots=True)
class CpuOptions:
    """How the kernels store and compute a model."""

    weight_format: str = "w8a8"
    kv_dtype: str = "bf16"
    num_threads: int | None = None  # None = one for each core that this process may use
    isa: str | None = None  # a key of build.ISAS; None = the best that this machine has
    packed: Packed | None = None  # keeps packed weights between starts; None = pack at every start
    block_size: int = BLOCK_SIZE  # tokens a block of the KV cache; a multiple of this
    num_states: int = MAX_BATCH  # sequences that may have a state at once, if layers keep one
    num_window_blocks: int = 0  # of Backend
    lent: Lent | None = None  # the embeddings and the head that a head that guesses shares
    keys_of: "CpuBackend | None" = None  # whose keys and values an assistant's layers read


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of a library call for a step, from which the next one may go on."""

    batch: Batch
    head: Head
    layer_rows: Floats  # what layers or a head that guesses get with the tokens; empty if they get nothing
    held: object  # keeps alive the arrays that `batch` points into
    blocks: Ints  # [seqs, blocks of a sequence]
    windows: Ints  # the same of a window's blocks, if there are some


class CpuBackend:
    """Runs models with weights packed for the vector unit; a sequence's logits never depend on the rest of a step.

    `weight_format`: "w8a8" (groups of 64); "bf16"; "w4a8" (groups of 32), which keeps tensors that the file has in 4
    bits and packs all other tensors of the layers to 4 bits and the head to 8; or "stored": every quantised tensor in
    the form that holds the file's values exactly, all others in 8 bits. Activations of all but bf16 are quantised by
    token and group, or by token where the file says so. `kv_dtype`: "bf16", or "int8" with a scale for each token and
    head, which halves the cache. `kv` [blocks, bytes]: of a block [layers][k|v][tiles of BLOCK_SIZE tokens][kv_heads].
    Bytes inside a tile are permuted (`kv_layout`).

    Raises ModelError for shapes that the kernels do not support, or without compiler and library.
    """

    name = "cpu"

    def __init__(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        num_blocks: int,
        options: CpuOptions | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Loads tensor by tensor: peak memory is packed weights plus one tensor. progress(done_bytes, total_bytes)."""
        options = options or CpuOptions()
        weight_format, kv_dtype = options.weight_format, options.kv_dtype
        _check(spec, kv_dtype)
        if weight_format not in WEIGHT_FORMATS:
            raise ModelError(f"weight format {weight_format}: the CPU backend has {', '.join(WEIGHT_FORMATS)}")
        self.spec = self.whole_spec = spec
        self.num_blocks, self.block_size = num_blocks, options.block_size
        self.kv_dtype = kv_dtype
        library = build.library(options.isa)
        self._lib = cpu_abi.load(library)
        lent = self._lent = options.lent
        self.num_threads = lent.num_threads if lent else options.num_threads or len(os.sched_getaffinity(0))
        self.num_window_blocks = options.num_window_blocks
        self._block = BlockShape(spec, kv_dtype, self.block_size, self.num_window_blocks > 0)
        self._memory = options.keys_of or self  # has the keys and values that steps read
        self._model = self._lib.kvl_new(ctypes.byref(self._shape()))
        if not self._model:
            raise OutOfMemory(f"no memory, or no {self.num_threads} threads (ulimit -u, pids.max), for the CPU backend")
        self.isa = self._use(options.isa)
        self.kv_layout = f"cpu-{kv_dtype}-k2-v2-{_SUMS}-{weight_format}-{build.sums_of(self.isa)}"
        ropes = self._add_ropes(min(spec.max_seq_len, num_blocks * self.block_size))
        native = Native(self._lib, self._model, self.num_threads)
        packer = Packer(native, spec, (ropes, self._memory._block.at), weights, weight_format)
        packer.declare(lent)
        self._table = layer_table(spec, weights)
        layout = (weight_format, library.name, self.num_threads)
        pages = options.packed.find(layout, packer.num_bytes) if options.packed else None
        if pages is not None:
            packer.adopt(pages, progress)
        else:
            packer.fill(progress)
            if options.packed:
                options.packed.keep(packer.pieces(), self)
        self._position_of = packer.position_of
        self._adapters: dict[int, int] = {}  # id -> the library's number
        self.streamed_bytes, self.weight_bytes = packer.streamed_bytes, packer.num_bytes
        self._held, self.held_as = packer.held, packer.describe()
        table = lent.table if lent else packer.embed
        self.lends = Lent(self._model, self.num_threads, packer.head, packer.embed_linear, table, self)
        self._set_program(packer.program)
        self.kv = lazy_zeros((num_blocks, self._block.block_bytes[0]))
        self.window_kv = lazy_zeros((self.num_window_blocks, self._block.block_bytes[1]))
        self.kv_bytes = self.kv.nbytes + self.window_kv.nbytes
        self.num_states = options.num_states if spec.state_floats else 0
        self.state_bytes = spec.state_floats * np.float32().nbytes
        self.sequence_states = lazy_zeros((self.num_states, self.state_bytes))
        self._logits = np.empty((0, spec.vocab_size), np.float32)
        self._top_values, self._top_ids = np.empty((0, 0), np.float32), np.empty((0, 0), np.int32)
        self._call: _Call | None = None  # the last one

    def step(
        self, batch: Ragged, rows: Ints, tops: list[int], states: Ints | None = None, choices: Choices | None = None
    ) -> Head:
        """See kernels/backend.py. What Head holds is overwritten by the next step."""
        call = self._call = self._prepared(batch, rows, tops, states, choices)
        if len(batch.ids):
            self._lib.kvl_step(self._model, ctypes.byref(call.batch))
        return call.head

    def step_again(
        self, new_blocks: Sequence[tuple[int, int, int]], new_windows: Sequence[tuple[int, int, int]] = ()
    ) -> Ints:
        """See kernels/backend.py."""
        call = self._call
        assert call is not None, "there was no step to go on from"
        for row, index, block in new_blocks:
            call.blocks[row, index] = block
        for row, index, block in new_windows:
            call.windows[row, index] = block
        if self._table is not None:
            call.layer_rows[:] = self._table.rows(call.head.tokens)
        if self.spec.joins_states:
            call.layer_rows[:] = call.head.states
        self._lib.kvl_step_again(self._model, ctypes.byref(call.batch))
        return call.head.tokens

    def _set_program(self, program: Sequence[Instruction]) -> None:
        own = self.lends
        self._lib.kvl_set_embed(self._model, own.table.ctypes.data if own.table.size else None, own.embed)
        self._lib.kvl_set_program(self._model, (Instruction * len(program))(*program), len(program))

    def _prepared(
        self, batch: Ragged, rows: Ints, tops: list[int], states: Ints | None, choices: Choices | None
    ) -> _Call:
        ids, pos, qstart, blocks, adapters, types, places, windows, joined = batch
        windows = np.empty((0, 0), np.int32) if windows is None else np.ascontiguousarray(windows)
        assert not self.num_window_blocks or windows.shape == blocks.shape, "both tables have one shape"
        inputs = ids, pos, qstart, blocks
        states = np.empty(0, np.int32) if states is None else states
        num_full = tops.count(0)
        if num_full > len(self._logits):  # reused: fresh pages would cost more than writing them
            self._logits = np.empty((num_full, self.spec.vocab_size), np.float32)
        shape = (len(tops), max(tops, default=0))
        if shape != self._top_values.shape:
            self._top_values, self._top_ids = np.empty(shape, np.float32), np.empty(shape, np.int32)
        found = np.empty((len(states), self.spec.hidden), np.float32)
        tokens = np.full(0 if choices is None else len(tops), -1, np.int32)
        head = Head(tops, self._logits[:num_full], self._top_values, self._top_ids, found, tokens)
        own = (ctypes.c_int32 * len(adapters))(*(self._adapters[id] if id else -1 for id in adapters))
        wanted = (ctypes.c_int32 * len(tops))(*tops)
        held = [np.ascontiguousarray(array) for array in (*inputs, rows, states)]
        assert all(array.dtype == np.int32 for array in held), "the inputs of a step are int32"
        layer_rows = np.empty(0, np.float32) if self._table is None else self._table.rows(ids)
        if self.spec.joins_states or self.spec.assists:
            assert joined is not None, "each token comes with a state"
            layer_rows = np.ascontiguousarray(joined, np.float32)
        step = Batch(
            self._memory.kv.ctypes.data,
            *(array.ctypes.data for array in held[:-1]),
            len(batch.ids),
            len(batch.qstart) - 1,
            blocks.shape[1],
            len(rows),
            ctypes.addressof(wanted),
            shape[1],
            head.full.ctypes.data,
            head.values.ctypes.data,
            head.ids.ctypes.data,
            held[-1].ctypes.data,
            len(states),
            head.states.ctypes.data,
            ctypes.addressof(own) if adapters else None,
            None if types is None else types.ctypes.data,
            None if choices is None else choices.ctypes.data,
            tokens.ctypes.data,
            self.sequence_states.ctypes.data,
            self.spec.state_floats,
            None if places is None else places.ctypes.data,
            layer_rows.ctypes.data,
            self._memory.window_kv.ctypes.data if self.num_window_blocks else None,
            windows.ctypes.data,
        )
        return _Call(step, head, layer_rows, (own, wanted, held, types, choices, places), held[3], windows)

    def add_adapter(self, id: int, adapter: AdapterFile) -> int:
        """See kernels/backend.py. Its weights are held in 8 bits, or as bf16 where the model's linears are."""
        own, total = None, 0
        try:
            own = self._lib.kvl_adapter_new(self._model)
            for name, pair in pairs_of(adapter, self.spec):
                linear, first, interleave = self._position_of[name]
                a, b, (count, rank) = pair.a.ctypes.data, pair.b.ctypes.data, pair.b.shape
                total += self._lib.kvl_adapter_add(
                    self._model, own, linear, a, b, rank, count, pair.scale, first, interleave
                )
        except (BadRequest, MemoryError) as error:
            if own is not None:
                self._lib.kvl_adapter_free(self._model, own)
            if isinstance(error, MemoryError):
                raise BadRequest(FIELD, "no memory for the adapter") from None
            raise
        self._adapters[id] = own
        return total

    def drop_adapter(self, id: int) -> None:
        """See kernels/backend.py."""
        own = self._adapters.pop(id, None)
        if own is not None:
            self._lib.kvl_adapter_free(self._model, own)

    def draw(self, logits: Floats, temperature: float, top_p: float, min_p: float, point: float) -> int:
        """See kernels/backend.py."""
        rules = DrawRules(temperature, top_p, min_p, point)
        row = np.ascontiguousarray(logits)
        return int(self._lib.kvl_draw(row.ctypes.data, len(row), ctypes.byref(rules)))

    @property
    def kv_parts(self) -> tuple[Any, ...]:
        """See kernels/backend.py."""
        return (self.kv,)

    @property
    def kv_layers(self) -> list[list[Any]]:
        """See kernels/backend.py."""
        return layers_of(self.kv, self._block.at, of_windows=False)

    @property
    def window_parts(self) -> tuple[Any, ...]:
        """See kernels/backend.py."""
        return (self.window_kv,) if self.num_window_blocks else ()

    @property
    def window_layers(self) -> list[list[Any]]:
        """See kernels/backend.py."""
        return layers_of(self.window_kv, self._block.at, of_windows=True)

    def copy(self, target: Any, source: Any) -> None:
        """See kernels/backend.py."""
        np.copyto(target, source)

    def probe_bandwidth(self, num_bytes: int = 512 << 20, repeats: int = 3) -> float:
        """Bytes a second that this backend's threads read from memory at this moment: the upper bound for a
        benchmark.
        """
        return float(self._lib.kvl_probe_bandwidth(self._model, num_bytes, repeats))

    def __del__(self) -> None:
        if getattr(self, "_model", None):
            self._lib.kvl_free(self._model)

    def _shape(self) -> Shape:
        s = self.spec
        return Shape(
            s.hidden, widest_mlp(s), s.vocab_size, self.num_threads, KV_FORMATS[self.kv_dtype],
            self.block_size // BLOCK_SIZE, self._memory._block.block_bytes[0],
            s.norm_eps, s.embed_scale, s.residual_scale, s.logit_scale,
            s.attention_scale, s.attention_softcap, s.logit_softcap, s.glu_limit, s.glu_alpha,
            s.query_growth, s.growth_unit, s.sees_ahead, self._memory._block.block_bytes[1],
        )  # fmt: skip

    def _use(self, asked: str | None) -> str:
        """The instruction set asked for, or the best that the processor has and the system allows.

        Raises ModelError when the one asked for cannot be used.
        """
        isa = asked or build.best_isa(build.cpu_flags())
        if isa not in _UNITS or self._lib.kvl_use(self._model, _UNITS[isa]):
            return isa
        if asked:
            raise ModelError(f"instruction set {asked}: the system does not let this process use the tile unit")
        return str(self._lib.kvl_isa().decode())

    def _add_ropes(self, positions: int) -> dict[Rope, int]:
        """Register the rotary tables. Returns their numbers in the library by layer; they live as long as the model."""
        first = 1 if self.spec.assists else 0
        self._tables = {rope: rope_table(rope, positions, first) for rope in self.spec.ropes}
        return {
            rope: int(self._lib.kvl_add_rope(self._model, table.ctypes.data, rope.dim))
            for rope, table in self._tables.items()
        }


def check_kernels(spec: DecoderSpec, kv_dtype: str) -> None:
    """Raises ModelError that names what the kernels do not support, or why they are not available at all."""
    _check(spec, kv_dtype)
    cpu_abi.load(Path(build.library(None)))


def _check(spec: DecoderSpec, kv_dtype: str) -> None:
    """Raises ModelError that names what the kernels do not support."""
    if kv_dtype not in KV_FORMATS:
        raise ModelError(f"KV cache type {kv_dtype}: the CPU backend has {', '.join(KV_FORMATS)}")
    for _, mixer in spec.recurrent:
        what, *sizes = _sizes(mixer)
        if any(size % 16 for size in sizes):
            told = " and ".join(map(str, sizes))
            raise ModelError(f"{what} {told}: the CPU backend has multiples of 16")
    for size in {mixer.size for _, mixer in spec.recurrent if isinstance(mixer, KimiDelta)}:
        if size % 32:
            raise ModelError(f"a delta rule of {size} channels: the CPU backend has multiples of 32")
    latents = [mixer for _, mixer in spec.attention if isinstance(mixer, LatentAttention)]
    for rank in {mixer.q_rank for mixer in latents if mixer.q_rank}:
        if rank % 32:
            raise ModelError(f"latents of queries of {rank} numbers: the CPU backend has multiples of 32")
    dims = {dim for _, mixer in spec.attention for dim in (mixer.head_dim, mixer.value_dim)}
    for dim in dims | {mixer.out_dim for mixer in latents}:
        if dim % 32 or dim > _MAX_HEAD_DIM:
            raise ModelError(f"head size {dim}: the CPU backend has multiples of 32 up to {_MAX_HEAD_DIM}")
    for rope in spec.ropes:
        if rope.dim % 32:
            raise ModelError(f"rotary embedding of {rope.dim} dimensions: the CPU backend has multiples of 32")


def _sizes(mixer: Recurrent) -> tuple[str, *tuple[int, ...]]:
    """What of a mixer is computed in whole vectors, and its sizes."""
    match mixer:
        case ShortConv():
            return "channels of a convolution:", mixer.size
        case DeltaRule():
            return "heads of a delta rule of sizes", mixer.k_dim, mixer.v_dim
        case KimiDelta():
            return "heads of a delta rule of size", mixer.head_dim
        case Mamba2():
            return "heads of Mamba-2 of sizes", mixer.head_dim, mixer.state_dim
