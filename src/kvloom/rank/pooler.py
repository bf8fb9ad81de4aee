"""Pooler: pools the states of one sequence while its prompt is computed, chunk by chunk. Lives in a rank process."""

from typing import Protocol

import numpy as np

from kvloom.contract.pooling import modes_of
from kvloom.rank.kernels.backend import Floats


class Pooler:
    """All vectors of a pooling, one behind the other."""

    def __init__(self, pooling: str, num_prompt: int) -> None:
        """`pooling`: of modes_of; num_prompt: tokens."""
        self._modes = [_MODES[mode](num_prompt) for mode in modes_of(pooling)]
        assert self._modes, pooling

    def wanted(self, start: int, end: int) -> range:
        """The positions in [start, end) whose states must be added."""
        one, *others = self._modes
        return range(start, end) if others else one.wanted(start, end)

    def add(self, positions: range, states: Floats) -> Floats | None:
        """states [N, hidden] float32 of the wanted `positions` of a chunk.

        Returns the pooled vector, float32, after the last prompt token, else None. A chunk that begins at 0 starts
        over.
        """
        given = self.wanted(positions.start, positions.stop)
        found = []
        for mode in self._modes:
            own = mode.wanted(positions.start, positions.stop)
            first = own.start - given.start
            found.append(mode.add(positions, states[first : first + len(own)]))
        vectors = [vector for vector in found if vector is not None]
        assert len(vectors) in (0, len(found)), "all modes are complete behind the last token"
        return np.concatenate(vectors) if vectors else None


class _Mode(Protocol):
    """One vector of a pooling; as Pooler."""

    def __init__(self, num_prompt: int) -> None: ...

    def wanted(self, start: int, end: int) -> range: ...

    def add(self, positions: range, states: Floats) -> Floats | None: ...


class _First:
    """The first token's state."""

    def __init__(self, num_prompt: int) -> None:
        self._num_prompt = num_prompt
        self._state = b""

    def wanted(self, start: int, end: int) -> range:
        return range(start, min(end, 1))

    def add(self, positions: range, states: Floats) -> Floats | None:
        if len(states):
            self._state = bytes(states[0])
        return np.frombuffer(self._state, np.float32) if positions.stop == self._num_prompt else None


class _Last:
    """The last token's state."""

    def __init__(self, num_prompt: int) -> None:
        self._num_prompt = num_prompt

    def wanted(self, start: int, end: int) -> range:
        return range(max(start, self._num_prompt - 1), end)

    def add(self, positions: range, states: Floats) -> Floats | None:
        last: Floats | None = states[-1] if len(states) else None
        return last


class _Mean:
    """The mean of all. Sums are float64 and added token by token, so that the result does not depend on how a prompt
    was cut into chunks.
    """

    def __init__(self, num_prompt: int) -> None:
        self._num_prompt = num_prompt
        self._num_added = 0
        self._sum = np.empty((1, 0))

    def wanted(self, start: int, end: int) -> range:
        return range(start, end)

    def add(self, positions: range, states: Floats) -> Floats | None:
        if positions.start == 0:
            self._num_added, self._sum = 0, np.zeros((1, states.shape[1]))
        assert positions.start == self._num_added, "a prompt token was left out of the mean, or counted twice"
        self._num_added += len(states)
        self._sum = np.cumsum(np.concatenate((self._sum, states)), axis=0)[-1:]
        if self._num_added < self._num_prompt:
            return None
        mean: Floats = (self._sum[0] / self._num_added).astype(np.float32)
        return mean


_MODES: dict[str, type[_Mode]] = {"last": _Last, "mean": _Mean, "cls": _First}
