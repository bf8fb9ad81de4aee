"""InferenceEngine (spec 3.3.1.2.1): a model behind callbacks, without HTTP."""

import asyncio
import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest, ServingError, UserError
from kvloom.contract.request import Delta, FinishReason, Request
from kvloom.engine.thread import EngineThread
from kvloom.engine_api.codes import OK, Code, InferResponseEndFlag, Operation, Status
from kvloom.engine_api.requests import InferenceRequest, InferenceResponse, RequestId, SendResponseCallback
from kvloom.rank.opening import model_tokenizer, open_engine
from kvloom.server.run.launch import read_engine_config

log = logging.getLogger(__name__)

_END_WAIT_S = 2.0  # how long `finalize` waits for last responses after the engine has ended

Flag = InferResponseEndFlag
_FLAGS = {
    FinishReason.EOS: Flag.INFER_RESPONSE_EOS,
    FinishReason.STOP: Flag.INFER_RESPONSE_EOS,
    FinishReason.ABORT: Flag.INFER_RESPONSE_CANCEL,
    FinishReason.ERROR: Flag.INFER_RESPONSE_EXEC_ERROR,
    None: Flag.INFER_RESPONSE_CONTINUE,
}


class BlockQuotas(NamedTuple):
    """What could start at once, in addition to requests that were handed over already."""

    remain_blocks: int  # KV blocks
    remain_prefill_slots: int  # requests
    remain_prefill_tokens: int


@dataclass(slots=True)
class _Live:
    """A request between `forward` and its last response."""

    request: InferenceRequest
    inner: Request
    callback: SendResponseCallback
    num_output: int = 0


