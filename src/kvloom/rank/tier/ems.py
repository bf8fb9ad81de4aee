"""The outer KV tier of a rank in EMS, the elastic memory pool: tier.KvTier over the SDK. Runs in the rank process.

A pool that fails or is late costs one deadline: then the circuit breaker opens, and the pool is left alone until it
recovers.
"""

import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ems import CcConfig, CcFuture, CcKvOption, ContextCaching, Ems, EmsConfig, EmsException, KVCacheType, open_pool
from ems.circuit import FIRST_PAUSE_S, Circuit
from ems.native.tensors import prepare
from ems.values.pool import KvPool
from kvloom.contract.config import TierConfig
from kvloom.contract.errors import BadRequest
from kvloom.contract.messages import Moved, Transfer
from kvloom.contract.states import FoundState
from kvloom.rank.tier.kvmemory import KvMemory
from kvloom.rank.tier.statememory import Bytes
from kvloom.rank.tier.states import VERSION, StateStore
from kvloom.rank.tier.windows import VERSION as WINDOWS_VERSION
from kvloom.rank.tier.windows import WindowStore

log = logging.getLogger(__name__)

SAVE_TIMEOUT_MS = 2000  # deadline of saves: no request waits for one, but its blocks are held
_WORKERS = 4  # states that are moved at once
OPTIONS = ("socket", "access_id", "access_key_file")


@dataclass(frozen=True, slots=True)
class _UnderWay:
    future: CcFuture | Future[Moved]
    is_load: bool


