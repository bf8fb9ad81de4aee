"""Drafter: a smaller model in the rank, which guesses tokens that the model then checks.

Its keys and values lie beside the model's, in blocks of the same numbers, so the engine's tables of blocks hold for
both. What it lacks, because a block was loaded, swapped or computed before it was asked, it computes when it is next
asked. Wrong or missing keys and values cost guesses that are wrong, and never change an answer.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from kvloom.contract.messages import BY_MODEL, Batch, Drafted, DraftLoad, StepOutput, Work
from kvloom.rank.kernels.backend import Backend, Floats, Head, Ragged
from kvloom.rank.kv_blocks import KvBlocks, padded
from kvloom.rank.pages import release_blocks
from kvloom.rank.steady import choices_of

TextOf = Callable[[int], Sequence[int]]  # a sequence's id -> its tokens that are known
LEAST_ROOM = 64  # tokens of a step that it may compute of texts in any case


@dataclass(slots=True, eq=False)
class Read:
    """A sequence, as far as the draft model has read it."""

    blocks: list[int]
    num_known: int  # tokens, from the first, whose keys and values it has
    num_whole: int  # blocks of these tokens that are marked as whole
    windows: list[int]  # as long as blocks, if the model's layers with a window have blocks of their own
    text: list[int] = field(default_factory=list)  # of the step under way: known tokens, then the draft so far
    end: int = 0  # length that the text is to have

    def give(self, work: Work, block_size: int) -> None:
        """It has the blocks of `work`; what lay in others there is lost."""
        first = work.first_block
        if len(self.blocks) > first:
            self.num_known, self.num_whole = min(self.num_known, first * block_size), min(self.num_whole, first)
        self.blocks[first:], self.windows[first:] = work.blocks, work.windows


class Drafter:
    """Guesses greedily, for all sequences of a step together. Owned by the runner, which shows it each batch."""

    wants_states = False  # of the model, see num_states
    reads_along = False  # it is told as a part of RankInfo: little of a text is lacking when it guesses
    goes_on = True  # a pass may follow from the one before, in the backend

    def __init__(self, backend: Backend, max_seq_len: int, vocab_size: int) -> None:
        """`max_seq_len`: tokens that it can attend to; `vocab_size`: of the model that checks its guesses."""
        self._backend, self._max_seq_len, self._vocab_size = backend, max_seq_len, vocab_size
        self._own_vocab_size = backend.whole_spec.vocab_size
        self._blocks = KvBlocks(backend)
        self._is_whole = bytearray(backend.num_blocks)  # of each block, whether it has all its keys and values
        self._seqs: dict[int, Read] = {}
        self._asked: list[int] = []  # sequences that draft in the step under way
        self._going_on: list[Read] = []  # those of its last pass, if the next one may go on from that
        self._load = DraftLoad()
        self._head: Head | None = None  # of the last pass

    @property
    def weight_bytes(self) -> int:
        """Of its weights."""
        return self._backend.weight_bytes

    @property
    def kv_bytes(self) -> int:
        """Of its keys and values."""
        return self._backend.kv_bytes

    def follow(self, batch: Batch) -> None:
        """Learn to whom the batch gives which blocks. To be called with each batch, before it is computed."""
        for id in batch.drop:
            self._seqs.pop(id, None)
        for load in batch.loads:
            self._lose(load.blocks)
        if batch.release:
            self._lose(batch.release)
            release_blocks(self._blocks.layers, batch.release)
        for work in batch.work:
            if work.blocks and work.first_block == 0:
                self._seqs[work.id] = self._begin(work)
            elif work.blocks:
                self._lose(work.blocks)
                self._seqs[work.id].give(work, self._blocks.block_size)

    def draft(self, works: Sequence[Work], text_of: TextOf, room: int, output: StepOutput) -> list[Work]:
        """The works, with a guess for each BY_MODEL of their drafts; fewer where a text would become too long, none
        where more tokens of it are lacking than may be computed now: `room` of all texts together.
        """
        self._asked = [work.id for work in works if BY_MODEL in work.draft]
        if not self._asked:
            return list(works)
        started = time.perf_counter()
        self._load, self._going_on = DraftLoad(), []
        begun = {}
        for work in works:
            if BY_MODEL in work.draft:
                begun[work.id] = self._ask(work, text_of(work.id))
        reading = self._missing([self._seqs[id] for id in self._asked], max(room, LEAST_ROOM))
        while reading:
            for (seq, _), guess in zip(reading, self._read(reading), strict=True):
                if seq.num_known == len(seq.text) and guess < self._vocab_size:
                    seq.text.append(guess)
            reading = [(seq, 1) for seq, _ in reading if len(seq.text) == seq.num_known + 1 and len(seq.text) < seq.end]
        done = [
            _filled(work, self._seqs[work.id].text[begun[work.id] :]) if work.id in begun else work for work in works
        ]
        output.drafts = [
            Drafted(work.id, work.draft, self._seqs[work.id].num_known) for work in done if work.id in begun
        ]
        self._load.seconds = time.perf_counter() - started
        output.draft_load = self._load
        return done

    def settle(self, works: Sequence[Work], states: Floats, text_of: TextOf) -> None:
        """The step of `works` has ended: of what was read, what the sequences have got holds, and is found by later
        ones. states [rows, hidden]: the model's, as many of each work as num_states says.
        """
        for id in self._asked:
            seq = self._seqs[id]
            seq.num_known = min(seq.num_known, len(text_of(id)) - 1)
            self._mark(seq)
        self._asked = []

    def num_states(self, work: Work) -> int:
        """How many of a work's tokens, the last ones, it wants the model's states of, if it `wants_states`."""
        return 0

    def _mark(self, seq: Read) -> None:
        """Blocks that are read whole are found by later sequences."""
        num_whole = seq.num_known // self._blocks.block_size
        for block in seq.blocks[seq.num_whole : num_whole]:
            self._is_whole[block] = True
        seq.num_whole = max(seq.num_whole, num_whole)

    def _lose(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._is_whole[block] = False

    def _begin(self, work: Work) -> Read:
        """A sequence that comes, or comes back: it begins behind the blocks that were computed for others."""
        num_found = work.start // self._blocks.block_size
        self._lose(work.blocks[num_found:])
        self._lose(block for _, block in work.loads)
        flags = [self._is_whole[block] for block in work.blocks[:num_found]]
        num_whole = flags.index(False) if False in flags else num_found
        num_known = num_whole * self._blocks.block_size
        return Read(list(work.blocks), num_known, num_whole, list(work.windows))

    def _ask(self, work: Work, known: Sequence[int]) -> int:
        """Returns where the draft begins in the sequence's text."""
        seq, num_given = self._seqs[work.id], work.draft.index(BY_MODEL)
        seq.text = [*known, *work.draft[:num_given]]
        seq.end = min(len(known) + len(work.draft), self._max_seq_len + 1)
        return len(known)

    def _missing(self, seqs: Sequence[Read], room: int) -> list[tuple[Read, int]]:
        """How many tokens of which text to read first: `room` at most."""
        found = []
        for seq in seqs:
            if room > 0 and len(seq.text) < seq.end:
                count = min(room, len(seq.text) - seq.num_known)
                found.append((seq, count))
                room -= count
        return found

    def _read(self, reading: Sequence[tuple[Read, int]]) -> list[int]:
        """Compute so many more tokens of each text. Returns what it guesses to follow them."""
        seqs = [seq for seq, _ in reading]
        self._count(reading)
        is_single = all(count == 1 for _, count in reading)
        if is_single and seqs == self._going_on:
            tokens = self._backend.step_again([])
        else:
            rows = np.cumsum([count for _, count in reading], dtype=np.int32) - 1
            states, choices = rows if self.wants_states else None, choices_of([None] * len(seqs))
            head = self._head = self._backend.step(self._inputs(reading), rows, [1] * len(seqs), states, choices)
            tokens = head.tokens if head.tokens.size else head.ids[:, 0]
            self._going_on = seqs if self.goes_on and is_single and head.tokens.size else []
        for seq, count in reading:
            seq.num_known += count
        self._keep_states(seqs)
        return [int(token) for token in tokens]

    def _keep_states(self, seqs: Sequence[Read]) -> None:
        """A pass has read so much of each; self._head has what it gave."""

    def _inputs(self, reading: Sequence[tuple[Read, int]]) -> Ragged:
        ids = [id for seq, count in reading for id in seq.text[seq.num_known : seq.num_known + count]]
        pos = [p for seq, count in reading for p in range(seq.num_known, seq.num_known + count)]
        starts = np.cumsum([0, *(count for _, count in reading)], dtype=np.int32)
        own = np.array([id if id < self._own_vocab_size else 0 for id in ids], np.int32)
        return Ragged(own, np.array(pos, np.int32), starts, padded([seq.blocks for seq, _ in reading]))

    def _count(self, reading: Sequence[tuple[Read, int]]) -> None:
        load = self._load
        load.num_passes += 1
        load.num_tokens += sum(count for _, count in reading)
        load.num_samples += len(reading)
        load.num_pairs += sum(count * seq.num_known + count * (count + 1) // 2 for seq, count in reading)


def _filled(work: Work, draft: list[int]) -> Work:
    """The work with this draft in place of its own, which is no shorter."""
    return replace(work, draft=draft, num_tokens=work.num_tokens - len(work.draft) + len(draft))
