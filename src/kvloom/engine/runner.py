"""ModelRunner: batches to tensors, tensors to logits, logits to tokens. Lives in a rank process."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kvloom.engine.batch import Batch, PromptLogprobs, RankInfo, Sample, StepOutput, Work
from kvloom.engine.kernels.backend import Backend
from kvloom.engine.sampler import History, describe, sample


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


Progress = Callable[[int, int], None]
