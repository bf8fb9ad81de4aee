"""Pooler: pools the states of one sequence while its prompt is computed, chunk by chunk. Lives in a rank process."""

import numpy as np

from kvloom.contract.pooling import POOLINGS
from kvloom.rank.kernels.backend import Floats


class Pooler:
    """Sums are float64 and added token by token, so that the result does not depend on how a prompt was cut into
    chunks.
    """

    def __init__(self, pooling: str, num_prompt: int) -> None:
        """`pooling`: one of POOLINGS; num_prompt: tokens."""
        assert pooling in POOLINGS
        self._pooling = pooling
        self._num_prompt = num_prompt
        self._num_added = 0
        self._sum = np.empty((1, 0))
        self._first = b""

    def wanted(self, start: int, end: int) -> range:
        """The positions in [start, end) whose states must be added."""
        if self._pooling == "cls":
            return range(start, min(end, 1))
        return range(start if self._pooling == "mean" else max(start, self._num_prompt - 1), end)

    def add(self, positions: range, states: Floats) -> Floats | None:
        """states [N, hidden] float32 of the wanted `positions` of a chunk.

        Returns the pooled vector, float32, after the last prompt token, else None. A chunk that begins at 0 starts
        over.
        """
        if self._pooling == "cls" and len(states):
            self._first = bytes(states[0])
        if self._pooling == "cls" and positions.stop == self._num_prompt:
            return np.frombuffer(self._first, np.float32)
        if not len(states) or self._pooling == "cls":
            return None
        if self._pooling == "last":
            last: Floats = states[-1]
            return last
        if positions.start == 0:
            self._num_added, self._sum = 0, np.zeros((1, states.shape[1]))
        assert positions.start == self._num_added, "a prompt token was left out of the mean, or counted twice"
        self._num_added += len(states)
        self._sum = np.cumsum(np.concatenate((self._sum, states)), axis=0)[-1:]
        if self._num_added < self._num_prompt:
            return None
        mean: Floats = (self._sum[0] / self._num_added).astype(np.float32)
        return mean
