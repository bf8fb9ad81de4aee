"""A model without weights, for tests and for trying a deployment (modelInstanceType "StandardMock").

FakeRunner keeps a paged cache of token ids where a real runner keeps keys and values, and reads the whole context back
through the block table before it chooses a token. A wrong, lost or overwritten block changes the answer, so the fake is
an oracle for the scheduler and the block pool, with `fake_answer` as the expected result.
"""

import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvloom.checkpoints.lora_gguf import open_adapter
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest
from kvloom.contract.messages import (
    AdapterInfo,
    Batch,
    Forced,
    GivenUp,
    Logprob,
    NewSeq,
    Pooled,
    PromptLogprobs,
    RankInfo,
    Sample,
    StepOutput,
    Work,
)
from kvloom.contract.sampling import SamplingParams
from kvloom.rank.byte_tokenizer import EOS_ID as EOS_ID
from kvloom.rank.byte_tokenizer import VOCAB_SIZE as VOCAB_SIZE
from kvloom.rank.byte_tokenizer import ByteTokenizer as ByteTokenizer
from kvloom.rank.grammar.guides import Guides
from kvloom.rank.grammar.reasoning import Guide
from kvloom.rank.tier.kvmemory import KvMemory

HIDDEN_SIZE = 8
_LETTERS = b"abcdefghijklmnopqrstuvwxyz      ,.\n"
_EOS_EVERY = 97  # one context in this many ends the answer
_FAKE_LOGPROB = -0.5


