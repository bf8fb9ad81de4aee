"""StateDrafter: a draft model that reads, with each token, the state that the model has of the token before.

So it follows the model: states are gone after their step, except for the last ones of a sequence. Its own state of a
token stands for the model's until that is there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvloom.contract.messages import Batch, Work
from kvloom.rank.drafter import Drafter, Read, TextOf
from kvloom.rank.kernels.backend import Backend, Floats


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


class StateDrafter(Drafter):
    """See Drafter. It is at most a few tokens behind the model wherever it is asked."""

    wants_states = reads_along = True

    def __init__(self, backend: Backend, max_seq_len: int, vocab_size: int, width: int) -> None:
        """`width`: numbers of the model's states."""
        super().__init__(backend, max_seq_len, vocab_size)
        self._states: dict[Read, States] = {}
        self._width = width

    def follow(self, batch: Batch) -> None:
        """See Drafter."""
        super().follow(batch)
        alive = set(self._seqs.values())
        for seq in [seq for seq in self._states if seq not in alive]:
            del self._states[seq]

    def _states_of(self, seq: Read) -> States:
        return self._states.setdefault(seq, States(0, np.empty((0, self._width), np.float32)))

    def _told(self, works: Sequence[Work], states: Floats, text_of: TextOf) -> Iterator[tuple[Work, Read, int]]:
        """Keep the states that settle gets. Yields each work, its sequence, and how many tokens of that are computed
        whose successor is known.
        """
        first = 0
        for work in works:
            count, end = self.num_states(work), work.start + work.num_tokens
            rows, first = states[first : first + count], first + count
            num_computed = min(end, len(text_of(work.id)) - 1)
            seq = self._seqs[work.id]
            self._states_of(seq).put(end - count, rows[: max(0, num_computed - (end - count))])
            yield work, seq, num_computed
