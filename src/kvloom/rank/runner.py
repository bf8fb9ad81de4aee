"""ModelRunner: batches to arrays, arrays to logits, logits to tokens. Lives in a rank process."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvloom.checkpoints.fingerprint import fingerprint
from kvloom.checkpoints.lora_gguf import open_adapter
from kvloom.checkpoints.lora_tensors import lora_shapes
from kvloom.contract.errors import ModelError
from kvloom.contract.messages import (
    AdapterInfo,
    Batch,
    Forced,
    GivenUp,
    Logprob,
    Pooled,
    PromptLogprobs,
    Sample,
    StepOutput,
    Work,
)
from kvloom.rank.drafter import Drafter
from kvloom.rank.facts import ModelFacts, info_of
from kvloom.rank.grammar.guides import Guides
from kvloom.rank.host_cache import SwapCache
from kvloom.rank.kernels.backend import Backend, Head, Ints, Ragged
from kvloom.rank.kv_blocks import KvBlocks, padded
from kvloom.rank.pages import release_blocks
from kvloom.rank.pooler import Pooler
from kvloom.rank.sampler import (
    Choice,
    History,
    choice_of,
    describe,
    log_softmax,
    num_candidates,
    sample,
    sample_top,
)
from kvloom.rank.steady import Decoding, Steady, choices_of
from kvloom.rank.tier.kvmemory import KvMemory
from kvloom.rank.tier.statememory import state_memory
from kvloom.rank.tier.windowmemory import window_memory


@dataclass(slots=True)
class _State:
    history: History
    adapter: int = 0
    adapter_from: int = 0  # of NewSeq
    blocks: list[int] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)  # as long as blocks, if layers with a window have their own
    pooler: Pooler | None = None
    second: int = 0  # of NewSeq
    place: int = -1  # of its state
    is_guessed: bool = False  # of NewSeq

    def adapter_at(self, position: int) -> int:
        """The adapter that acts on the token at `position`; 0 = none."""
        return self.adapter if position >= self.adapter_from else 0


@dataclass(frozen=True, slots=True)
class _Rows:
    """Tokens whose logits a step needs: `samples` first, then each chunk of prompt log-probabilities."""

    rows: list[int]
    # sequence id, draft: one row for the last known token and one for each drafted token
    samples: list[tuple[int, list[int]]]
    chunks: list[tuple[int, int, list[int]]]  # sequence id, start, tokens whose log-probabilities are wanted
    states: list[int]  # tokens whose states are pooled, sequence by sequence; then those that a drafter wants
    pooled: list[tuple[int, range, int]]  # sequence id, positions that were computed, number of them


class ModelRunner:
    """Implements contract.messages.Runner over a Backend."""

    def __init__(
        self,
        backend: Backend,
        facts: ModelFacts,
        num_host_blocks: int,
        guides: Guides,
        drafter: Drafter | None = None,
    ) -> None:
        """Raises ModelError when there is no memory for the host's blocks."""
        self._blocks, self._windows = KvBlocks(backend), KvBlocks(backend, of_windows=True)
        states = backend.sequence_states if backend.num_states else None
        self._swap = SwapCache(self._blocks.parts, num_host_blocks, backend.copy, self._windows.parts, states)
        self.info = info_of(backend, facts, self._swap, drafter)
        self._backend, self._drafter = backend, drafter
        self._wants_states = drafter is not None and drafter.wants_states
        self._eos_ids = [id for id in facts.eos_ids if 0 <= id < facts.vocab_size]  # files write -1 for none
        self._states: dict[int, _State] = {}
        self._guides = guides
        self._embedding = facts.embedding
        self._steady: Steady | None = None  # the batch of the last step, if it only decoded
        self._works: Sequence[Work] = []  # the last work that was written out
        self._num_again = 0  # steps since then, each sent as `again`

    @property
    def kv_layers(self) -> list[list[Any]]:
        """See contract.messages.Runner."""
        return self._blocks.layers

    @property
    def window_layers(self) -> list[list[Any]]:
        """See contract.messages.Runner."""
        return self._windows.layers

    def kv_memory(self, model: str) -> KvMemory:
        """See rank.tier.tier.KvRunner. Raises ModelError where states are not kept."""
        backend, blocks = self._backend, self._blocks
        if self.info.num_states and not self.info.num_snapshots:
            raise ModelError(f"{model}: its layers keep states, and snapshotShare has no room for those of prefixes")
        if self.info.num_states and not blocks.block_bytes:
            raise ModelError(f"{model}: no layer has keys and values, of which an outer KV tier is made")
        return KvMemory(
            blocks.layers,
            *(blocks.num_blocks, blocks.block_size, blocks.block_bytes),
            blocks.read,
            fingerprint(Path(model)),
            f"{backend.kv_layout}-t{backend.block_size}{'-windows-apart' if backend.num_window_blocks else ''}",
            states=state_memory(backend, blocks.parts, blocks.block_bytes) if self.info.num_states else None,
            windows=window_memory(backend, self._windows.parts, self.info.reach),
        )

    def run(self, batch: Batch) -> StepOutput:
        started = time.perf_counter()
        self._meet(batch)
        output = StepOutput([], [], 0.0)
        if batch.release:
            release_blocks(self.kv_layers, batch.release)
            release_blocks(self.window_layers, batch.release_windows)
            if self.info.num_states and not self._states:
                release_blocks([[self._backend.sequence_states]], range(self._backend.num_states))
        self._swap.save(batch.swap_out, batch.swap_out_windows, batch.swap_out_states)
        self._swap.load(
            [pair for work in batch.work for pair in work.loads],
            [pair for work in batch.work for pair in work.window_loads],
            [(work.state, work.state_loads) for work in batch.work if work.state_loads],
        )
        self._blocks.copy_parts((work.copied, work.blocks, work) for work in batch.work)
        if self.info.num_window_blocks:
            self._windows.copy_parts((work.copied_window, work.windows, work) for work in batch.work)
        if self.info.num_snapshots:
            self._copy_states((work.begun, work.state) for work in batch.work if work.begun >= 0)
        if batch.work or batch.again:
            self._compute(batch, output)
        if self.info.num_snapshots:
            self._copy_states((self._states[work.id].place, work.kept) for work in batch.work if work.kept >= 0)
        output.compute_s = time.perf_counter() - started
        return output

    def _meet(self, batch: Batch) -> None:
        """Forget sequences that have ended, and learn new ones."""
        for id in batch.drop:
            state = self._states.pop(id, None)
            if state is not None and state.history.guide is not None:
                state.history.guide.close()
        for new in batch.new:
            history = History(list(new.token_ids), len(new.token_ids), new.params, new.seed)
            if new.params.grammar or new.params.reasoning_end:
                history.guide = self._guides.guide(new.params)
            for token_id in new.answer:
                history.append(token_id)
            pooler = Pooler(new.pooling, len(new.token_ids)) if new.pooling else None
            self._states[new.id] = _State(history, new.adapter, new.adapter_from, pooler=pooler, second=new.second)
            self._states[new.id].is_guessed = new.is_guessed
        if self._drafter is not None:
            self._drafter.follow(batch)

    def prepare_next(self) -> None:
        """See contract.messages.Runner."""
        self._guides.prepare_next()

    def load_adapter(self, id: int, path: str) -> AdapterInfo:
        """Raises BadRequest."""
        adapter = open_adapter(Path(path), lora_shapes(self._backend.whole_spec))
        num_bytes = self._backend.add_adapter(id, adapter)
        return AdapterInfo(adapter.digest, adapter.rank, num_bytes, list(adapter.invocation))

    def unload_adapter(self, id: int) -> None:
        self._backend.drop_adapter(id)

    def _copy_states(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy states between places: (from, to)."""
        states = self._backend.sequence_states
        for source, target in pairs:
            self._backend.copy(states[target], states[source])

    def _compute(self, asked: Batch, output: StepOutput) -> None:
        if asked.again:
            self._num_again += 1
        else:
            self._works, self._num_again = asked.work, 0
        if self._steady is not None:
            if self._steady.takes(asked):
                output.tokens = self._steady.step(asked.work, self._backend)
                return
            self._steady.settle()
            self._steady = None
        if asked.again:
            self._works, self._num_again = self._written_out(asked.work), 0
        works = self._works
        for work in works:
            state = self._states[work.id]
            state.blocks[work.first_block :] = work.blocks
            state.windows[work.first_block :] = work.windows
            state.place = work.state if work.state >= 0 else state.place
        works = [work for work in works if self._is_known(work)]
        if not works:
            return
        if self._drafter is not None:
            works = self._drafter.draft(works, self._text_of, asked.draft_room, output)
        wanted = self._rows(works)
        tops = [self._num_candidates(id, more) for id, draft in wanted.samples for more in range(len(draft) + 1)]
        start = tops.count(0)
        tops += [0] * (len(wanted.rows) - len(tops))
        rows, states = np.array(wanted.rows, np.int32), np.array(wanted.states, np.int32)
        batch, chosen = self._inputs(works), self._choices(wanted, tops)
        choices = choices_of(chosen)
        head = self._backend.step(batch, rows, tops, states, choices)
        self._pool(head, wanted.pooled, output)
        tokens = head.tokens.tolist()
        row = 0
        for id, draft in wanted.samples:
            if tokens and chosen[row] is not None:
                self._take(id, self._states[id].history, tokens[row], output)
            else:
                self._sample(head, row, id, draft, output)
                self._tell_forced(id, output)
            row += len(draft) + 1
        for id, first, following in wanted.chunks:
            num_top = self._states[id].history.params.prompt_logprobs or 0
            logprobs = [log_softmax(row) for row in head.full[start : start + len(following)]]
            values = [describe(row, token_id, num_top) for row, token_id in zip(logprobs, following, strict=True)]
            output.prompt_logprobs.append(PromptLogprobs(id, first, values))
            start += len(following)
        if self._drafter is not None:
            num_pooled = sum(count for *_, count in wanted.pooled)
            self._drafter.settle(works, head.states[num_pooled:], self._text_of)
        is_steady = (
            not self._wants_states
            and bool(tokens)
            and all(chosen)
            and len(chosen) == len(batch.ids) == len(works) == len(self._works)
        )
        self._steady = self._keep(works, batch) if is_steady else None

    def _written_out(self, works: Sequence[Work]) -> list[Work]:
        """All work of a batch that was sent as `again`; `works` are those that get blocks."""
        given, done = {work.id: work for work in works}, self._num_again - 1
        return [
            given.get(id) or Work(id, start + num_tokens + done, 1, len(self._states[id].blocks), [])
            for id, start, num_tokens in ((last.id, last.start, last.num_tokens) for last in self._works)
        ]

    def _text_of(self, id: int) -> Sequence[int]:
        return self._states[id].history.token_ids

    def _is_known(self, work: Work) -> bool:
        """Whether the step's tokens are known: the step before may have chosen none where the engine expected one."""
        return work.start + work.num_tokens - len(work.draft) <= len(self._states[work.id].history.token_ids)

    def _pool(self, head: Head, chunks: Sequence[tuple[int, range, int]], output: StepOutput) -> None:
        """Add the states of each chunk to its sequence's pool; report the sequences that are complete."""
        first = 0
        for id, positions, count in chunks:
            pooler = self._states[id].pooler
            assert pooler is not None
            pooled = pooler.add(positions, head.states[first : first + count])
            if pooled is not None:
                output.pooled.append(Pooled(id, bytes(self._embedding.of(pooled))))
            first += count

    def _num_candidates(self, id: int, num_more: int) -> int:
        return min(num_candidates(self._states[id].history, len(self._eos_ids), num_more), self.info.vocab_size)

    def _choices(self, wanted: _Rows, tops: Sequence[int]) -> list[Choice | None]:
        """The CHOICE of each row."""
        found: list[Choice | None] = []
        for id, draft in wanted.samples:
            found.append(None if draft else choice_of(self._states[id].history, tops[len(found)]))
            found += [None] * len(draft)
        return found + [None] * (len(tops) - len(found))

    def _keep(self, works: Sequence[Work], batch: Ragged) -> Steady:
        states = [(work.id, self._states[work.id]) for work in works]
        return Steady([Decoding(id, state.history, state.blocks, state.windows) for id, state in states], batch)

    def _take(self, id: int, history: History, token_id: int, output: StepOutput) -> None:
        history.append(token_id)
        output.samples.append(Sample(id, token_id))

    def _sample(self, head: Head, row: int, id: int, draft: Sequence[int], output: StepOutput) -> None:
        """Sample the next token from row `row`; and the one after from the next row, as long as the draft matches."""
        history = self._states[id].history
        for guess in (*draft, None):
            if history.guide is not None and not history.guide.is_ready():
                return  # the mask is late: the engine asks again
            if history.guide is not None and (problem := history.guide.problem()):
                output.given_up.append(GivenUp(id, problem))
                return
            token_id, logprob = self._choose(head, row, history)
            history.append(token_id)
            output.samples.append(Sample(id, token_id, logprob))
            if token_id != guess:
                return
            row += 1

    def _tell_forced(self, id: int, output: StepOutput) -> None:
        """Tell what must follow the token that was chosen for a sequence, if one was."""
        state = self._states[id]
        guide = state.history.guide if state.is_guessed else None
        if guide is not None and output.samples and output.samples[-1].id == id and (forced := guide.forced()):
            output.forced.append(Forced(id, list(forced)))

    def _choose(self, head: Head, row: int, history: History) -> tuple[int, Logprob | None]:
        """The token behind row `row`, chosen from its candidates or from all its logits."""
        top = head.tops[row]
        if top == 1:  # nothing is left to choose
            return int(head.ids[row, 0]), None
        if top:
            return sample_top(
                head.values[row, :top], head.ids[row, :top], history, self._eos_ids, self._backend.draw
            ), None
        index = head.tops[:row].count(0)
        return sample(head.full[index], history, self._eos_ids, self._backend.draw)

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
        table = padded([self._states[work.id].blocks for work in works])
        has_windows = self.info.num_window_blocks > 0
        windows = padded([self._states[work.id].windows for work in works]) if has_windows else None
        used = [self._states[work.id].adapter_at(work.start) for work in works]
        adapters = used if any(used) else ()
        ragged = Ragged(np.array(ids, np.int32), np.array(pos, np.int32), np.array(qstart, np.int32), table, adapters)
        return ragged._replace(types=self._types(works), places=self._places(works), windows=windows)

    def _places(self, works: Sequence[Work]) -> Ints | None:
        if not self._backend.num_states:
            return None
        return np.array([self._states[work.id].place for work in works], np.int32)

    def _types(self, works: Sequence[Work]) -> Ints | None:
        """Token types: 1 in the second of two texts, where a model distinguishes them; else None."""
        encoder = self._backend.whole_spec.encoder
        if encoder is None or encoder.num_types < 2:
            return None
        seconds = (self._states[work.id].second or self.info.max_seq_len for work in works)
        types = [np.arange(w.start, w.start + w.num_tokens) >= second for w, second in zip(works, seconds, strict=True)]
        return np.concatenate(types).astype(np.int32)

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
                wanted.pooled.append((work.id, range(work.start, end), len(kept)))
                wanted.states.extend(first_row + position - work.start for position in kept)
            elif end - len(work.draft) == len(history.token_ids):
                wanted.samples.append((work.id, work.draft))
                end_row = first_row + work.num_tokens
                wanted.rows.extend(range(end_row - len(work.draft) - 1, end_row))
            if history.params.prompt_logprobs is not None and work.start < history.num_prompt:
                first = max(work.start, history.params.scored_from - 1)
                following = history.token_ids[first + 1 : min(end, history.num_prompt - 1) + 1]
                wanted.chunks.append((work.id, first, following))
                row = first_row + first - work.start
                prompt_rows += range(row, row + len(following))
            first_row += work.num_tokens
        wanted.rows.extend(prompt_rows)
        if self._drafter is not None and self._wants_states:
            ends = np.cumsum([work.num_tokens for work in works]).tolist()
            counts = map(self._drafter.num_states, works)
            for end, count in zip(ends, counts, strict=True):
                wanted.states.extend(range(end - count, end))
        return wanted
