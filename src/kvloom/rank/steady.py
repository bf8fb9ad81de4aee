"""Steady: reuses the batch of a decode step for the next step of the same sequences, with new numbers in its arrays."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvloom.contract.messages import Work
from kvloom.rank.kernels.backend import CHOICE, Backend, Choices, Ints, Ragged
from kvloom.rank.sampler import Choice, History


def choices_of(found: Sequence[Choice | None]) -> Choices:
    """An array of CHOICE; None = the row's only candidate is taken."""
    return np.array([one or (0.0, 1.0, 0.0, 0, 0) for one in found], CHOICE)


class Decoding(NamedTuple):
    """A sequence of such a batch."""

    id: int
    history: History
    blocks: list[int]


class Steady:
    """Sequences whose tokens the backend chooses itself, now and in all later steps; one row each, in order."""

    def __init__(self, seqs: Sequence[Decoding], batch: Ragged, asked: tuple[Ints, list[int], Choices]) -> None:
        """Inputs of the last step; `asked`: rows, tops and choices of Backend.step."""
        self.seqs = seqs
        self._batch = batch
        self._rows, self._tops, self._choices = asked
        self._positions = self._choices["position"]

    def takes(self, works: Sequence[Work]) -> bool:
        """Whether `works` decode the next tokens of the same sequences, and their blocks fit into the table."""
        room = self._batch.block_table.shape[1]
        return len(works) == len(self.seqs) and all(
            work.id == seq.id
            and work.num_tokens == 1
            and work.start + 1 == len(seq.history.token_ids)
            and work.first_block == len(seq.blocks)
            and not (work.draft or (work.blocks and len(seq.blocks) + len(work.blocks) > room))
            for work, seq in zip(works, self.seqs, strict=True)
        )

    def step(self, works: Sequence[Work], backend: Backend) -> list[int]:
        """Compute `works`, which `takes` accepted. Returns the next token of each sequence."""
        batch = self._batch
        batch.ids[:] = [seq.history.token_ids[-1] for seq in self.seqs]
        np.add(batch.pos, 1, out=batch.pos)
        np.add(self._positions, 1, out=self._positions)
        for row, (work, seq) in enumerate(zip(works, self.seqs, strict=True)):
            if work.blocks:
                seq.blocks.extend(work.blocks)
                batch.block_table[row, : len(seq.blocks)] = seq.blocks
        tokens: list[int] = backend.step(batch, self._rows, self._tops, None, self._choices).tokens.tolist()
        return tokens
