"""ContextCaching: save and load the KV cache of a prefix, block by block (spec ems 8)."""

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ems import pipeline, road
from ems.blocks import Arguments, Cache, Request, plan, plan_counts, plan_hashes
from ems.buffer import RegisteredCache, Snapshot
from ems.cc_v1.cc_config import CcConfig_v1
from ems.common.exception import EmsErrorCode, EmsException, internal_error, invalid_argument, io_error, io_timeout
from ems.config import CcKvOption, CcResult, checked_option
from ems.keys import KeySpace
from ems.native.calls import NOT_PLAIN, Given, How, NativeCalls
from ems.native.functions import Plan
from ems.native.plan import native_names, native_planner
from ems.profiling import Profiler
from ems.transport import Link, LinkPool, deadline_of

WAS_SHUT_DOWN = "Ems was shut down"
_DEFAULT: Final = CcKvOption()
_IO_THREADS = 4
_MAX_SNAPSHOT_BYTES = 1 << 30  # bytes of copies waiting to be saved; further saves are waited for


@dataclass(slots=True)
class _Call:
    """A save or load with checked arguments, before it is sent to the agent."""

    is_load: bool
    arguments: Arguments  # planned again when the agent has another salt
    salt: bytes  # salt of the names in `request`
    request: Request | Plan
    option: CcKvOption
    start_s: float
    is_async: bool = False
    source: Snapshot | None = None  # a copy of the blocks to save; None = they are read where they are

    @property
    def name(self) -> str:
        """Its name in the profiler's lines."""
        return ("async_" if self.is_async else "") + ("load" if self.is_load else "save")


class CcFuture:
    """Result of an asynchronous call. Until it is done the caller must not touch its blocks in the registered cache."""

    def __init__(self, future: "Future[CcResult]") -> None:
        self._future = future

    def result(self) -> CcResult:
        """Wait for the result, at most until the call's deadline. Raises EmsException as the call would have."""
        return self._future.result()

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self._future.done()