class InferenceEngine:
    """init ... finalize. Methods may be called from any thread; callbacks run one after another on a thread of its own.

    A callback that raises is logged, its request is stopped, and `finalize` reports the first such error. In the child
    of a fork no engine is initialised; the child may `init` its own.
    """

    def __init__(self) -> None:
        self._reset()
        _engines.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()  # guards the attributes below
        self._live: dict[str, _Live] = {}
        self._engine: EngineThread | None = None
        self._callback_error: str | None = None
        self._is_open = False
        self._tasks: set[asyncio.Task[None]] = set()  # of the loop's thread; the loop itself holds tasks only weakly

    def init(
        self, callback: SendResponseCallback | None = None, config_path: "str | Path | EngineConfig" = ""
    ) -> Status:
        """Load the model of a config.json ("" = conf/config.json), or of an EngineConfig, and start.

        `callback` gets the responses of requests without a callback of their own.
        """
        with self._lock:
            if self._engine is not None:
                return Status(Code.ERROR, "the engine is initialised already; finalize it first")
            try:
                config = config_path if isinstance(config_path, EngineConfig) else _config_of(config_path)
                load = functools.cache(functools.partial(model_tokenizer, config.model))
                self._engine = open_engine(config, load)
            except (UserError, OSError) as error:
                return Status(Code.INVALID_ARG if isinstance(error, BadRequest) else Code.ERROR, str(error))
            self._config, self._callback, self._tokenizer = config, callback, load()
            self._callback_error = None
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="engine-api", daemon=True)
            self._thread.start()
            self._engine.start(self._loop)
            self._is_open = True
        return OK

    def forward(self, request: InferenceRequest, valid_request: bool = False) -> Status:
        """Start a request; its responses arrive at the callback, the last with a flag that is not CONTINUE.

        With `valid_request` token ids and lengths are checked here; otherwise an invalid one ends with ILLEGAL_INPUT.
        """
        with self._lock:
            engine = self._engine
            if not self._is_open or engine is None:
                return _not_ready()
            callback, tokenizer = request.callback or self._callback, self._tokenizer
        if callback is None:
            return Status(Code.INVALID_ARG, "callback: give one to init or to the request")
        try:
            # without the lock: a long text takes seconds where it cannot be read in parts
            inner = request.get_request_inner(tokenizer, engine.max_seq_len)
            if valid_request:
                _check_ids(inner, engine)
        except (BadRequest, OverflowError) as error:
            return Status(Code.INVALID_ARG, str(error))
        with self._lock:
            if not self._is_open or self._engine is not engine:
                return _not_ready()
            if inner.id in self._live:
                return Status(Code.INVALID_ARG, f"request_id: {request.get_request_id()} is in use")
            live = self._live[inner.id] = _Live(request, inner, callback)
            self._loop.call_soon_threadsafe(lambda: self._start(self._follow(engine, live)))
        return OK

    def control_request(self, request_id: RequestId | str | int, operation: Operation) -> Status:
        """STOP ends the request: its last response has the flag CANCEL."""
        if operation is not Operation.STOP:
            return Status(Code.INVALID_ARG, f"operation: must be STOP, got {operation!r}")
        with self._lock:
            key = RequestId(request_id).key()
            if self._engine is None or key not in self._live:
                return Status(Code.NOT_FOUND, f"no running request {request_id}")
            self._loop.call_soon_threadsafe(lambda: self._start(self._stop(key)))  # behind its own start
        return OK

    def get_processing_request(self) -> tuple[Status, int]:
        """Number of requests that have not had their last response."""
        with self._lock:
            return OK, len(self._live)

    def get_max_batch_size(self) -> tuple[Status, int]:
        """Sequences of a batch at most (maxBatchSize); 0 and a failed status before `init`."""
        with self._lock:
            if self._engine is None:
                return _not_ready(), 0
            return OK, self._config.max_batch

    def get_request_block_quotas(self) -> tuple[Status, BlockQuotas]:
        """Quotas as of the last step, less what requests need that were handed over and have not started."""
        with self._lock:
            if self._engine is None:
                return _not_ready(), BlockQuotas(0, 0, 0)
            block_size = self._engine.info.block_size
            limits, stats = self._config.limits(block_size), self._engine.stats()
            begun_not = [live.inner for live in self._live.values() if live.num_output == 0]
            lengths = [len(inner.prompt_ids) for inner in begun_not]
            free = stats.num_free_blocks if stats.num_blocks else self._engine.info.num_blocks
            return OK, BlockQuotas(
                max(0, free - sum(-(-length // block_size) for length in lengths)),
                max(0, limits.prefill_slots - len(lengths)),
                max(0, limits.prefill_tokens - sum(lengths)),
            )

    def finalize(self) -> Status:
        """End running requests (flag EXEC_ERROR), the model and the threads. Must not be called in a callback."""
        with self._lock:
            engine = self._engine
            if engine is None or not self._is_open:
                return _not_ready()
            if threading.current_thread() is self._thread:
                return Status(Code.ERROR, "finalize cannot be called from a callback")
            self._is_open = False
        engine.close()
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        with self._lock:
            self._engine = None
            if self._callback_error is not None:
                return Status(Code.ERROR, f"a callback raised {self._callback_error}")
        return Status(Code.OK, "Success")

    def __enter__(self) -> "InferenceEngine":
        return self

    def __exit__(self, *error: object) -> None:
        self.finalize()

    Init, Forward, ControlRequest, Finalize = init, forward, control_request, finalize
    GetProcessingRequest, GetMaxBatchSize = get_processing_request, get_max_batch_size
    GetRequestBlockQuotas = get_request_block_quotas

    # -- on the loop's thread

    def _engine_or_raise(self) -> EngineThread:
        assert self._engine is not None
        return self._engine

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stop(self, key: str) -> None:
        self._engine_or_raise().abort(key)

    async def _follow(self, engine: EngineThread, live: _Live) -> None:
        """Deliver one request's responses from the first to the last."""
        flag, error = Flag.INFER_RESPONSE_EXEC_ERROR, "the engine is closing"
        try:
            async with aclosing(engine.stream(live.inner)) as deltas:
                async for delta in deltas:
                    live.num_output += len(delta.token_ids)
                    self._respond(live, delta.token_ids, self._flag_of(live, delta))
            return
        except BadRequest as bad:
            flag, error = Flag.INFER_RESPONSE_ILLEGAL_INPUT, str(bad)
        except ServingError as failed:
            error = str(failed)
        except asyncio.CancelledError:
            pass
        if live.inner.id in self._live:
            self._respond(live, (), flag, error)

    def _flag_of(self, live: _Live, delta: Delta) -> InferResponseEndFlag:
        if delta.finish_reason is not FinishReason.LENGTH:
            return _FLAGS[delta.finish_reason]
        caps = [cap for cap in (live.inner.params.max_tokens, self._config.max_iter_times) if cap is not None]
        if caps and live.num_output >= min(caps):
            return Flag.INFER_RESPONSE_REACH_MAX_OUTPUT_LEN
        return Flag.INFER_RESPONSE_REACH_MAX_SEQ_LEN

    def _respond(self, live: _Live, ids: tuple[int, ...], flag: InferResponseEndFlag, error: str = "") -> None:
        if flag is not Flag.INFER_RESPONSE_CONTINUE:
            with self._lock:
                self._live.pop(live.inner.id)
        request_id, pid = live.request.get_request_id(), os.getpid()
        try:
            live.callback(InferenceResponse(request_id, ids, flag, error))
        except BaseException as raised:  # also SystemExit: other requests go on, on this thread
            log.exception("the callback raised on a response of %r; the request is stopped", request_id)
            with self._lock:
                self._callback_error = self._callback_error or f"{type(raised).__name__}: {raised}"
            self._engine_or_raise().abort(live.inner.id)
        finally:
            if os.getpid() != pid:  # the child of a fork: this thread's loop is the parent's
                os._exit(0)


_engines: "weakref.WeakSet[InferenceEngine]" = weakref.WeakSet()


def _forget_engines() -> None:
    """In the child of a fork: the engines' threads are not here, and their ranks are the parent's."""
    for engine in _engines:
        _parents.append(engine.__dict__.copy())
        engine._reset()


_parents: list[dict[str, Any]] = []  # never freed, so that nothing of the parent's is closed here
os.register_at_fork(after_in_child=_forget_engines)


async def _end_tasks() -> None:
    """Wait for the last responses; requests that still wait afterwards get none, and end because of closing."""
    tasks = {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}
    if tasks:
        _, left = await asyncio.wait(tasks, timeout=_END_WAIT_S)
        for task in left:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*left, return_exceptions=True)


def _check_ids(inner: Request, engine: EngineThread) -> None:
    """Raises BadRequest when the engine would raise it."""
    vocab_size = engine.info.vocab_size
    bad = next((id for id in inner.prompt_ids if not 0 <= id < vocab_size), None)
    if bad is not None:
        raise BadRequest("INPUT_IDS", f"token id {bad} is outside the vocabulary of {vocab_size}")
    if len(inner.prompt_ids) >= engine.max_seq_len:
        raise BadRequest(
            "INPUT_IDS", f"has {len(inner.prompt_ids)} tokens, but prompt and answer must fit in {engine.max_seq_len}"
        )


def _config_of(path: str | Path) -> EngineConfig:
    return read_engine_config(Path(path or "conf/config.json"))


def _not_ready() -> Status:
    return Status(Code.ERROR, "the engine is not initialised")
