"""EmsHiCache: EMS as the storage of SGLang's hierarchical cache (0.5), loaded by its "dynamic" backend.

    python -m sglang.launch_server --enable-hierarchical-cache --hicache-mem-layout page_first
      --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "ems",
        "module_path": "ems.integration.sglang", "class_name": "EmsHiCache", "interface_v1": 1,
        "ems": {"socket": "/run/ems/ems.sock"}}'

With `interface_v1` pages move between SGLang's host memory and the pool without a copy between. A page is one value, of
all its layers, K and V. Models with more than one kind of cache are refused; calls that fail are misses.
"""

import logging
import threading
from collections.abc import Sequence
from secrets import token_hex
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from ems.buffer import KvBufferWrapper
from ems.cc_v1.cc_config import CcConfig_v1, KVCacheType
from ems.circuit import Circuit
from ems.common.exception import EmsErrorCode, EmsException
from ems.config import CcKvOption
from ems.integration.settings import Settings, model_fingerprint
from ems.values.pool import KvPool

log = logging.getLogger(__name__)
_FACTS = ("dtype", "layout", "page_size", "start_layer", "layer_num", "head_num", "head_dim", "v_head_dim",
          "kv_lora_rank", "qk_rope_head_dim")  # fmt: skip
_IN_PIECES, _FLAT = b"pieces@", b"flat@"  # orders of a page's bytes: by the host pool's pieces, or as one tensor


class EmsHiCache(HiCacheStorage):
    """Methods are SGLang's; see its HiCacheStorage for who calls them when. Any thread may call."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """Raises ValueError naming the setting that does not fit."""
        extra = storage_config.extra_config or {}
        settings = extra.get("ems", {})
        if not isinstance(settings, dict):
            raise ValueError("hicache_storage_backend_extra_config.ems: must be an object of settings")
        self._settings = Settings.parse(settings, "hicache_storage_backend_extra_config.ems")
        if storage_config.should_split_heads:
            raise ValueError("tp_lcm_size: EmsHiCache shares pages among instances of the same tensor parallelism only")
        self._config = storage_config
        self._option = CcKvOption(timeout=self._settings.timeout_ms)
        self._lock = threading.Lock()
        self._root = b""
        self._style = _IN_PIECES if extra.get("interface_v1") else _FLAT
        self._pool: KvPool | None = None
        self._circuit: Circuit | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """From now on pages are identified by this pool's layout too."""
        super().register_mem_pool_host(mem_pool_host)
        config = self._config
        identity = CcConfig_v1(
            rank_id=config.tp_rank,
            device_id=0,
            model_id=self._settings.model_id or model_fingerprint(config.model_name or "", ()),
            tp_world_size=config.tp_size,
            pp_world_size=config.pp_size,
            rank_in_tp_group=config.tp_rank,
            rank_in_pp_group=config.pp_rank,
            llm_engine="sglang",
            kvcache_type=KVCacheType.MLA if config.is_mla_model else KVCacheType.GQA,
        )
        of_pool = [(name, str(getattr(mem_pool_host, name, None))) for name in _FACTS]
        shards = (config.attn_cp_size, config.attn_cp_rank, config.dcp_size, config.dcp_rank)
        self.close()
        self._pool = self._settings.open_pool(identity, repr((type(mem_pool_host).__name__, of_pool, shards)))
        self._circuit = Circuit(self._pool.is_healthy)
        self._circuit.wait_for_first_look()

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        raise ValueError(f"{host_pool_name}: EmsHiCache takes models with one kind of cache only")

    # Pages in SGLang's host memory

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._get(_IN_PIECES, keys, self._pages(keys, host_indices))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._put(_IN_PIECES, keys, self._pages(keys, host_indices))

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        found = self._call("exists", self._style, keys, [self._page_bytes()] * len(keys)) or [False]
        return found.index(False) if False in found else len(keys)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def _pages(self, keys: list[str], host_indices: Any) -> list[list[KvBufferWrapper]]:
        """The memory of each page: all its pieces."""
        addresses, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        count, rest = divmod(len(addresses), len(keys)) if keys else (0, 0)
        if rest or len(host_indices) != len(keys) * self.mem_pool_host.page_size:
            raise ValueError(f"{len(host_indices)} indices and {len(addresses)} pieces for {len(keys)} pages")
        pieces = list(map(KvBufferWrapper, addresses, sizes))
        return [pieces[i * count : (i + 1) * count] for i in range(len(keys))]

    # Pages as tensors

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        targets = target_locations
        if targets is None or any(target is None for target in targets):
            targets = [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        found = self._get(_FLAT, keys, targets)
        return [target if is_there else None for target, is_there in zip(targets, found, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [target_location if value is None else value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        given = target_locations if values is None else values
        return all(self._put(_FLAT, keys, [value.contiguous() for value in given]))

    def clear(self) -> None:
        """Pages stored so far are not found any more by this engine: it uses new names, which only it knows."""
        with self._lock:
            self._root = token_hex(16).encode()

    def close(self) -> None:
        for part in (self._circuit, self._pool):
            if part is not None:
                part.close()

    # Calls of the pool

    def _page_bytes(self) -> int:
        pool = self.mem_pool_host
        return int(pool.page_size * pool.get_size_per_token())

    def _get(self, style: bytes, keys: list[str], targets: Sequence[object]) -> list[bool]:
        return self._call("get", style, keys, targets) or [False] * len(keys)

    def _put(self, style: bytes, keys: list[str], values: Sequence[object]) -> list[bool]:
        statuses = self._call("put", style, keys, values)
        return [status.is_success for status in statuses] if statuses else [False] * len(keys)

    def _call(self, name: str, style: bytes, keys: list[str], values: Sequence[object]) -> list[Any]:
        """The results of a call of KvPool; none when the pool failed or is down."""
        if self._pool is None or self._circuit is None:
            raise RuntimeError("EmsHiCache: register_mem_pool_host was not called")
        if not keys or not self._circuit.is_up:
            return []
        with self._lock:
            root = style + self._root
        try:
            results: list[Any] = getattr(self._pool, name)(
                [root + key.encode() for key in keys], list(values), self._option
            )
        except EmsException as error:
            if error.status_code() == EmsErrorCode.EMS_INVALID_ARGUMENT:
                raise
            self._circuit.failed(str(error))
            return []
        self._circuit.succeeded()
        return results