class ContextCaching:
    """The pool as seen by one rank of a model. Made by `Ems.init`; may be called from any thread.

    Methods raise EmsException: EMS_INVALID_ARGUMENT for wrong arguments, EMS_IO_ERROR when the pool is gone,
    EMS_IO_TIMEOUT when nothing was decided in time. Misses, damaged blocks and a full pool only show in CcResult.
    """

    def __init__(self, links: LinkPool, config: CcConfig_v1, profiler: Profiler) -> None:
        self._links = links
        self._identity = config.identity()  # as it is now: its attributes may be set later
        self._profiler = profiler
        self._has_snapshots = os.environ.get("EMS_ASYNC_SNAPSHOT") == "1"
        self._cache: RegisteredCache | None = None
        self._key_space: tuple[bytes, Cache] | None = None
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._snapshot_bytes = 0
        self._executor = ThreadPoolExecutor(_IO_THREADS, thread_name_prefix="ems-io")

    @property
    def pool_id(self) -> str:
        """Identifies the pool and the tenant in it: equal where the same blocks are found. "" before the first call."""
        return self._links.pool_id.hex()

    def register_kvcache(self, kvcache: object, store_layer_group_desc: object = None) -> None:
        """Says where the KV cache lies: per layer a list of tensors [blocks, block_size, heads, head_size].

        Tensors on CPU, CUDA or NPU; all of one device and dtype. Registering again replaces the cache.
        store_layer_group_desc: lists of layer numbers, every layer once. Calls then say by chunk_descs, instead of
        slot_mapping and offsets, where each group has a hash's tokens: chunk_descs[group][i] = (start_slot, length).
        """
        cache = RegisteredCache(kvcache, store_layer_group_desc)
        with self._lock:
            self._cache = cache
            self._key_space = None

    def save(
        self,
        slot_mapping: object = None,
        hashes: object = None,
        offsets: object = None,
        option: CcKvOption | None = _DEFAULT,
        **kwargs: Any,
    ) -> CcResult:
        """Saves blocks: slots with hashes and tokens a block (`offsets`), or with token_ids and mask as keywords."""
        arguments = Arguments(slot_mapping, hashes, offsets, kwargs)
        done = self._at_once(arguments, option, is_load=False)
        return done if done is not None else self._run(self._checked(arguments, option, is_load=False))

    def load(
        self,
        slot_mapping: object = None,
        hashes: object = None,
        offsets: object = None,
        option: CcKvOption | None = _DEFAULT,
        **kwargs: Any,
    ) -> CcResult:
        """Loads the contiguous prefix of blocks that the pool has; the rest of the cache stays untouched."""
        arguments = Arguments(slot_mapping, hashes, offsets, kwargs)
        done = self._at_once(arguments, option, is_load=True)
        return done if done is not None else self._run(self._checked(arguments, option, is_load=True))

    def async_save(
        self,
        slot_mapping: object = None,
        hashes: object = None,
        offsets: object = None,
        option: CcKvOption | None = _DEFAULT,
        **kwargs: Any,
    ) -> CcFuture:
        """`save` in the background; wrong arguments raise here. The blocks must not change until it is done.

        With EMS_ASYNC_SNAPSHOT=1 they are copied before this returns, and may change.
        """
        return self._later(self._checked(Arguments(slot_mapping, hashes, offsets, kwargs), option, is_load=False))

    def async_load(
        self,
        slot_mapping: object = None,
        hashes: object = None,
        offsets: object = None,
        option: CcKvOption | None = _DEFAULT,
        **kwargs: Any,
    ) -> CcFuture:
        """`load` in the background; wrong arguments raise here. The blocks must not be used until it is done."""
        return self._later(self._checked(Arguments(slot_mapping, hashes, offsets, kwargs), option, is_load=True))

    def is_ready(self, ccfuture: CcFuture) -> bool:
        """Whether the call is done; never waits (spec ems 8.6)."""
        return _checked_future(ccfuture).done()

    def get_result(self, ccfuture: CcFuture) -> CcResult:
        """Waits for the call's result (spec ems 8.7); counts blocks, as the synchronous calls do."""
        return _checked_future(ccfuture).result()

    def exists(self, hashes: object, option: CcKvOption | None = _DEFAULT, offsets: object = None) -> int:
        """How many blocks of `hashes`, from the first on, a load would find; 0 when the pool does not answer.

        offsets: tokens of each block, as in `save`; without it all are full blocks, and a short one is not found.
        """
        try:
            found = self._exists_at_once(hashes, option) if offsets is None else None
            if found is not None:
                return found
            settings, values = checked_option(option), plan_hashes(hashes)
            counts = plan_counts(values, offsets) if offsets is not None else None
            deadline_s = deadline_of(settings.timeout, time.monotonic())
            with self._links.lend(deadline_s) as link:
                cache = self._planning_cache(link.welcome.key_salt)
                if counts is None:
                    keys = cache.names(values)
                else:
                    keys = cache.keys.of_chunks(values, np.array(counts, np.int64)[:, None])
                return link.exists(keys, settings.read_local_only, deadline_s)
        except EmsException as error:
            if error.status_code() == EmsErrorCode.EMS_INVALID_ARGUMENT:
                raise
            return 0

    def _registered(self) -> RegisteredCache:
        if self._cache is None:
            raise invalid_argument("kvcache", "call register_kvcache first")
        return self._cache

    def _planning_cache(self, salt: bytes) -> Cache:
        """The names of blocks under the tenant's salt, computed once for each agent and layout."""
        registered = self._registered()
        with self._lock:
            if self._key_space is None or self._key_space[0] != salt:
                keys = KeySpace(salt, self._identity, registered.layout, native_names())
                size, num_slots, groups = registered.block_size, registered.num_slots, registered.groups
                planner = None if groups else native_planner(registered.tensors, (size, num_slots), keys.hash_base)
                self._key_space = (salt, Cache(keys, size, num_slots, groups, planner))
            return self._key_space[1]

    def _whole(self) -> tuple[Link, NativeCalls] | None:
        """A link, and calls over it in one step, where there are any."""
        salt, cache = self._key_space or (b"", None)
        return road.whole(self._links, salt, cache)

    def _at_once(self, arguments: Arguments, option: CcKvOption | None, is_load: bool) -> CcResult | None:
        """A plain call over an existing link, in one step; None where nothing was done and another road is taken."""
        start_s = time.monotonic()
        how = _how(start_s, option)
        way = self._whole() if not arguments.others else None
        if way is None:
            return None
        begun = _begin(*way, arguments[:3], how, is_load)
        if begun.problem and begun.problem != NOT_PLAIN:
            return self._try(replace(self._checked(arguments, option, is_load), start_s=start_s), begun)
        return self._finished(begun, "load" if is_load else "save", start_s)

    def _planned_at_once(self, call: _Call) -> CcResult | None:
        """The same for a call that was planned before."""
        how = _how(call.start_s, call.option)
        if not isinstance(call.request, Plan) or call.source is not None or time.monotonic_ns() > how.deadline_ns:
            return None
        way = self._whole()
        if way is None:
            return None
        link, calls = way
        if link.welcome.key_salt != call.salt:
            self._links.give_back(link)
            return None
        begun = _begin(link, calls, call.request, how, call.is_load)
        if begun.problem and begun.problem != NOT_PLAIN:
            return self._try(call, begun)
        return self._finished(begun, call.name, call.start_s)

    def _finished(self, begun: pipeline.Begun, name: str, start_s: float) -> CcResult | None:
        """The result of a call that C++ has finished, or not begun."""
        link, last = begun.link, begun.calls.last
        result = CcResult(last.count, last.total) if begun.problem == 0 else None
        if result is not None and self._profiler.is_on:
            self._profiler.record(name, result.total, result.success, last.done_bytes, start_s)
        self._links.give_back(link)
        return result

    def _exists_at_once(self, hashes: object, option: CcKvOption | None) -> int | None:
        """The same for `exists`."""
        how = _how(time.monotonic(), option)
        way = self._whole()
        if way is None:
            return None
        link, calls = way
        problem = calls.exists(hashes, how)
        if problem and problem != NOT_PLAIN:
            with self._links.lend(how.deadline_ns / 1e9, link):
                link.check(problem)
        found = calls.last.count if problem == 0 else None
        self._links.give_back(link)
        return found

    def _checked(self, arguments: Arguments, option: CcKvOption | None, is_load: bool) -> _Call:
        """Check arguments before anything is sent; names use the last agent's salt."""
        settings, start_s = checked_option(option), time.monotonic()
        salt = self._key_space[0] if self._key_space else b""
        request = self._planned(salt, arguments, is_load)
        return _Call(is_load, arguments, salt, request, settings, start_s)

    def _planned(self, salt: bytes, arguments: Arguments, is_load: bool) -> Request | Plan:
        """By C++ where possible; Python reports whatever is wrong."""
        cache = self._planning_cache(salt)
        if cache.planner is not None and not arguments.others:
            found = cache.planner.plan(arguments.slot_mapping, arguments.hashes, arguments.offsets)
            if found is not None:
                return found
        return plan(cache, arguments, is_load)

    def _later(self, call: _Call) -> CcFuture:
        wants_snapshot = self._has_snapshots and not call.is_load
        if wants_snapshot:
            call = replace(call, request=plan(self._planning_cache(call.salt), call.arguments))
        source = self._snapshot(call.request) if isinstance(call.request, Request) and wants_snapshot else None
        try:
            future = self._executor.submit(self._run, replace(call, is_async=True, source=source))
        except RuntimeError:  # the executor's way of saying that it was shut down
            self._count_snapshot(-source.num_bytes if source else 0)
            raise io_error(WAS_SHUT_DOWN) from None
        if source is None and wants_snapshot:
            future.exception()  # no room for a copy: the caller may change the blocks only after the save
        return CcFuture(future)

    def _snapshot(self, request: Request) -> Snapshot | None:
        """A copy of the blocks; None when too many bytes of copies wait already."""
        cache = self._registered()
        size = int(cache.sizes(request).sum())
        with self._lock:
            if self._snapshot_bytes + size > _MAX_SNAPSHOT_BYTES:
                return None
            self._snapshot_bytes += size
        try:
            return Snapshot(cache, request)
        except BaseException:
            self._count_snapshot(-size)
            raise

    def _count_snapshot(self, num_bytes: int) -> None:
        with self._lock:
            self._snapshot_bytes += num_bytes

    def _run(self, call: _Call) -> CcResult:
        try:
            done = self._planned_at_once(call) if call.is_async else None
            return done if done is not None else self._try(call)
        finally:
            if call.source is not None:
                self._count_snapshot(-call.source.num_bytes)

    def _try(self, call: _Call, begun: pipeline.Begun | None = None) -> CcResult:
        deadline_s = deadline_of(call.option.timeout, call.start_s)
        total, progress = len(call.request), pipeline.Progress()
        if total == 0:
            return CcResult(0, 0)
        if begun is None and time.monotonic() > deadline_s:
            raise io_timeout("waited for other calls until the deadline")
        try:
            with self._links.lend(deadline_s, begun.link if begun else None) as link:
                request = self._request_for(link, call)
                transfer = pipeline.Transfer(link, request, call.option, deadline_s, progress)
                if call.is_load:
                    pipeline.load(transfer, self._registered(), begun)
                else:
                    pipeline.save(transfer, call.source or self._registered(), begun)
        except EmsException:
            if progress.success == 0:
                raise
        except Exception as error:  # whatever it is, the caller's engine must only see EmsException
            raise internal_error(f"{type(error).__name__}: {error}") from error
        finally:
            self._profiler.record(call.name, total, progress.success, progress.num_bytes, call.start_s)
        return CcResult(progress.success, total, progress.local)

    def _request_for(self, link: Link, call: _Call) -> Request | Plan:
        """The call's request, planned again if the agent has another salt, or if only Python can carry it out."""
        request, salt = call.request, link.welcome.key_salt
        if salt != call.salt:
            request = self._planned(salt, call.arguments, call.is_load)
        if isinstance(request, Plan) and (call.source is not None or not road.is_planned(link)):
            request = plan(self._planning_cache(salt), call.arguments, call.is_load)
        return request

    def close(self) -> None:
        """Waits for calls under way, at most until their deadlines."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def after_fork(self) -> None:
        """In a forked child: the parent's threads do not exist here; new ones start on demand."""
        self._start()


def _how(start_s: float, option: CcKvOption | None) -> How:
    """Parameters of a call in C++. Raises EMS_INVALID_ARGUMENT."""
    settings = checked_option(option) if option is not _DEFAULT else _DEFAULT
    is_local = settings.read_local_only or settings.timeout == 0
    return How(int(deadline_of(settings.timeout, start_s) * 1e9), is_local, settings.write_rcache)


def _begin(link: Link, calls: NativeCalls, what: Given, how: How, is_load: bool) -> pipeline.Begun:
    problem = calls.load(what, how, link.mapped) if is_load else calls.save(what, how, link.mapped, link.staging)
    return pipeline.Begun(link, calls, problem)


def _checked_future(ccfuture: object) -> CcFuture:
    if not isinstance(ccfuture, CcFuture):
        raise invalid_argument("ccfuture", "must be what async_save or async_load returned")
    return ccfuture
