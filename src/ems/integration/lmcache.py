"""EmsL2Adapter: EMS as an L2 of LMCache 0.5 (MP mode), loaded by its plug-in adapter.

  lmcache server --l2-adapter '{"type": "plugin", "module_path": "ems.integration.lmcache",
    "class_name": "EmsL2Adapter", "adapter_params": {"socket": "/run/ems/ems.sock"}}'

LMCache identifies a model by its name only. Use another `model_id` when the weights under a name change. There are no
locks: what is evicted between lookup and load is a miss of the load, which LMCache allows.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from ems.cc_v1.cc_config import CcConfig_v1
from ems.circuit import Circuit
from ems.common.exception import EmsErrorCode, EmsException
from ems.config import CcKvOption
from ems.integration.settings import Settings
from ems.values.moving import KvStatus

log = logging.getLogger(__name__)


class EmsL2Adapter(L2AdapterInterface):
    """Methods are LMCache's; see its L2AdapterInterface for who calls them when. Any thread may call."""

    def __init__(self, config: dict[str, Any], l1_memory_desc: Any = None) -> None:
        """config: adapter_params, as the settings of EMSConnector. Raises ValueError naming what does not fit."""
        super().__init__()
        self._settings = Settings.parse(config, "adapter_params")
        identity = CcConfig_v1(0, 0, self._settings.model_id or "lmcache", llm_engine="lmcache")
        self._option = CcKvOption(timeout=self._settings.timeout_ms)
        self._pool = self._settings.open_pool(identity, "objects of LMCache's L2")
        self._circuit = Circuit(self._pool.is_healthy)
        self._circuit.wait_for_first_look()
        self._stored, self._looked_up, self._loaded = (create_event_notifier() for _ in range(3))
        self._lock = threading.Lock()
        self._next_task = 0
        self._stores: dict[int, L2StoreResult] = {}
        self._results: dict[int, Bitmap] = {}  # of lookups and loads
        self._layouts: dict[tuple[str, int], tuple[int, str]] = {}  # layout of a model's object group, as last stored

    def get_store_event_fd(self) -> int:
        return int(self._stored.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._looked_up.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._loaded.fileno())

    # Stores

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        layouts = [(each.get_size(), _layout_of_object(each)) for each in objects]
        with self._lock:
            self._layouts.update(
                {(key.model_name, key.object_group_id): layout for key, layout in zip(keys, layouts, strict=True)}
            )
        names = [_name(key, layout) for key, (_size, layout) in zip(keys, layouts, strict=True)]
        memory = [each.byte_array for each in objects]

        def finish(task: int, statuses: Sequence[KvStatus]) -> None:
            sizes = [size for size, _layout in layouts]
            stored = [i for i, status in enumerate(statuses) if status in (KvStatus.STORED, KvStatus.LOCAL)]
            is_whole = len(statuses) == len(keys) and all(status.is_success for status in statuses)
            with self._lock:
                self._stores[task] = L2StoreResult(is_whole, sum(sizes[i] for i in stored))
            if stored:
                self._notify_keys_stored([keys[i] for i in stored], [sizes[i] for i in stored])
            self._stored.notify()

        return self._begin(lambda: self._pool.async_put(names, memory, self._option), finish)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            done, self._stores = self._stores, {}
        return done

    # Lookups

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        expected = [self._expected(key, group_layout_descs) for key in keys]
        known = [i for i, layout in enumerate(expected) if layout is not None]
        names = [_name(keys[i], expected[i][1]) for i in known]  # type: ignore[index]
        sizes = [expected[i][0] for i in known]  # type: ignore[index]

        def finish(task: int, found: Sequence[bool]) -> None:
            hits = [i for i, is_there in zip(known, found, strict=False) if is_there]
            self._finish(task, len(keys), hits, self._looked_up)

        return self._begin(lambda: self._pool.async_exists(names, sizes, self._option), finish)

    def _expected(self, key: Any, descriptions: dict[int, Any]) -> "tuple[int, str] | None":
        """Bytes and layout of an object to be loaded; None while unknown."""
        description = descriptions.get(key.object_group_id)
        if description is None or not description.shapes:
            with self._lock:
                return self._layouts.get((key.model_name, key.object_group_id))
        sizes = (s.numel() * d.itemsize for s, d in zip(description.shapes, description.dtypes, strict=True))
        return sum(sizes), _layout_of(description.shapes, description.dtypes)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Nothing was locked."""

    # Loads

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        layouts = list(map(_layout_of_object, objects))
        names = [_name(key, layout) for key, layout in zip(keys, layouts, strict=True)]
        memory = [each.byte_array for each in objects]

        def finish(task: int, found: Sequence[bool]) -> None:
            hits = [i for i, is_there in enumerate(found) if is_there]
            if hits:
                self._notify_keys_accessed([keys[i] for i in hits])
            self._finish(task, len(keys), hits, self._loaded)

        return self._begin(lambda: self._pool.async_get(names, memory, self._option), finish)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._take(task_id)

    # All of them

    def _begin(self, call: "Callable[[], Future[Any]]", finish: Callable[[int, Sequence[Any]], None]) -> int:
        """Start a task; `finish` is called once with its results, or without any when the pool failed or is down."""
        with self._lock:
            task = self._next_task
            self._next_task += 1

        def end(future: "Future[Any]") -> None:
            try:
                results = future.result()
                self._circuit.succeeded()
            except EmsException as error:
                self._failed(error)
                results = []
            finish(task, results)

        try:
            future = call() if self._circuit.is_up else None
        except EmsException as error:
            self._failed(error)
            future = None
        if future is None:
            finish(task, [])
        else:
            future.add_done_callback(end)
        return task

    def _failed(self, error: EmsException) -> None:
        """A call failed; unless its arguments were wrong, the pool is not called for a while."""
        if error.status_code() == EmsErrorCode.EMS_INVALID_ARGUMENT:
            log.error("a call of EMS was wrong: %s", error)
        else:
            self._circuit.failed(str(error))

    def _finish(self, task: int, count: int, hits: list[int], notifier: Any) -> None:
        bitmap = Bitmap(count)
        bitmap.batched_set(hits)
        with self._lock:
            self._results[task] = bitmap
        notifier.notify()

    def _take(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._results.pop(task_id, None)

    def close(self) -> None:
        self._circuit.close()
        self._pool.close()
        for notifier in (self._stored, self._looked_up, self._loaded):
            notifier.close()

    def report_status(self) -> dict[str, Any]:
        return {"is_healthy": self._circuit.is_up, "type": "EmsL2Adapter", "socket": self._settings.socket}


def _layout_of(shapes: Sequence[Any], dtypes: Sequence[Any]) -> str:
    return "|".join(f"{dtype}{list(shape)}" for shape, dtype in zip(shapes, dtypes, strict=True))


def _layout_of_object(memory: Any) -> str:
    """The layout of a MemoryObj, which has one or several shapes."""
    about = memory.metadata
    return _layout_of(about.shapes or [about.shape], about.dtypes or [about.dtype])


def _name(key: Any, layout: str) -> bytes:
    """Everything that identifies an object. LMCache's texts contain no "@"."""
    text = f"{key.model_name}@{key.kv_rank}@{key.object_group_id}@{key.cache_salt}@{layout}@"
    chunk_hash: bytes = key.chunk_hash
    return text.encode() + chunk_hash
