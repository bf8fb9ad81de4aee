"""KvPool: put, get and look up values by keys, with a result for each. For engines that lay out their cache
themselves.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from ems.cc_v1.cc_config import CcConfig_v1
from ems.common.exception import EmsException, internal_error, invalid_argument, io_error, io_timeout
from ems.common.text import is_text
from ems.config import LEGACY_DEFAULT_ACCESS_ID, CcKvOption, EmsConfig, checked_option
from ems.keys import ValueNames
from ems.session import locate_socket
from ems.transport import WAS_CLOSED, Link, LinkPool, deadline_of
from ems.values import moving
from ems.values.memory import Bytes, KvBuffer, bytes_of, check_apart, pieces_of
from ems.values.moving import Batch, KvStatus

_DEFAULT: Final = CcKvOption()
_IO_THREADS = 4
_MAX_LAYOUT = 4096
_MAX_LENGTH = 2**63 - 1
T = TypeVar("T")


class KvPool:
    """Values in one layout of one rank of a model. May be called from any thread; keys are str (its UTF-8) or bytes of
    any size.

    A value is named by its key, its length, the layout, the model instance and the tenant: a get with another length or
    layout finds nothing, never other bytes. The pool is a cache, and the first put of a key wins until it is evicted;
    there is no delete, because no node knows which others have a copy.

    Methods raise EmsException: EMS_INVALID_ARGUMENT for wrong arguments, EMS_IO_ERROR when the pool is gone,
    EMS_IO_TIMEOUT when nothing was decided in time. A call that is cut short later returns what was decided. Futures of
    the asynchronous methods raise the same; until they are done the caller must not touch the memory.
    """

    def __init__(self, config: EmsConfig, layout: str = "", locate: Callable[[float], Path] = locate_socket) -> None:
        """layout: any description of how the bytes are to be read, like "float16|32 layers|NHD|256 tokens". locate:
        finds the agent's socket, given a deadline, or raises OSError. Connects at the first call. Raises
        EmsException(EMS_INVALID_ARGUMENT) that names what is wrong with the config.
        """
        if not isinstance(config, EmsConfig):
            raise invalid_argument("config", "must be an EmsConfig")
        config.validate()
        if not is_text(layout) or len(layout) > _MAX_LAYOUT:
            problem = f"must be a string of at most {_MAX_LAYOUT} characters that UTF-8 can carry"
            raise invalid_argument("layout", problem)
        assert isinstance(config.cc_config, CcConfig_v1)
        self._identity, self._layout = config.cc_config.identity(), layout
        access_id = "" if config.access_id in (None, LEGACY_DEFAULT_ACCESS_ID) else config.access_id or ""
        self._links = LinkPool(locate, access_id, config.access_key or "")
        self._names: tuple[bytes, ValueNames] | None = None
        self._start()
        _pools.add(self)

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._executor = ThreadPoolExecutor(_IO_THREADS, thread_name_prefix="ems-values")

    def after_fork(self) -> None:
        """In a forked child: create connections and threads anew. A closed pool stays closed."""
        self._links.after_fork()
        self._start()
        if self._links.is_closed:
            self._executor.shutdown()

    @staticmethod
    def register(buffer: object) -> KvBuffer:
        """Check memory once, so that its slices are cheap to pass as values and targets.

        A Python buffer, array, tensor on the host (contiguous), or a KvBufferWrapper, which must stay valid.
        """
        data = bytes_of("buffer", buffer, is_written=False)
        if not len(data):
            raise invalid_argument("buffer", "is empty")
        return KvBuffer(data)

    def put(
        self, keys: Sequence[object], values: Sequence[object], option: CcKvOption = _DEFAULT, is_chain: bool = False
    ) -> list[KvStatus]:
        """Store values, and return a result for each. Values behind one that finds no room are not tried.

        A value is a buffer, or a list of buffers that are concatenated in the pool. is_chain: a value is useless
        without those before it, as the chunks of one prefix are; then those at the end are evicted first.
        """
        return self._put(*self._checked(keys, values, option, False), is_chain)

    def get(self, keys: Sequence[object], targets: Sequence[object], option: CcKvOption = _DEFAULT) -> list[bool]:
        """Fill the targets whose values are found, and return for each whether it was; others are unchanged.

        A target has the length of the value asked for; a list of buffers is filled in order. No two may overlap.
        """
        return self._get(*self._checked(keys, targets, option, True))

    def exists(self, keys: Sequence[object], lengths: Sequence[int], option: CcKvOption = _DEFAULT) -> list[bool]:
        """Which of the values with these lengths a get would find now."""
        return self._exists(*self._checked_lengths(keys, lengths, option))

    def async_put(
        self, keys: Sequence[object], values: Sequence[object], option: CcKvOption = _DEFAULT, is_chain: bool = False
    ) -> "Future[list[KvStatus]]":
        """`put` in the background; wrong arguments raise here."""
        return self._later(self._put, *self._checked(keys, values, option, False), is_chain)

    def async_get(
        self, keys: Sequence[object], targets: Sequence[object], option: CcKvOption = _DEFAULT
    ) -> "Future[list[bool]]":
        """`get` in the background; wrong arguments raise here."""
        return self._later(self._get, *self._checked(keys, targets, option, True))

    def async_exists(
        self, keys: Sequence[object], lengths: Sequence[int], option: CcKvOption = _DEFAULT
    ) -> "Future[list[bool]]":
        """`exists` in the background; wrong arguments raise here."""
        return self._later(self._exists, *self._checked_lengths(keys, lengths, option))

    def is_healthy(self, timeout_s: float = 1.0) -> bool:
        """Whether the pool answers in time. Never raises."""
        try:
            self._call(Batch([], [], [], _DEFAULT, time.monotonic() + timeout_s), [], moving.ping)
        except EmsException:
            return False
        return True

    def close(self) -> None:
        """Wait for calls under way, at most until their deadlines. Later calls raise EMS_IO_ERROR."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._links.close()

    def __enter__(self) -> "KvPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Calls whose arguments are checked

    def _put(self, keys: list[bytes], batch: Batch, is_chain: bool) -> list[KvStatus]:
        statuses = [KvStatus.UNANSWERED] * len(keys)
        chained = Batch(batch.values, batch.sizes, [], batch.option, batch.deadline_s, is_chain)
        try:
            self._call(chained, keys, lambda link, named: moving.put(link, named, statuses))
        except EmsException:
            if all(status is KvStatus.UNANSWERED for status in statuses):
                raise
        return statuses

    def _get(self, keys: list[bytes], batch: Batch) -> list[bool]:
        found: list[bool | None] = [None] * len(keys)
        try:
            self._call(batch, keys, lambda link, named: moving.get(link, named, found))
        except EmsException:
            if all(each is None for each in found):
                raise
        return [bool(each) for each in found]

    def _exists(self, keys: list[bytes], batch: Batch) -> list[bool]:
        return self._call(batch, keys, moving.has)

    def _call(self, batch: Batch, keys: list[bytes], call: Callable[[Link, Batch], T]) -> T:
        """Run it over a link, with the batch's values named. Raises EmsException only."""
        if time.monotonic() > batch.deadline_s:
            raise io_timeout("waited for other calls until the deadline")
        try:
            with self._links.lend(batch.deadline_s) as link:
                of_value = self._names_under(link.welcome.key_salt).of_value
                names = list(map(of_value, keys, batch.sizes))
                return call(
                    link, Batch(batch.values, batch.sizes, names, batch.option, batch.deadline_s, batch.is_chain)
                )
        except EmsException:
            raise
        except Exception as error:  # whatever it is, the caller's engine must only see EmsException
            raise internal_error(f"{type(error).__name__}: {error}") from error

    def _later(self, call: Callable[..., T], *arguments: object) -> "Future[T]":
        try:
            return self._executor.submit(call, *arguments)
        except RuntimeError:  # the executor's way of saying that it was shut down
            raise io_error(WAS_CLOSED) from None

    def _names_under(self, salt: bytes) -> ValueNames:
        with self._lock:
            if self._names is None or self._names[0] != salt:
                self._names = (salt, ValueNames(salt, self._identity, self._layout))
            return self._names[1]

    # Checks

    def _checked(
        self, keys: Sequence[object], memory: Sequence[object], option: CcKvOption, is_written: bool
    ) -> tuple[list[bytes], Batch]:
        """The keys as bytes, and the batch without names."""
        name = "targets" if is_written else "values"
        encoded = _checked_keys(keys, name, memory)
        pieces: list[list[Bytes]] = [pieces_of(f"{name}[{i}]", one, is_written) for i, one in enumerate(memory)]
        sizes = [sum(map(len, one)) for one in pieces]
        if is_written:
            check_apart(name, pieces)
        return encoded, _batch(pieces, sizes, option)

    def _checked_lengths(
        self, keys: Sequence[object], lengths: Sequence[int], option: CcKvOption
    ) -> tuple[list[bytes], Batch]:
        encoded = _checked_keys(keys, "lengths", lengths)
        for i, length in enumerate(lengths):
            if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= _MAX_LENGTH:
                raise invalid_argument(f"lengths[{i}]", f"must be a number of bytes from 1 to {_MAX_LENGTH}")
        return encoded, _batch([], list(lengths), option)


