"""HeadDrafter: a guess head (checkpoints/guess_head.py) as a draft model.

Of each token it reads the state, too, that the model has of the token before. So it follows the model, and reads
prompts when the model has computed them: states are not kept. Where the state before a token is not known, because the
model began behind a prefix that others had computed, the token is read with zeros, as the first of every text is
(llama.cpp does the same). That costs a part of a guess, and never changes an answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvloom.contract.messages import Batch, Work
from kvloom.rank.drafter import LEAST_ROOM, Drafter, Read, TextOf
from kvloom.rank.kernels.backend import Backend, Floats, Ragged

READ_TOKENS = 16  # of an answer that are read together, unless it drafts
KEPT_STATES = 48  # of a sequence: those tokens, and as many as it may go back behind a wrong guess


@dataclass(slots=True)
class States:
    """The states of consecutive positions of one sequence, from `first` on."""

    first: int
    rows: Floats  # [n, hidden]

    @property
    def end(self) -> int:
        return self.first + len(self.rows)

    def put(self, start: int, rows: Floats) -> None:
        """States of positions from `start` on, in place of all that are known from there on."""
        if self.first <= start <= self.end:
            rows, start = np.concatenate([self.rows[: start - self.first], rows]), self.first
        self.first, self.rows = start, rows.copy()

    def forget_before(self, position: int) -> None:
        count = max(0, min(position - self.first, len(self.rows)))
        self.first, self.rows = self.first + count, self.rows[count:].copy()

    def before(self, start: int, end: int) -> Floats:
        """Of the positions before those in [start, end), zeros where they are not known."""
        found = np.zeros((end - start, self.rows.shape[1]), np.float32)
        low, high = max(start - 1, self.first), min(end - 1, self.end)
        if low < high:
            found[low + 1 - start : high + 1 - start] = self.rows[low - self.first : high - self.first]
        return found


class HeadDrafter(Drafter):
    """See Drafter. What it reads of a text behind the known tokens, where it has states of its own alone, it reads
    again when it has the model's.
    """

    wants_states = True

    def __init__(self, backend: Backend, max_seq_len: int, vocab_size: int) -> None:
        super().__init__(backend, max_seq_len, vocab_size)
        self._states: dict[Read, States] = {}

    def follow(self, batch: Batch) -> None:
        """See Drafter."""
        super().follow(batch)
        alive = set(self._seqs.values())
        for seq in [seq for seq in self._states if seq not in alive]:
            del self._states[seq]

    def settle(self, works: Sequence[Work], states: Floats, text_of: TextOf) -> None:
        """See Drafter. Reads what the step has computed, if that is a prompt or enough of an answer."""
        first, reading = 0, []
        for work in works:
            rows, first = states[first : first + work.num_tokens], first + work.num_tokens
            num_computed = min(work.start + work.num_tokens, len(text_of(work.id)) - 1)
            seq = self._seqs[work.id]
            kept = self._states_of(seq)
            if work.id in self._asked:
                seq.num_known = min(seq.num_known, work.start + work.num_tokens - len(work.draft))
            seq.num_known = min(seq.num_known, num_computed)
            kept.put(work.start, rows[: num_computed - work.start])
            if kept.first - seq.num_known <= LEAST_ROOM:
                seq.text = list(text_of(work.id))
                reading.append((seq, num_computed - seq.num_known))
        self._asked = []
        if any(count >= READ_TOKENS for _, count in reading):
            self._catch_up([(seq, count) for seq, count in reading if count])
        for work in works:
            self._mark(self._seqs[work.id])
            kept = self._states_of(self._seqs[work.id])
            kept.forget_before(kept.end - KEPT_STATES)

    def _states_of(self, seq: Read) -> States:
        return self._states.setdefault(seq, States(0, np.empty((0, self._backend.whole_spec.hidden), np.float32)))

    def _catch_up(self, reading: Sequence[tuple[Read, int]]) -> None:
        """Compute keys and values alone."""
        none = np.empty(0, np.int32)
        self._backend.step(self._inputs(reading), none, [], None, None)
        for seq, count in reading:
            seq.num_known += count

    def _inputs(self, reading: Sequence[tuple[Read, int]]) -> Ragged:
        before = [self._states_of(seq).before(seq.num_known, seq.num_known + count) for seq, count in reading]
        return super()._inputs(reading)._replace(states=np.concatenate(before))

    def _keep_states(self, seqs: Sequence[Read]) -> None:
        assert self._head is not None, "there was a pass"
        for seq, state in zip(seqs, self._head.states, strict=True):
            if seq.num_known == len(seq.text):  # and a guess follows
                self._states_of(seq).put(seq.num_known - 1, state[None])
