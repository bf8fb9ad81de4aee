"""ModelRunner: batches to tensors, tensors to logits, logits to tokens. Lives in a rank process."""

import logging
import math
import os
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvloom.engine.batch import (
    AdapterInfo,
    Batch,
    Logprob,
    Pooled,
    PromptLogprobs,
    RankInfo,
    Sample,
    StepOutput,
    Work,
)
from kvloom.engine.config import EngineConfig
from kvloom.engine.errors import ModelError, OutOfMemory
from kvloom.engine.guide import Guides
from kvloom.engine.kernels.backend import Backend, Head, Ragged
from kvloom.engine.kernels.cpu import CpuBackend, kv_token_bytes
from kvloom.engine.kernels.reference import ReferenceBackend
from kvloom.engine.kvtier import KvMemory
from kvloom.engine.lora import read_adapter
from kvloom.engine.machine import available_bytes, check_device, device_bytes, says_what_to_lower
from kvloom.engine.memory import CacheShape, Machine, Pools, Wish, plan_pools
from kvloom.engine.mesh import Mesh, join
from kvloom.engine.models.spec import DecoderSpec
from kvloom.engine.pooler import Pooler
from kvloom.engine.sampler import History, describe, num_candidates, sample, sample_top
from kvloom.engine.shard import shard_spec
from kvloom.engine.swapcache import SwapCache
from kvloom.engine.tokenizer import load_tokenizer
from kvloom.engine.weights.checkpoint import Checkpoint, open_checkpoint
from kvloom.engine.weights.fingerprint import fingerprint

log = logging.getLogger(__name__)

_BLOCK_SIZE = 16  # tokens a KV block on CPU and CUDA
_WEIGHT_BYTES = {"w8a8": 1 + 2 / 64, "w4a8": 0.5 + 4 / 32, "bf16": 2.0}  # of a packed weight, scales included
_REFERENCE_KV = {"bf16": torch.bfloat16, "int8": torch.int8}


@dataclass(slots=True)
class _State:
    history: History
    adapter: int = 0
    blocks: list[int] = field(default_factory=list)
    pooler: Pooler | None = None


@dataclass(frozen=True, slots=True)
class _Rows:
    """Which tokens' logits a step needs: `samples` first, then each chunk of prompt log-probabilities."""

    rows: list[int]
    samples: list[tuple[int, list[int]]]  # sequence id, draft: a row for the last known token and each of the draft
    chunks: list[tuple[int, int, list[int]]]  # sequence id, start, the tokens whose log-probability is wanted
    states: list[int]  # tokens whose states are pooled, sequence by sequence
    pooled: list[tuple[int, int, int]]  # sequence id, start, how many of them


