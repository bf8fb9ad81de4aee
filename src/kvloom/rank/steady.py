"""Steady: the batch of a decode step goes on, in the backend's own arrays, as long as the same sequences decode.

Between two steps no core computes, and after a step hardly any of Python's memory is in the caches. So little is done
here at each step, and the sequences' histories get their tokens many steps at once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvloom.contract.messages import Batch, Work
from kvloom.rank.kernels.backend import CHOICE, Backend, Choices, Ragged
from kvloom.rank.sampler import Choice, History

_MOST_OWED = 64  # steps


def choices_of(found: Sequence[Choice | None]) -> Choices:
    """An array of CHOICE; None = the row's only candidate is taken."""
    return np.array([one or (0.0, 1.0, 0.0, 0, 0) for one in found], CHOICE)


class Decoding(NamedTuple):
    """A sequence of such a batch."""

    id: int
    history: History
    blocks: list[int]
    windows: list[int]


class Steady:
    """Sequences whose tokens the backend chooses itself, now and in all later steps; one row each, in order.

    Nothing of their histories may be read before `settle`.
    """

    def __init__(self, seqs: Sequence[Decoding], batch: Ragged) -> None:
        """After the step of `batch`; the histories have its tokens."""
        self._seqs = seqs
        self._row_of = {seq.id: row for row, seq in enumerate(seqs)}
        self._room = batch.block_table.shape[1]  # blocks of a sequence
        self._owed: list[list[int]] = []  # tokens of each step that the histories have not got

    def takes(self, asked: Batch) -> bool:
        """Whether `asked`, the next batch, goes on with these sequences, and their blocks fit into the table."""
        return asked.again and all(work.first_block + len(work.blocks) <= self._room for work in asked.work)

    def step(self, works: Sequence[Work], backend: Backend) -> list[int]:
        """Compute the `works` of a batch that `takes` accepted. Returns the next token of each sequence."""
        rows = [(self._row_of[work.id], work) for work in works]
        new_blocks = [
            (row, index, block) for row, work in rows for index, block in enumerate(work.blocks, work.first_block)
        ]
        new_windows = [
            (row, index, block) for row, work in rows for index, block in enumerate(work.windows, work.first_block)
        ]
        for row, work in rows:
            self._seqs[row].blocks.extend(work.blocks)
            self._seqs[row].windows.extend(work.windows)
        tokens: list[int] = backend.step_again(new_blocks, new_windows).tolist()
        self._owed.append(tokens)
        if len(self._owed) == _MOST_OWED:
            self.settle()
        return tokens

    def settle(self) -> None:
        """Give the histories the tokens of all steps."""
        for row, seq in enumerate(self._seqs):
            for tokens in self._owed:
                seq.history.append(tokens[row])
        self._owed = []
