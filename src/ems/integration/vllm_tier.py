"""EmsTier: EMS behind vLLM's own offloading to host memory, as a secondary tier of its TieringOffloadingSpec (0.32).

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
      {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592, "secondary_tiers":
        [{"type": "EmsTier", "module_path": "ems.integration.vllm_tier", "socket": "/run/ems/ems.sock"}]}}'

vLLM moves blocks between the device and host memory; this tier moves them, in chunks, between host memory and the pool.
All methods are called by the scheduler's thread, and none of them waits but `drain_jobs` and `shutdown`.
"""

import hashlib
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

import vllm
from vllm.v1.kv_offload.base import Locality, LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from ems.cc_v1.cc_config import CcConfig_v1
from ems.circuit import Circuit
from ems.common.exception import EmsException
from ems.config import CcKvOption
from ems.integration.settings import Settings, model_fingerprint
from ems.values.memory import KvBuffer
from ems.values.pool import KvPool


@dataclass(frozen=True, slots=True)
class _Job:
    """A transfer under way. future: a result for each key, None when nothing was begun."""

    job: TransferJob
    future: "Future[list[Any]] | None"


class _Lookups(AsyncLookupManager):
    """vLLM's own class: asks on a thread, and remembers answers while requests need them."""

    def __init__(self, tier: "EmsTier") -> None:
        self._tier = tier
        super().__init__(tier_type=tier.tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> Iterable[bool]:
        return self._tier.has(keys)


class EmsTier(SecondaryTierManager):
    """Methods are vLLM's; see its SecondaryTierManager for who calls them when."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **settings: Any,
    ) -> None:
        """settings: as of EMSConnector. Raises ValueError naming the one that does not fit."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality is not None else None
        self._settings = Settings.parse(settings, "secondary_tiers")
        self._option = CcKvOption(timeout=self._settings.timeout_ms)
        self._identity, self._layout = _identity_of(offloading_spec, self._settings, self.block_size_bytes)
        self._memory: KvBuffer = KvPool.register(primary_kv_view)
        self._root = ""
        self._pool = self._settings.open_pool(self._identity, self._layout)
        self._circuit = Circuit(self._pool.is_healthy)
        self._circuit.wait_for_first_look()
        self._jobs: list[_Job] = []
        self._lookups = _Lookups(self)

    # Lookups

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        if not self._circuit.is_up:
            return LookupResult.MISS
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def has(self, keys: list[bytes]) -> list[bool]:
        """Which chunks are in the pool; none when it does not answer. Called on the lookups' thread."""
        if not self._circuit.is_up:
            return [False] * len(keys)
        try:
            return self._pool.exists(self._names(keys), [self.block_size_bytes] * len(keys), self._option)
        except EmsException as error:
            self._circuit.failed(str(error))
            return [False] * len(keys)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    # Transfers

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._begin(job_metadata, self._pool.async_put)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._begin(job_metadata, self._pool.async_get)

    def _begin(self, job: TransferJob, move: Any) -> None:
        future = None
        if self._circuit.is_up:
            try:
                future = move(self._names(job.keys), self._chunks(job), self._option)
            except EmsException as error:
                self._circuit.failed(str(error))
        self._jobs.append(_Job(job, future))

    def get_finished_jobs(self) -> list[JobResult]:
        done = [each for each in self._jobs if each.future is None or each.future.done()]
        self._jobs = [each for each in self._jobs if each not in done]
        return list(map(self._result, done))

    def _result(self, done: _Job) -> JobResult:
        job, results = done.job, [False] * len(done.job.keys)
        if done.future is not None:
            try:
                # a load's results are bools, a store's are statuses
                results = [one if isinstance(one, bool) else one.is_success for one in done.future.result()]
                self._circuit.succeeded()
            except EmsException as error:
                self._circuit.failed(str(error))
        moved = [key for key, is_done in zip(job.keys, results, strict=True) if is_done]
        if job.is_promotion:
            self._lookups.mark_miss([key for key, is_done in zip(job.keys, results, strict=True) if not is_done])
        return JobResult(
            job_id=job.job_id,
            success=all(results),
            successful_keys=tuple(moved) if moved and not all(results) else None,
            transfer_time=time.monotonic() - job.submit_time,
            transfer_bytes=len(moved) * self.block_size_bytes,
        )

    def has_pending_work(self) -> bool:
        return bool(self._jobs)

    def drain_jobs(self) -> None:
        """Wait for transfers under way. vLLM calls this where its cache is reset: when weights change, or may.

        From now on names are different, and known only to this engine, so that nothing of the old weights is found.
        """
        for each in self._jobs:
            if each.future is not None:
                each.future.exception()
        self._root = token_hex(16)
        self._lookups.shutdown()
        self._lookups = _Lookups(self)

    def shutdown(self) -> None:
        self._lookups.shutdown()
        self._circuit.close()
        self._pool.close()

    def _names(self, keys: Iterable[bytes]) -> list[bytes]:
        root = self._root.encode()
        return [root + key for key in keys]

    def _chunks(self, job: TransferJob) -> list[KvBuffer]:
        size = self.block_size_bytes
        return [self._memory[number * size : (number + 1) * size] for number in map(int, job.chunk_ids)]


def _identity_of(spec: Any, settings: Settings, chunk_bytes: int) -> tuple[CcConfig_v1, str]:
    """Identity of the chunks and layout of their bytes: everything that vLLM knows of both."""
    config = spec.config
    parallel = config.parallel
    facts = (vllm.__version__, config.model.dtype)
    identity = CcConfig_v1(
        rank_id=0,
        device_id=0,
        model_id=settings.model_id or model_fingerprint(config.model.name, facts),
        tp_world_size=parallel.tp_size,
        pp_world_size=parallel.pp_size,
        llm_engine=f"vllm-tier/{vllm.__version__}",
    )
    groups = [(group.group_id, group.tokens_per_block, group.layer_names) for group in config.groups]
    layout = (
        chunk_bytes,
        config.model.dtype,
        config.cache.tokens_per_hash,
        config.cache.blocks_per_chunk,
        config.worker_kv_bytes_per_block,
        parallel.world_size,
        parallel.pcp_size,
        parallel.dcp_size,
        config.replicated_layout,
        config.canonical_layout,
        config.kv_cache_layout,
    )
    return identity, repr(layout) + hashlib.sha256(repr(groups).encode()).hexdigest()