class ModelRunner:
    """Implements batch.Runner over a Backend."""

    def __init__(
        self,
        backend: Backend,
        vocab_size: int,
        max_seq_len: int,
        eos_ids: Sequence[int],
        num_host_blocks: int = 0,
        block_size: int | None = None,
        guides: Guides | None = None,
        hidden_size: int = 0,
        pooling: str = "last",
    ) -> None:
        """`block_size`: tokens, a multiple of the backend's; so many of its blocks are one of the engine's.

        Raises ModelError when there is no memory for the host's blocks.
        """
        self._tiles = (block_size or backend.block_size) // backend.block_size
        self._swap = SwapCache(backend.kv_parts, self._tiles, num_host_blocks)
        self.info = RankInfo(
            num_blocks=backend.num_blocks // self._tiles,
            block_size=backend.block_size * self._tiles,
            vocab_size=vocab_size,
            max_seq_len=max_seq_len,
            backend=backend.name,
            kv_bytes=backend.kv_bytes,
            weight_bytes=backend.weight_bytes,
            num_host_blocks=num_host_blocks,
            swap_block_s=self._swap.measure(),
            hidden_size=hidden_size,
            pooling=pooling,
        )
        self._backend = backend
        self._eos_ids = [id for id in eos_ids if id < vocab_size]
        self._states: dict[int, _State] = {}
        self._guides = guides

    @property
    def kv_layers(self) -> list[list[torch.Tensor]]:
        """See batch.Runner. As bytes, so that every element type and layout of a backend travels alike."""
        backend, sizes = self._backend, (self._backend.num_blocks, self._backend.block_size, -1)
        return [
            [side.view(*sizes).view(torch.uint8) for part in backend.kv_parts for side in part[layer]]
            for layer in range(len(backend.kv_parts[0]))
        ]

    def kv_memory(self, model: str) -> KvMemory:
        """See kvtier.KvRunner."""
        backend = self._backend
        dtypes = "-".join(str(part.dtype) for part in backend.kv_parts)
        return KvMemory(self.kv_layers, fingerprint(Path(model)), f"{backend.kv_layout}-{dtypes}")

    def run(self, batch: Batch) -> StepOutput:
        started = time.perf_counter()
        for id in batch.drop:
            self._states.pop(id, None)
        for new in batch.new:
            history = History(list(new.token_ids), len(new.token_ids), new.params, new.seed)
            if new.params.grammar or new.params.reasoning_end:
                assert self._guides is not None, "a grammar, and no tokenizer to read it with"
                history.guide = self._guides.guide(new.params)
            pooler = Pooler(new.pooling, len(new.token_ids)) if new.pooling else None
            self._states[new.id] = _State(history, new.adapter, pooler=pooler)
        output = StepOutput([], [], 0.0)
        self._swap.save(batch.swap_out)
        self._swap.load([pair for work in batch.work for pair in work.loads])
        if batch.work:
            self._compute(batch.work, output)
        output.compute_s = time.perf_counter() - started
        return output

    def rest(self) -> None:
        """See batch.Runner."""
        if self._guides is not None:
            self._guides.rest()

    def load_adapter(self, id: int, path: str) -> AdapterInfo:
        """Raises BadRequest."""
        adapter = read_adapter(Path(path), self._backend.whole_spec.tensor_shapes())
        return AdapterInfo(adapter.digest, adapter.rank, self._backend.add_adapter(id, adapter))

    def unload_adapter(self, id: int) -> None:
        self._backend.drop_adapter(id)

    def _compute(self, works: Sequence[Work], output: StepOutput) -> None:
        for work in works:
            self._states[work.id].blocks[work.first_block :] = work.blocks
        wanted = self._rows(works)
        tops = [self._num_candidates(id, place) for id, draft in wanted.samples for place in range(len(draft) + 1)]
        start = tops.count(0)
        tops += [0] * (len(wanted.rows) - len(tops))
        rows, states = _int32(wanted.rows), _int32(wanted.states)
        head = self._backend.step_head(self._inputs(works), rows, tops, states)
        self._pool(head, wanted.pooled, output)
        row = 0
        for id, draft in wanted.samples:
            self._sample(head, row, id, draft, output)
            row += len(draft) + 1
        for id, first, following in wanted.chunks:
            num_top = self._states[id].history.params.prompt_logprobs or 0
            logprobs = torch.log_softmax(head.full[start : start + len(following)], dim=-1)
            values = [describe(logprobs[i], token_id, num_top) for i, token_id in enumerate(following)]
            output.prompt_logprobs.append(PromptLogprobs(id, first, values))
            start += len(following)

    def _pool(self, head: Head, chunks: Sequence[tuple[int, int, int]], output: StepOutput) -> None:
        """Add the states of each chunk to what its sequence has; report those that are whole."""
        first = 0
        for id, start, count in chunks:
            pooler = self._states[id].pooler
            assert pooler is not None
            data = pooler.add(start, head.states[first : first + count])
            if data is not None:
                output.pooled.append(Pooled(id, data))
            first += count

    def _num_candidates(self, id: int, num_more: int) -> int:
        return min(num_candidates(self._states[id].history, len(self._eos_ids), num_more), self.info.vocab_size)

    def _sample(self, head: Head, row: int, id: int, draft: Sequence[int], output: StepOutput) -> None:
        """The next token, from row `row`; and, while the draft foretold it, the one after, from the next row."""
        history = self._states[id].history
        for guess in (*draft, None):
            token_id, logprob = self._choose(head, row, history)
            history.append(token_id)
            output.samples.append(Sample(id, token_id, logprob))
            if token_id != guess:
                return
            row += 1

    def _choose(self, head: Head, row: int, history: History) -> tuple[int, Logprob | None]:
        """The token after row `row`, of its candidates or of all its logits."""
        top = head.tops[row]
        if top == 1:  # nothing is left to choose
            return int(head.ids[row, 0]), None
        if top:
            return sample_top(
                head.values[row, :top], head.ids[row, :top], history, self._eos_ids, self._backend.draw
            ), None
        place = head.tops[:row].count(0)
        return sample(head.full[place : place + 1], [history], self._eos_ids, self._backend.draw)[0]

    def _inputs(self, works: Sequence[Work]) -> Ragged:
        ids: list[int] = []
        pos: list[int] = []
        qstart = [0]
        for work in works:
            end = work.start + work.num_tokens
            known = self._states[work.id].history.token_ids
            ids += (known + work.draft if work.draft else known)[work.start : end]
            pos += range(work.start, end)
            qstart.append(len(ids))
        tables = [self._table(self._states[work.id].blocks) for work in works]
        width = max(len(table) for table in tables)
        padded = [table + [-1] * (width - len(table)) for table in tables]
        table = _int32([id for row in padded for id in row]).view(-1, width)
        used = [self._states[work.id].adapter for work in works]
        return Ragged(_int32(ids), _int32(pos), _int32(qstart), table, used if any(used) else ())

    def _table(self, blocks: list[int]) -> list[int]:
        """The backend's blocks of the engine's."""
        if self._tiles == 1:
            return blocks
        return [block * self._tiles + i for block in blocks for i in range(self._tiles)]

    def _rows(self, works: Sequence[Work]) -> _Rows:
        wanted = _Rows([], [], [], [], [])
        prompt_rows: list[int] = []
        first_row = 0
        for work in works:
            history = self._states[work.id].history
            end = work.start + work.num_tokens
            pooler = self._states[work.id].pooler
            if pooler is not None:
                kept = pooler.wanted(work.start, end)
                wanted.pooled.append((work.id, work.start, len(kept)))
                wanted.states.extend(first_row + position - work.start for position in kept)
            elif end - len(work.draft) == len(history.token_ids):
                wanted.samples.append((work.id, work.draft))
                end_row = first_row + work.num_tokens
                wanted.rows.extend(range(end_row - len(work.draft) - 1, end_row))
            if history.params.prompt_logprobs is not None and work.start < history.num_prompt:
                following = history.token_ids[work.start + 1 : min(end, history.num_prompt - 1) + 1]
                wanted.chunks.append((work.id, work.start, following))
                prompt_rows += range(first_row, first_row + len(following))
            first_row += work.num_tokens
        wanted.rows.extend(prompt_rows)
        return wanted