def _after_fork() -> None:
    for pool in list(_pools):
        pool.after_fork()


_pools: "weakref.WeakSet[KvPool]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork)


def _batch(pieces: list[list[Bytes]], sizes: list[int], option: CcKvOption) -> Batch:
    settings = checked_option(option)
    return Batch(pieces, sizes, [], settings, deadline_of(settings.timeout, time.monotonic()))


def _checked_keys(keys: object, name: str, others: object) -> list[bytes]:
    """The keys as bytes, one for each of `others`."""
    for field, value in (("keys", keys), (name, others)):
        if not isinstance(value, list | tuple):
            raise invalid_argument(field, f"must be a list, got {type(value).__name__}")
    assert isinstance(keys, list | tuple)
    assert isinstance(others, list | tuple)
    if len(keys) != len(others):
        raise invalid_argument("keys", f"{len(keys)} keys for {len(others)} {name}")
    return [_encoded(i, key) for i, key in enumerate(keys)]


def _encoded(index: int, key: object) -> bytes:
    if isinstance(key, bytes):
        return key
    if not isinstance(key, str):
        raise invalid_argument(f"keys[{index}]", f"must be str or bytes, got {type(key).__name__}")
    try:
        return key.encode()
    except UnicodeEncodeError:
        raise invalid_argument(f"keys[{index}]", "is no text that UTF-8 can carry; give bytes") from None
