"""MappedFile: a file's bytes, mapped from the system's page cache."""

import mmap
from pathlib import Path

import numpy as np

from kvloom.checkpoints.files import open_file
from kvloom.checkpoints.quantized.numbers import Bytes
from kvloom.contract.errors import ModelError
from kvloom.mistakes import reason_of


class MappedFile:
    """A plain file as an array of bytes, read when touched."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError."""
        with open_file(path) as file:
            try:
                self._pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise ModelError(f"{path}: cannot be read: {reason_of(error)}") from None
        self._bytes = np.frombuffer(self._pages, np.uint8)
        self.num_bytes = len(self._bytes)

    def part(self, start: int, end: int) -> Bytes:
        """A view. Pages of parts read before leave this process; the system's cache keeps them."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._pages.madvise(mmap.MADV_DONTNEED)
        return np.asarray(self._bytes[start:end])
