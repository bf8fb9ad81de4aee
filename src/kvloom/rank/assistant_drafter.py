"""AssistantDrafter: an assistant (checkpoints/assistant.py) as a draft model.

It has no keys and values: its layers read the model's, up to the token before the last known one, and all tokens of a
guess are made from there, each of the token and the state before it (transformers'
SinglePositionMultiTokenCandidateGenerator; llama.cpp's draft-mtp with a shared memory). So it reads no text and guesses
wherever the model's state of the token before is kept: that of the last token computed, in this rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvloom.checkpoints.families.spec import PROJECTIONS
from kvloom.checkpoints.source import WeightSource
from kvloom.contract.messages import Work
from kvloom.rank.drafter import Read, TextOf
from kvloom.rank.kernels.backend import Backend, Floats, Ragged
from kvloom.rank.kernels.file_table import FileTable
from kvloom.rank.kv_blocks import padded
from kvloom.rank.state_drafter import StateDrafter


@dataclass(frozen=True, slots=True)
class Projections:
    """What is around the layers of an assistant, in float32 and by numpy: one row a guess is little work."""

    table: FileTable  # the model's embeddings
    before: Floats  # [hidden, 2 width]
    behind: Floats  # [width, hidden]

    @classmethod
    def of(cls, weights: WeightSource, table: FileTable) -> "Projections":
        """Those of an assistant with `weights`. Raises ModelError."""
        before, behind = (weights.tensor(name).float32() for name in PROJECTIONS)
        return cls(table, before, behind)

    @property
    def num_bytes(self) -> int:
        return self.before.nbytes + self.behind.nbytes


class AssistantDrafter(StateDrafter):
    """See Drafter."""

    goes_on = False

    def __init__(self, backend: Backend, max_seq_len: int, vocab_size: int, ends: Projections) -> None:
        super().__init__(backend, max_seq_len, vocab_size, len(ends.behind))
        self._ends = ends
        self._last: dict[Read, int] = {}  # position of the last known token of those that draft

    @property
    def weight_bytes(self) -> int:
        """See Drafter."""
        return super().weight_bytes + self._ends.num_bytes

    def num_states(self, work: Work) -> int:
        """See Drafter. Of the last token that is known to stay, or of each that may be it."""
        return 1 + len(work.draft)

    def settle(self, works: Sequence[Work], states: Floats, text_of: TextOf) -> None:
        """See Drafter."""
        for _, seq, _ in self._told(works, states, text_of):
            kept = self._states_of(seq)
            kept.forget_before(kept.end - 1)
        self._asked, self._last = [], {}

    def _ask(self, work: Work, known: Sequence[int]) -> int:
        first, seq = super()._ask(work, known), self._seqs[work.id]
        kept, seq.num_known = self._states_of(seq), len(known) - 1
        self._last[seq] = seq.num_known
        if not kept.first < seq.num_known <= kept.end:
            seq.end = 0  # the state before the last known token is gone: no guess
        return first

    def _read(self, reading: Sequence[tuple[Read, int]]) -> list[int]:
        """One token after the other: tokens that were guessed otherwise have no state but its own."""
        found: dict[Read, int] = {}
        for at in range(max(count for _, count in reading)):
            now = [(seq, 1) for seq, count in reading if count > at]
            found |= zip((seq for seq, _ in now), super()._read(now), strict=True)
        return [found[seq] for seq, _ in reading]

    def _inputs(self, reading: Sequence[tuple[Read, int]]) -> Ragged:
        """All at the position of the last keys; the rotary tables are one ahead of it."""
        seqs = [seq for seq, _ in reading]
        tokens = np.array([seq.text[seq.num_known] for seq in seqs], np.int32)
        before = [self._states_of(seq).before(seq.num_known, seq.num_known + 1) for seq in seqs]
        given = np.concatenate([self._ends.table.rows(tokens), np.concatenate(before)], axis=1) @ self._ends.before.T
        pos, starts = (
            np.array([self._last[seq] - 1 for seq in seqs], np.int32),
            np.arange(len(seqs) + 1, dtype=np.int32),
        )
        windows = padded([seq.windows for seq in seqs]) if self._backend.num_window_blocks else None
        batch = Ragged(np.zeros_like(tokens), pos, starts, padded([seq.blocks for seq in seqs]))
        return batch._replace(windows=windows, states=given)

    def _keep_states(self, seqs: Sequence[Read]) -> None:
        assert self._head is not None, "there was a pass"
        for seq, state in zip(seqs, self._head.states @ self._ends.behind.T, strict=True):
            self._states_of(seq).put(seq.num_known - 1, state[None])
