"""ModelRunner: batches to tensors, tensors to logits, logits to tokens. Lives in a rank process."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvloom.engine.batch import Batch, PromptLogprobs, RankInfo, Sample, StepOutput, Work
from kvloom.engine.config import EngineConfig
from kvloom.engine.errors import ModelError
from kvloom.engine.kernels.backend import Backend
from kvloom.engine.kernels.cpu import CpuBackend
from kvloom.engine.kernels.reference import ReferenceBackend
from kvloom.engine.kvtier import KvMemory
from kvloom.engine.models.spec import DecoderSpec
from kvloom.engine.sampler import History, describe, sample
from kvloom.engine.weights.checkpoint import Checkpoint, open_checkpoint
from kvloom.engine.weights.fingerprint import fingerprint

log = logging.getLogger(__name__)

_BLOCK_SIZE = 16  # tokens a KV block on CPU and CUDA
_BF16_BYTES = 2


@dataclass(slots=True)
class _State:
    history: History
    blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Which tokens' logits a step needs: `samples` first, then each chunk of prompt log-probabilities."""

    rows: list[int]
    samples: list[int]  # sequence ids
    chunks: list[tuple[int, int, list[int]]]  # sequence id, start, the tokens whose log-probability is wanted


class ModelRunner:
    """Implements batch.Runner over a Backend."""

    def __init__(self, backend: Backend, vocab_size: int, max_seq_len: int, eos_ids: Sequence[int]) -> None:
        self.info = RankInfo(
            num_blocks=backend.num_blocks,
            block_size=backend.block_size,
            vocab_size=vocab_size,
            max_seq_len=max_seq_len,
            backend=backend.name,
            kv_bytes=backend.kv_bytes,
            weight_bytes=backend.weight_bytes,
        )
        self._backend = backend
        self._eos_ids = [id for id in eos_ids if id < vocab_size]
        self._states: dict[int, _State] = {}

    def kv_memory(self, model: str) -> KvMemory:
        return KvMemory(self._backend.kv_layers(), fingerprint(Path(model)), self._backend.kv_layout)

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        started = time.perf_counter()
        for id in batch.drop:
            self._states.pop(id, None)
        for new in batch.new:
            self._states[new.id] = _State(History(list(new.token_ids), len(new.token_ids), new.params, new.seed))
        output = StepOutput([], [], 0.0)
        if batch.work:
            self._compute(batch.work, output)
        output.compute_s = time.perf_counter() - started
        return output

    def _compute(self, works: Sequence[Work], output: StepOutput) -> None:
        for work in works:
            self._states[work.id].blocks[work.first_block :] = work.blocks
        wanted = self._rows(works)
        logits = self._backend.step(*self._inputs(works), torch.tensor(wanted.rows, dtype=torch.int32))
        histories = [self._states[id].history for id in wanted.samples]
        start = len(wanted.samples)
        for id, first, following in wanted.chunks:
            num_top = self._states[id].history.params.prompt_logprobs or 0
            logprobs = torch.log_softmax(logits[start : start + len(following)], dim=-1)
            values = [describe(logprobs[i], token_id, num_top) for i, token_id in enumerate(following)]
            output.prompt_logprobs.append(PromptLogprobs(id, first, values))
            start += len(following)
        chosen = sample(logits[: len(histories)], histories, self._eos_ids) if histories else []
        for id, history, (token_id, logprob) in zip(wanted.samples, histories, chosen, strict=True):
            history.append(token_id)
            output.samples.append(Sample(id, token_id, logprob))

    def _inputs(self, works: Sequence[Work]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """ids [T], pos [T], qstart [S+1], block_table [S, max_blocks] of the ragged batch, all int32."""
        ids: list[int] = []
        pos: list[int] = []
        qstart = [0]
        for work in works:
            end = work.start + work.num_tokens
            ids += self._states[work.id].history.token_ids[work.start : end]
            pos += range(work.start, end)
            qstart.append(len(ids))
        tables = [self._states[work.id].blocks for work in works]
        width = max(len(table) for table in tables)
        padded = [table + [-1] * (width - len(table)) for table in tables]
        ids_, pos_, qstart_, table_ = (torch.tensor(values, dtype=torch.int32) for values in (ids, pos, qstart, padded))
        return ids_, pos_, qstart_, table_

    def _rows(self, works: Sequence[Work]) -> _Rows:
        wanted = _Rows([], [], [])
        prompt_rows: list[int] = []
        first_row = 0
        for work in works:
            history = self._states[work.id].history
            end = work.start + work.num_tokens
            if end == len(history.token_ids):
                wanted.samples.append(work.id)
                wanted.rows.append(first_row + work.num_tokens - 1)
            if history.params.prompt_logprobs is not None and work.start < history.num_prompt:
                following = history.token_ids[work.start + 1 : min(end, history.num_prompt - 1) + 1]
                wanted.chunks.append((work.id, work.start, following))
                prompt_rows += range(first_row, first_row + len(following))
            first_row += work.num_tokens
        wanted.rows.extend(prompt_rows)
        return wanted


def open_runner(config: EngineConfig, eos_ids: list[int], progress: Callable[[int, int], None]) -> ModelRunner:
    """Load the model of `config` into the backend it names. Raises ServingError when that cannot be done."""
    checkpoint = open_checkpoint(Path(config.model))
    max_seq_len = min(checkpoint.spec.max_seq_len, config.max_seq_len or checkpoint.spec.max_seq_len)
    backend = _open_backend(config, checkpoint, max_seq_len, progress)
    return ModelRunner(backend, checkpoint.spec.vocab_size, max_seq_len, eos_ids)


def _open_backend(
    config: EngineConfig, checkpoint: Checkpoint, max_seq_len: int, progress: Callable[[int, int], None]
) -> Backend:
    """The named backend; "auto" is the CPU kernels, or the reference where they cannot be had (and a log line)."""
    wants_kernels = config.backend == "cpu" or (config.backend == "auto" and _kernels_fit(config))
    if wants_kernels:
        try:
            num_blocks = config.num_blocks or _num_blocks_for(config, checkpoint.spec, max_seq_len, _BF16_BYTES)
            backend = CpuBackend(
                checkpoint.spec, checkpoint.weights, num_blocks, weight_format=_weight_format(config), progress=progress
            )
            torch.set_num_threads(1)  # sampling only: its pool would spin on the cores of the kernels' own
            return backend
        except ModelError as error:
            if config.backend == "cpu":
                raise
            log.warning("%s; the slower torch backend is used instead", error)
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    num_blocks = config.num_blocks or _num_blocks_for(config, checkpoint.spec, max_seq_len, dtype.itemsize)
    return ReferenceBackend(
        checkpoint.spec,
        checkpoint.weights,
        num_blocks,
        device=config.device,
        dtype=dtype,
        block_size=_BLOCK_SIZE,
        progress=progress,
    )


def _kernels_fit(config: EngineConfig) -> bool:
    return config.device == "cpu" and config.dtype != "float32"


def _weight_format(config: EngineConfig) -> str:
    if config.weight_format != "auto":
        return config.weight_format
    return "bf16" if config.dtype == "bfloat16" else "w8a8"


def _num_blocks_for(config: EngineConfig, spec: DecoderSpec, max_seq_len: int, item_bytes: int) -> int:
    """Blocks that the KV budget holds, no more than max_batch sequences of full length need, no fewer than one needs.

    Without a budget: 2 GiB, or 40 % of the free memory where that is less. Raises ModelError when one sequence of
    max_seq_len does not fit into a budget that was given.
    """
    block_bytes = spec.num_layers * 2 * _BLOCK_SIZE * spec.num_kv_heads * spec.head_dim * item_bytes
    per_seq = -(-max_seq_len // _BLOCK_SIZE)
    budget = config.kv_cache_bytes or min(2 * 2**30, int(0.4 * available_bytes()))
    if config.kv_cache_bytes and budget < per_seq * block_bytes:
        raise ModelError(
            f"kv_cache_bytes: {budget} bytes hold {budget // block_bytes * _BLOCK_SIZE} tokens, fewer than max_seq_len "
            f"{max_seq_len}; lower max_seq_len or give at least {per_seq * block_bytes}"
        )
    return max(per_seq, min(budget // block_bytes, per_seq * config.max_batch))


def available_bytes() -> int:
    """Memory that can be taken without swapping (MemAvailable of /proc/meminfo)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
