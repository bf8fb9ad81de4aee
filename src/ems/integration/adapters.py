"""LoRA adapters by content: requests with the same adapter share blocks, whatever its name and path."""

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ems.integration.settings import model_fingerprint

log = logging.getLogger(__name__)
Stamp = tuple[tuple[str, int, int], ...]


@dataclass(slots=True)
class _Known:
    """An adapter as it was when the engine first used it. future: of its fingerprint, None = it has changed since."""

    path: str
    stamp: Stamp
    future: "Future[str] | None"


class Adapters:
    """Owned by the scheduler's thread; files are read on another one.

    What an engine has loaded under an id is only known while its files stay unchanged: an adapter whose files change,
    or that replaces another, is not shared by this engine any more.
    """

    def __init__(self, fingerprint: Callable[[str], str] = lambda path: model_fingerprint(path, ("lora",))) -> None:
        self._fingerprint = fingerprint
        self._known: dict[int, _Known] = {}
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="ems-adapters")

    def look(self, adapter: Any) -> "Future[str] | None":
        """The fingerprint (a future) of a vLLM LoRARequest; None when it cannot be shared."""
        if getattr(adapter, "load_inplace", False):
            return None
        stamp = _stamp_of(adapter.lora_path)
        known = self._known.get(adapter.lora_int_id)
        if known is None:
            future = self._executor.submit(self._fingerprint, adapter.lora_path) if stamp else None
            known = self._known[adapter.lora_int_id] = _Known(adapter.lora_path, stamp, future)
        elif known.future is not None and (known.path, known.stamp) != (adapter.lora_path, stamp):
            log.warning("adapter %s: its files changed since it was first used; it is not shared", adapter.lora_name)
            known.future = None
        return known.future

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)


def _stamp_of(folder: str) -> Stamp:
    """Name, size and time of each file; empty when it is not a folder of this machine."""
    try:
        with os.scandir(folder) as found:
            stats = [(entry.name, entry.stat()) for entry in found]
    except OSError:
        return ()
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))
