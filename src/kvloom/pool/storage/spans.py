"""Spans: addresses of blocks' bytes in this process, one block after the other."""

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ems.runs import Bytes, address_of


class Spans:
    """rows [blocks, 2] uint64: address (0 = none) and number of bytes."""

    def __init__(self, rows: npt.NDArray[np.uint64]) -> None:
        """The caller keeps the memory alive."""
        self.rows = rows
        self._kept: Sequence[Bytes | None] = ()

    @classmethod
    def of(cls, memories: Sequence[Bytes | None], lengths: Sequence[int]) -> "Spans":
        """Of arrays, which it keeps alive. None: there is no memory for a block of that length."""
        rows = [
            (0 if memory is None else address_of(memory), length)
            for memory, length in zip(memories, lengths, strict=True)
        ]
        made = cls(np.array(rows, np.uint64).reshape(-1, 2))
        made._kept = memories
        return made

    @property
    def lengths(self) -> list[int]:
        return [int(length) for length in self.rows[:, 1].tolist()]

    def views(self) -> list[Bytes | None]:
        """Each block's memory; None where there is none."""
        rows = self.rows.tolist()
        return [np.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(at)) if at else None for at, n in rows]