def _int32(values: list[int]) -> torch.Tensor:
    """As torch.tensor, several times quicker for the short lists of a step."""
    return torch.frombuffer(array("i", values), dtype=torch.int32) if values else torch.empty(0, dtype=torch.int32)


def open_runner(
    config: EngineConfig, eos_ids: list[int], progress: Callable[[int, int], None], rank: int = 0, rendezvous: str = ""
) -> ModelRunner:
    """Load the model of `config` into the backend it names; of several ranks, this one's part of it.

    Raises ServingError when that cannot be done.
    """
    check_device(config.device)
    checkpoint = open_checkpoint(Path(config.model))
    max_seq_len = min(checkpoint.spec.max_seq_len, config.max_seq_len or checkpoint.spec.max_seq_len)
    mesh = join(rank, config.world_size, rendezvous, config.device, config.step_timeout_s)
    with says_what_to_lower():
        backend, pools, size = _open_backend(config, checkpoint, max_seq_len, progress, mesh)
        return ModelRunner(
            backend,
            checkpoint.spec.vocab_size,
            max_seq_len,
            eos_ids,
            pools.num_host_blocks,
            block_size=size,
            guides=Guides(lambda: load_tokenizer(Path(config.model)), checkpoint.spec.vocab_size),
            hidden_size=checkpoint.spec.hidden,
            pooling=checkpoint.pooling,
        )


def _open_backend(
    config: EngineConfig, checkpoint: Checkpoint, max_seq_len: int, progress: Callable[[int, int], None], mesh: Mesh
) -> tuple[Backend, Pools, int]:
    """The named backend, its pools and the engine's block size, in tokens.

    "auto" is the CPU kernels, or the reference where they cannot be had (and a log line).
    """
    wants_kernels = config.backend == "cpu" or (config.backend == "auto" and _kernels_fit(config))
    if wants_kernels:
        try:
            opened = _open_kernels(config, checkpoint, max_seq_len, progress)
            torch.set_num_threads(1)  # sampling only: its pool would spin on the cores of the kernels' own
            return opened
        except ModelError as error:
            if config.backend == "cpu" or isinstance(error, OutOfMemory):
                raise
            log.warning("%s; the slower torch backend is used instead", error)
    return _open_reference(config, checkpoint, max_seq_len, progress, mesh)


