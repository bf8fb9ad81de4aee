"""Packed weights between starts: finds the CPU backend's kept file, or writes it beside the first steps."""

import hashlib
import importlib.util
import logging
import mmap
import os
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from kvloom.checkpoints.fingerprint import Stamp, stamp
from kvloom.contract.errors import ModelError
from kvloom.rank.kernels.kept import KeptWeights, Key

log = logging.getLogger(__name__)

_NICENESS = 19
_WORTH_BYTES = 16 << 20  # packing fewer bytes takes no longer than looking for them


class Packed:
    """The packed weights of one model while it is loaded."""

    def __init__(self, kept: KeptWeights, model: Path, before: Stamp, worth_bytes: int = _WORTH_BYTES) -> None:
        """`before`: stamp of the model's files, taken before they were opened."""
        self._kept, self._model, self._worth_bytes = kept, model, worth_bytes
        self._stamp = before
        self._key: Key | None = None
        self.writing: threading.Thread | None = None

    def find(self, layout: tuple[str, str, int], num_bytes: int) -> mmap.mmap | None:
        """The packed bytes for `layout` (weight format, name of the kernels' library, number of threads); None = pack
        them.
        """
        if num_bytes < self._worth_bytes:
            return None
        weight_format, library, num_threads = layout
        try:
            weights = self._kept.fingerprint(self._model)
        except (OSError, ModelError):
            return None
        if not self._is_unchanged():
            return None
        recipe = hashlib.sha256(f"{library} {_recipe()}".encode()).hexdigest()
        self._key = Key(weights, weight_format, library.split("_")[1], recipe, num_threads)
        return self._kept.open(self._key, num_bytes)

    def keep(self, pieces: Sequence[memoryview], owner: object) -> None:
        """Write what `find` did not find, in a thread of the lowest priority; `owner` keeps the memory alive."""
        if self._key is None or not self._is_unchanged():
            return
        key, kept, model = self._key, self._kept, str(self._model)

        def write(owner: object) -> None:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
            kept.keep(key, pieces, model)

        self.writing = threading.Thread(target=write, args=(owner,), name="packed-weights", daemon=True)
        self.writing.start()

    def _is_unchanged(self) -> bool:
        """Whether the files are those that were opened: else other bytes would be kept under their name."""
        return stamp(str(self._model)) == self._stamp


@cache
def _recipe() -> str:
    """Digest of the code that packs a checkpoint: when it changes, everything is packed again."""
    digest = hashlib.sha256()
    for path in recipe_files():
        digest.update(path.read_bytes())
    return digest.hexdigest()


def recipe_files() -> list[Path]:
    """Source files, besides the kernels', that determine packed bytes: readers of files, decoders of blocks, the
    packer.
    """
    here = Path(__file__).parent
    own = ("cpu.py", "expert_program.py", "mixer_program.py", "packer.py", "program.py")
    files = [*(here / name for name in own), *sorted((here.parent.parent / "checkpoints").rglob("*.py"))]
    library = importlib.util.find_spec("gguf")
    if library is not None and library.origin is not None:
        files.append(Path(library.origin).parent / "quants.py")
    return files