def fake_next(context: Sequence[int], params: SamplingParams, seed: int) -> int:
    """The token that follows `context`: a checksum of all of it, and of the seed unless greedy."""
    data = context if isinstance(context, array) else array("q", context)
    value = zlib.crc32(data, 0 if params.is_greedy else zlib.crc32(str(seed).encode()))
    if value % _EOS_EVERY == 0:
        return EOS_ID
    return _LETTERS[value // _EOS_EVERY % len(_LETTERS)]


def fake_answer(
    prompt_ids: Sequence[int], params: SamplingParams, seed: int, num_tokens: int, adapter: str = ""
) -> list[int]:
    """The tokens that FakeRunner must answer, computed without blocks, batches or steps. `adapter`: digest of a LoRA
    adapter.
    """
    mark = adapter_mark(adapter)
    context = [token + mark for token in prompt_ids]
    for _ in range(num_tokens):
        context.append(fake_next(context, params, seed) + mark)
    return [token - mark for token in context[len(prompt_ids) :]]


def adapter_mark(digest: str) -> int:
    """Added to each cached token, so that a block of another adapter changes the answer."""
    return int(digest[:7], 16) << 32 if digest else 0


def fake_state(checksum: int) -> list[int]:
    """A token's state: the eight half-bytes of the checksum of all tokens up to it, centred on 0."""
    return [(checksum >> 4 * i & 15) - 7 for i in range(HIDDEN_SIZE)]


def fake_embedding(prompt_ids: Sequence[int], pooling: str) -> list[float]:
    """The vector that FakeRunner must pool, computed without blocks, batches or steps."""
    states = [fake_state(zlib.crc32(array("q", prompt_ids[: i + 1]).tobytes())) for i in range(len(prompt_ids))]
    chosen = states if pooling == "mean" else states[:1] if pooling == "cls" else states[-1:]
    return list(array("f", [sum(column) / len(chosen) for column in zip(*chosen, strict=True)]))


@dataclass(slots=True)
class _State:
    token_ids: list[int]
    params: SamplingParams
    seed: int
    num_prompt: int
    blocks: list[int] = field(default_factory=list)
    guide: Guide | None = None
    mark: int = 0  # mark of its adapter
    adapter_from: int = 0  # of NewSeq
    is_guessed: bool = False  # of NewSeq
    pooling: str = ""
    num_pooled: int = 0
    sums: list[int] = field(default_factory=list)  # sum of the states pooled so far
    first: list[int] = field(default_factory=list)

    def append(self, token_id: int) -> None:
        """The token was chosen as the next one."""
        if self.guide is not None:
            self.guide.take(token_id)
        self.token_ids.append(token_id)


class FakeRunner:
    """Implements contract.messages.Runner. `sleep` is called with the duration that a step would have had."""

    def __init__(
        self, config: EngineConfig, sleep: Callable[[float], None] = time.sleep, guides: Guides | None = None
    ) -> None:
        """Sizes and times come from `config`; defaults: 4096 blocks of 16 tokens, 2048 tokens a sequence."""
        num_blocks, block_size = config.num_blocks or 4096, config.block_size or 16
        num_host_blocks = config.num_host_blocks or 0
        self.info = RankInfo(
            num_blocks,
            block_size,
            VOCAB_SIZE,
            config.max_seq_len or 2048,
            "fake",
            kv_bytes=array("q").itemsize * num_blocks * block_size,
            num_host_blocks=num_host_blocks,
            hidden_size=HIDDEN_SIZE,
        )
        self._slots = array("q", [-1]) * (num_blocks * block_size)
        self._host = array("q", [-1]) * (num_host_blocks * block_size)
        self._states: dict[int, _State] = {}
        self._marks = {0: 0}  # by adapter id
        self._step_s, self._token_s, self._sleep = config.fake_step_s, config.fake_token_s, sleep
        self._guides = guides or Guides(ByteTokenizer, VOCAB_SIZE, must_wait=config.world_size > 1)

    @property
    def kv_layers(self) -> list[list[memoryview]]:
        shape = (self.info.num_blocks, self.info.block_size, 1)
        return [[memoryview(self._slots).cast("B").cast("q", shape)]]

    @property
    def window_layers(self) -> list[list[memoryview]]:
        return []

    def kv_memory(self, model: str) -> KvMemory:
        info, block_bytes = self.info, self.info.block_size * self._slots.itemsize
        return KvMemory(self.kv_layers, info.num_blocks, info.block_size, block_bytes, self._read_block, "fake", "fake")

    def run(self, batch: Batch) -> StepOutput:
        for id in batch.drop:
            state = self._states.pop(id, None)
            if state is not None and state.guide is not None:
                state.guide.close()
        for new in batch.new:
            self._learn(new)
        duration_s = self._token_s * sum(work.num_tokens for work in batch.work) + (self._step_s if batch.work else 0.0)
        if duration_s:
            self._sleep(duration_s)
        for block in batch.release:
            self._slots[self._span(block)] = array("q", [-1]) * self.info.block_size
        for block, host_block in batch.swap_out:
            self._host[self._span(host_block)] = self._slots[self._span(block)]
        for host_block, block in (pair for work in batch.work for pair in work.loads):
            self._slots[self._span(block)] = self._host[self._span(host_block)]
        for work in batch.work:
            self._states[work.id].blocks[work.first_block :] = work.blocks
            if work.copied >= 0:
                target = work.blocks[work.start // self.info.block_size - work.first_block]
                self._slots[self._span(target)] = self._slots[self._span(work.copied)]
        works = [work for work in batch.work if self._is_known(work)]
        for work in works:  # all writes before any read, as in a layer of a real model
            self._write(work)
        output = StepOutput([], [], duration_s)
        for work in works:
            self._read(work, output)
        return output

    def load_adapter(self, id: int, path: str) -> AdapterInfo:
        """Any well-formed adapter fits. Raises BadRequest."""
        adapter = open_adapter(Path(path), None)
        self._marks[id] = adapter_mark(adapter.digest)
        return AdapterInfo(adapter.digest, adapter.rank, len(adapter.data), list(adapter.invocation))

    def prepare_next(self) -> None:
        self._guides.prepare_next()

    def unload_adapter(self, id: int) -> None:
        self._marks.pop(id, None)

    def _learn(self, new: NewSeq) -> None:
        assert new.id not in self._states, f"sequence {new.id} is introduced twice"
        state = self._states[new.id] = _State(list(new.token_ids), new.params, new.seed, len(new.token_ids))
        state.mark, state.adapter_from = self._marks[new.adapter], new.adapter_from
        state.pooling, state.is_guessed = new.pooling, new.is_guessed
        state.guide = self._guides.guide(new.params)
        for token_id in new.answer:
            state.append(token_id)

    def _is_known(self, work: Work) -> bool:
        """Whether the step's tokens are known: the step before may have chosen none where the engine expected one."""
        return work.start + work.num_tokens - len(work.draft) <= len(self._states[work.id].token_ids)

    def _write(self, work: Work) -> None:
        state = self._states[work.id]
        tokens = state.token_ids + work.draft
        for pos in range(work.start, work.start + work.num_tokens):
            self._slots[self._slot(state, pos)] = tokens[pos] + state.mark * (work.start >= state.adapter_from)

    def _read(self, work: Work, output: StepOutput) -> None:
        state = self._states[work.id]
        end = work.start + work.num_tokens
        if state.pooling:
            self._pool(work, state, output)
            return
        if state.params.prompt_logprobs is not None and work.start < state.num_prompt:
            first = max(work.start, state.params.scored_from - 1)
            following = state.token_ids[first + 1 : min(end, state.num_prompt - 1) + 1]
            output.prompt_logprobs.append(PromptLogprobs(work.id, first, [_fake_logprob(i, state) for i in following]))
        if end - len(work.draft) == len(state.token_ids):
            self._sample(work, state, output)
            has_token = bool(output.samples) and output.samples[-1].id == work.id
            if has_token and state.is_guessed and state.guide is not None and (forced := state.guide.forced()):
                output.forced.append(Forced(work.id, list(forced)))

    def _pool(self, work: Work, state: _State, output: StepOutput) -> None:
        """Pool the states of the step's tokens, read from the blocks."""
        end = work.start + work.num_tokens
        if work.start == 0:
            state.num_pooled, state.sums = 0, [0] * HIDDEN_SIZE
        is_last = state.pooling == "last"
        assert is_last or work.start == state.num_pooled, "the mean leaves out or repeats a token"
        checksum, last = 0, [0] * HIDDEN_SIZE
        for pos in range(end):
            checksum = zlib.crc32(array("q", [self._slots[self._slot(state, pos)]]).tobytes(), checksum)
            if pos >= work.start:
                last = fake_state(checksum)
                state.first = state.first if pos else last
                state.sums = [total + value for total, value in zip(state.sums, last, strict=False)] or last
                state.num_pooled += 1
        if end == state.num_prompt:
            mean = [total / state.num_pooled for total in state.sums]
            found = mean if state.pooling == "mean" else state.first if state.pooling == "cls" else last
            output.pooled.append(Pooled(work.id, array("f", found).tobytes()))

    def _sample(self, work: Work, state: _State, output: StepOutput) -> None:
        """Sample the next token; and the one after, as long as the draft matches."""
        for guess in (*work.draft, None):
            if state.guide is not None and not state.guide.is_ready():
                return
            if state.guide is not None and (problem := state.guide.problem()):
                output.given_up.append(GivenUp(work.id, problem))
                return
            token_id = fake_next(self._context(state), state.params, state.seed)
            if state.guide is not None:
                mask = state.guide.mask()
                if mask is not None:
                    allowed = mask.nonzero()[0]
                    token_id = int(allowed[token_id % len(allowed)])
            state.append(token_id)
            logprob = _fake_logprob(token_id, state) if state.params.logprobs is not None else None
            output.samples.append(Sample(work.id, token_id, logprob))
            if token_id != guess:
                return

    def _context(self, state: _State) -> "array[int]":
        """All tokens that the sequence's blocks hold, up to its last token."""
        context = array("q")
        for block in state.blocks[: -(-len(state.token_ids) // self.info.block_size)]:
            context += self._slots[self._span(block)]
        return context[: len(state.token_ids)]

    def _read_block(self, block: int) -> list[memoryview]:
        return [memoryview(self._slots)[self._span(block)]]

    def _span(self, block: int) -> slice:
        return slice(block * self.info.block_size, (block + 1) * self.info.block_size)

    def _slot(self, state: _State, pos: int) -> int:
        size = self.info.block_size
        return state.blocks[pos // size] * size + pos % size


def _fake_logprob(token_id: int, state: _State) -> Logprob:
    count = state.params.logprobs or state.params.prompt_logprobs or 0
    others = ((token_id + i) % 256 for i in range(1, count))
    top = [(token_id, _FAKE_LOGPROB), *((other, _FAKE_LOGPROB - 1 - i) for i, other in enumerate(others))]
    also = [(id, _FAKE_LOGPROB - _fake_rank(id, state)) for id in state.params.logprob_ids]
    return Logprob(token_id, _FAKE_LOGPROB, top[:count] + also)


def _fake_rank(token_id: int, state: _State) -> int:
    """How much less likely a token is than the most likely one, by the sequence before it."""
    return zlib.crc32(array("q", [*state.token_ids, token_id]).tobytes()) % 5


def open_runner(
    config: EngineConfig, eos_ids: list[int], progress: Callable[[int, int], None], rank: int = 0, rendezvous: str = ""
) -> FakeRunner:
    """The runner of a rank with backend "fake"; each of several ranks computes everything."""
    if config.model:
        raise BadRequest("model", "the fake backend takes none")
    progress(1, 1)
    return FakeRunner(config)