def _open_kernels(
    config: EngineConfig, checkpoint: Checkpoint, max_seq_len: int, progress: Callable[[int, int], None]
) -> tuple[Backend, Pools, int]:
    spec, size = checkpoint.spec, config.block_size or _BLOCK_SIZE
    kv_dtype = "bf16" if config.kv_dtype == "auto" else config.kv_dtype
    if size % _BLOCK_SIZE:
        raise ModelError(f"block_size: the cpu backend has multiples of {_BLOCK_SIZE}, got {size}")
    weight_bytes = int(_num_weights(spec) * _WEIGHT_BYTES[_weight_format(config)]) + spec.vocab_size * spec.hidden * 2
    pools = _pools_for(config, spec, max_seq_len, size, kv_token_bytes(kv_dtype, spec.head_dim), weight_bytes)
    backend = CpuBackend(
        spec,
        checkpoint.weights,
        pools.num_blocks * (size // _BLOCK_SIZE),
        weight_format=_weight_format(config),
        kv_dtype=kv_dtype,
        progress=progress,
    )
    return backend, pools, size


def _open_reference(
    config: EngineConfig, checkpoint: Checkpoint, max_seq_len: int, progress: Callable[[int, int], None], mesh: Mesh
) -> tuple[Backend, Pools, int]:
    spec, size = checkpoint.spec, config.block_size or _BLOCK_SIZE
    shard_spec(spec, mesh.world_size)  # says what is wrong before anything is taken
    if mesh.world_size > 1:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // mesh.world_size))
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    kept = _REFERENCE_KV.get(config.kv_dtype, dtype)
    token_bytes = spec.head_dim * kept.itemsize + (4 if kept == torch.int8 else 0)
    pools = _pools_for(config, spec, max_seq_len, size, token_bytes, _num_weights(spec) * dtype.itemsize)
    pools = Pools(*(mesh.least(number, config.device) for number in (pools.num_blocks, pools.num_host_blocks)))
    backend = ReferenceBackend(
        spec,
        checkpoint.weights,
        pools.num_blocks,
        device=_device_of(config, mesh),
        dtype=dtype,
        block_size=size,
        progress=progress,
        kv_dtype=kept,
        mesh=mesh,
    )
    return backend, pools, size


def _device_of(config: EngineConfig, mesh: Mesh) -> str:
    """Each rank has a device of its own, unless there is only one kind, as with the CPU, or it is named."""
    is_own = mesh.world_size > 1 and config.device in ("cuda", "npu")
    return f"{config.device}:{mesh.rank}" if is_own else config.device


def _kernels_fit(config: EngineConfig) -> bool:
    return config.device == "cpu" and config.dtype != "float32" and config.world_size == 1


def _weight_format(config: EngineConfig) -> str:
    if config.weight_format != "auto":
        return config.weight_format
    return "bf16" if config.dtype == "bfloat16" else "w8a8"


def _num_weights(spec: DecoderSpec) -> int:
    return sum(math.prod(shape) for shape in spec.tensor_shapes().values())


def _pools_for(
    config: EngineConfig, spec: DecoderSpec, max_seq_len: int, block_size: int, head_bytes: int, weight_bytes: int
) -> Pools:
    """Sizes of both KV pools on the machine as it is; head_bytes as in CacheShape. Raises OutOfMemory."""
    wish = Wish(
        config.num_blocks,
        config.kv_cache_bytes,
        config.num_host_blocks,
        config.host_cache_bytes,
        max_seq_len,
        config.max_batch,
    )
    shape = CacheShape(spec.num_layers, spec.num_kv_heads, head_bytes, block_size, world_size=config.world_size)
    host_bytes = available_bytes() // config.world_size
    is_shared = torch.device(config.device).type == "cpu"
    free_bytes = host_bytes if is_shared else device_bytes(config.device)
    return plan_pools(wish, shape, Machine(free_bytes, host_bytes, is_shared), weight_bytes)
