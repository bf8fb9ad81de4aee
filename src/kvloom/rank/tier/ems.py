"""The outer KV tier of a rank in EMS, the elastic memory pool: tier.KvTier over the SDK. Runs in the rank process.

A pool that fails or is late costs one deadline: then the circuit breaker opens, and the pool is left alone until it
recovers.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ems import CcConfig, CcFuture, CcKvOption, ContextCaching, Ems, EmsConfig, EmsException, KVCacheType
from ems.circuit import FIRST_PAUSE_S, Circuit
from ems.native.tensors import prepare
from kvloom.contract.config import TierConfig
from kvloom.contract.errors import BadRequest
from kvloom.contract.messages import Moved, Transfer
from kvloom.rank.tier.kvmemory import KvMemory

log = logging.getLogger(__name__)

SAVE_TIMEOUT_MS = 2000  # deadline of saves: no request waits for one, but its blocks are held
OPTIONS = ("socket", "access_id", "access_key_file")


@dataclass(frozen=True, slots=True)
class _UnderWay:
    future: CcFuture
    is_load: bool


class EmsTier:
    """Implements tier.KvTier. One a process, because the SDK has one connection a process."""

    def __init__(self, memory: KvMemory, config: EmsConfig, timeout_s: float, pause_s: float = FIRST_PAUSE_S) -> None:
        """Waits for the first attempt to connect; a pool that starts later is found by the circuit breaker. timeout_s:
        of a load.
        """
        self._kv = [[_array(part) for part in layer] for layer in memory.layers]
        self._block_size = memory.block_size  # blocks as transfers name them; KvMemory checks the tensors against it
        self._config = config
        self._load_option = CcKvOption(timeout=max(1, int(timeout_s * 1000)))
        self._save_option = CcKvOption(timeout=SAVE_TIMEOUT_MS)
        self._caching: ContextCaching | None = None
        self._complaint = ""
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
            moved.append(Moved(id, self._result(self._under_way.pop(id))))
        return moved

    def close(self) -> None:
        self._circuit.close()
        Ems.shutdown()

    def _begin(self, transfer: Transfer, is_load: bool) -> None:
        if not self.is_up or self._caching is None:
            self._done.append(Moved(transfer.id, 0))
            return
        size = self._block_size
        slots = (np.array(transfer.blocks, np.int64)[:, None] * size + np.arange(size)).ravel()
        hashes = [int.from_bytes(key, "big") for key in transfer.keys]
        try:
            if is_load:
                future = self._caching.async_load(slots, hashes, [size] * len(hashes), self._load_option)
            else:
                future = self._caching.async_save(slots, hashes, [size] * len(hashes), self._save_option)
        except EmsException as error:
            self._circuit.failed(str(error))
            self._done.append(Moved(transfer.id, 0))
            return
        self._under_way[transfer.id] = _UnderWay(future, is_load)

    def _result(self, work: _UnderWay) -> int:
        """Number of blocks of the prefix that were moved; a failure of the pool opens the circuit."""
        try:
            count = work.future.result().success
        except EmsException as error:
            self._circuit.failed(str(error))
            return 0
        if work.is_load:  # a pool that accepts saves may still be too slow for loads
            self._circuit.succeeded()
        return count

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