class EmsTier:
    """Implements tier.KvTier. One a process, because the SDK has one connection a process."""

    def __init__(self, memory: KvMemory, config: EmsConfig, timeout_s: float, pause_s: float = FIRST_PAUSE_S) -> None:
        """Waits for the first attempt to connect; a pool that starts later is found by the circuit breaker. timeout_s:
        of a load.
        """
        self._memory = memory
        self._kv = [[_array(part) for part in layer] for layer in memory.layers]
        self._block_size = memory.block_size  # blocks as transfers name them; KvMemory checks the tensors against it
        self._config = config
        self._load_option = CcKvOption(timeout=max(1, int(timeout_s * 1000)))
        self._save_option = CcKvOption(timeout=SAVE_TIMEOUT_MS)
        self._caching: ContextCaching | None = None
        self._complaint = ""
        self._states = _open_states(memory, config)
        self._windows = _open_windows(memory, config)
        self._found: dict[int, Bytes] = {}  # states that wait to be settled, by transfer
        self._loaded: dict[int, list[tuple[int, Bytes]]] = {}  # a window's blocks that were loaded, by transfer
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="kv-states")
        self._under_way: dict[int, _UnderWay] = {}
        self._done: list[Moved] = []
        prepare()  # here, not within a call's deadline: prompts would not be saved while the library is compiled
        self._circuit = Circuit(self._connect, pause_s)
        self._circuit.wait_for_first_look()

    @property
    def is_up(self) -> bool:
        return self._circuit.is_up

    @property
    def pool(self) -> str:
        return self._caching.pool_id if self._caching is not None else ""

    def load(self, transfer: Transfer) -> None:
        self._begin(transfer, is_load=True)

    def save(self, transfer: Transfer) -> None:
        self._begin(transfer, is_load=False)

    def poll(self) -> list[Moved]:
        moved, self._done = self._done, []
        for id in [id for id, work in self._under_way.items() if work.future.done()]:
            moved.append(self._result(id, self._under_way.pop(id)))
        return moved

    def settle(self, found: FoundState) -> None:
        if found.place < 0:
            self._found.pop(found.id, None)
        elif self._memory.states is not None:
            self._memory.states.write(found.place, found.block, self._found.pop(found.id))

    def close(self) -> None:
        self._circuit.close()
        self._workers.shutdown(cancel_futures=True)
        for opened in (self._states, self._windows):
            if opened is not None:
                opened[0].close()
        Ems.shutdown()

    def _begin(self, transfer: Transfer, is_load: bool) -> None:
        if not self.is_up or self._caching is None:
            self._done.append(Moved(transfer.id, 0))
            return
        future: CcFuture | Future[Moved]
        try:
            if transfer.state is not None and self._memory.states is not None:
                data = self._memory.states.read(transfer.state.place, transfer.state.block)
                future = self._workers.submit(self._save_state, transfer, data)
            elif transfer.windows is not None and self._memory.windows is not None and not is_load:
                copies = list(map(self._memory.windows.read, transfer.windows.blocks))
                future = self._workers.submit(self._save_windows, transfer, copies)
            elif transfer.windows is not None:
                until_s = time.monotonic() + self._load_option.timeout / 1000
                future = self._workers.submit(self._load_windows, transfer, until_s)
            elif transfer.search is not None:
                until_s = time.monotonic() + self._load_option.timeout / 1000
                future = self._workers.submit(self._search, transfer, until_s)
            elif is_load:
                future = self._caching.async_load(*self._named(transfer), self._load_option)
            else:
                future = self._caching.async_save(*self._named(transfer), self._save_option)
        except EmsException as error:
            self._circuit.failed(str(error))
            self._done.append(Moved(transfer.id, 0))
            return
        self._under_way[transfer.id] = _UnderWay(future, is_load)

    def _named(self, transfer: Transfer, count: int | None = None) -> tuple[Any, list[int], list[int]]:
        """Slots, hashes and tokens of its first `count` blocks, of all if None."""
        size, blocks = self._block_size, transfer.blocks[:count]
        slots = (np.array(blocks, np.int64)[:, None] * size + np.arange(size)).ravel()
        return slots, [int.from_bytes(key, "big") for key in transfer.keys[:count]], [size] * len(blocks)

    def _save_state(self, transfer: Transfer, data: Bytes) -> Moved:
        assert self._states is not None
        assert transfer.state is not None
        return Moved(transfer.id, int(self._states[1].save(transfer.state, data, self._save_option)))

    def _save_windows(self, transfer: Transfer, copies: list[Bytes]) -> Moved:
        assert self._windows is not None
        assert transfer.windows is not None
        return Moved(transfer.id, self._windows[1].save(transfer.windows.keys, copies, self._save_option))

    def _load_windows(self, transfer: Transfer, until_s: float) -> Moved:
        """Load the longest prefix of which the pool has what is needed: its blocks, and those of its last window."""
        caching, asked = self._caching, transfer.windows
        assert caching is not None
        assert asked is not None
        assert self._windows is not None
        count = caching.exists(self._named(transfer)[1], _left(until_s)) if transfer.keys else 0
        window = self._windows[1].find(asked, asked.num_known + count, _left(until_s))
        if not window:
            return Moved(transfer.id, 0)
        need = max(0, window.stop - asked.num_known)
        loaded = caching.load(*self._named(transfer, need), _left(until_s)).success if need else 0
        keys = asked.keys[window.start - asked.first : window.stop - asked.first]
        found = self._windows[1].load(keys, _left(until_s)) if loaded == need else None
        if found is None:
            return Moved(transfer.id, loaded)
        self._loaded[transfer.id] = list(zip(asked.blocks, found, strict=False))
        return Moved(transfer.id, loaded, window.stop * self._block_size)

    def _search(self, transfer: Transfer, until_s: float) -> Moved:
        """Load the longest state of which the pool has what is needed, and the blocks before it."""
        caching, search = self._caching, transfer.search
        assert caching is not None
        assert search is not None
        assert self._states is not None

        def left() -> CcKvOption:
            return _left(until_s)

        count = caching.exists(self._named(transfer)[1], left()) if transfer.keys else 0
        found = self._states[1].find(search, search.num_known + count, left)
        if found is None:
            return Moved(transfer.id, 0)
        position, data = found
        need = max(0, position // self._block_size - search.num_known)
        loaded = caching.load(*self._named(transfer, need), left()).success if need else 0
        if loaded < need:
            return Moved(transfer.id, loaded)
        self._found[transfer.id] = data
        return Moved(transfer.id, loaded, position)

    def _result(self, id: int, work: _UnderWay) -> Moved:
        """What was moved, with a window's blocks written; a failure of the pool opens the circuit."""
        try:
            result = work.future.result()
        except EmsException as error:
            self._circuit.failed(str(error))
            return Moved(id, 0)
        if work.is_load:  # a pool that accepts saves may still be too slow for loads
            self._circuit.succeeded()
        for block, data in self._loaded.pop(id, []):
            assert self._memory.windows is not None
            self._memory.windows.write(block, data)
        return result if isinstance(result, Moved) else Moved(id, result.success)

    def _connect(self) -> bool:
        """Whether the pool answers. Registers the KV cache at the first success."""
        if self._caching is not None:
            return Ems.check_health()
        try:
            Ems.init(self._config)
            caching = Ems.get_cc()
            assert caching is not None
            caching.register_kvcache(self._kv)
            self._caching = caching
            return True
        except EmsException as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.warning("the KV pool is not used: %s", error)
            return False


def open_tier(memory: KvMemory, config: TierConfig) -> EmsTier:
    """tier.OpenTier. Options: socket (path of the agent's), access_id, access_key_file (path; its first line).

    Raises BadRequest that names the option.
    """
    options = config.options
    unknown = sorted(options.keys() - set(OPTIONS))
    if unknown:
        raise BadRequest(f"kv_tier.options.{unknown[0]}", f"is not known; known are {', '.join(OPTIONS)}")
    if options.get("socket"):
        os.environ["EMS_SOCKET"] = options["socket"]  # the SDK is configured by the environment
    return EmsTier(memory, _ems_config(memory, options), config.timeout_s)


def _ems_config(memory: KvMemory, options: Mapping[str, str]) -> EmsConfig:
    identity = CcConfig(
        rank_id=memory.rank,
        device_id=memory.rank,
        model_id=memory.model,
        tp_world_size=memory.world_size,
        rank_in_tp_group=memory.rank,
        llm_engine=f"kvloom/{memory.layout}",  # part of every key, so that blocks of another layout are never read
        kvcache_type=KVCacheType.GQA,
    )
    config = EmsConfig(options.get("access_id") or None, _access_key(options), identity)
    try:
        config.validate()
    except EmsException as error:
        name, _, problem = error.message().partition(": ")
        raise BadRequest(f"kv_tier.options.{name}", problem) from None
    return config


def _open_states(memory: KvMemory, config: EmsConfig) -> tuple[KvPool, StateStore] | None:
    """The pool of states, whose name tells apart what their keys do not."""
    if memory.states is None:
        return None
    sizes = f"{memory.states.state_bytes}+{memory.states.block_bytes}"
    pool = open_pool(config, f"states {VERSION}: {memory.layout}, {sizes} bytes, {memory.block_size} tokens a block")
    return pool, StateStore(pool, memory.states, memory.block_size)


def _open_windows(memory: KvMemory, config: EmsConfig) -> tuple[KvPool, WindowStore] | None:
    """The same of the blocks of layers with a window."""
    if memory.windows is None:
        return None
    size = f"{memory.windows.block_bytes} bytes a block of {memory.block_size} tokens"
    pool = open_pool(config, f"windows {WINDOWS_VERSION}: {memory.layout}, {size}")
    return pool, WindowStore(pool, memory.windows, memory.block_size)


def _left(until_s: float) -> CcKvOption:
    return CcKvOption(timeout=max(0, int((until_s - time.monotonic()) * 1000)))


def _access_key(options: Mapping[str, str]) -> str | None:
    path = options.get("access_key_file")
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").partition("\n")[0].strip()
    except OSError as error:
        raise BadRequest("kv_tier.options.access_key_file", f"{path} cannot be read: {error.strerror}") from None


def _array(part: Any) -> Any:
    """The same memory as the SDK takes it: numpy's arrays and a device's tensors as they are."""
    return part if hasattr(part, "__dlpack__") else np.asarray(part)
