"""The engine as a library: token ids in, a callback for every token, no HTTP.

Methods have PEP 8 names, and the names of the C++ interface as aliases. What C++ returns through pointers comes back
as (Status, value).
"""

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from pathlib import Path

import msgspec

from kvloom.engine.config import EngineConfig
from kvloom.engine.engine import Engine
from kvloom.engine.errors import BadRequest, ServingError
from kvloom.engine.executor import Executor, RankDied, RankExecutor
from kvloom.engine.fake import ByteTokenizer
from kvloom.engine.request import Delta, FinishReason, Request, SamplingParams
from kvloom.engine.tokenizer import load_tokenizer


class Code(Enum):
    OK = 0
    ERROR = 1
    INVALID_ARG = 2
    INVALID = 2  # noqa: PIE796 - its other name
    NOT_FOUND = 3


class Operation(IntEnum):
    STOP = 1


class EndFlag(IntEnum):
    """Whether and how a request ended."""

    CONTINUE = 0
    EOS = 1
    CANCEL = 2
    EXEC_ERROR = 3
    ILLEGAL_INPUT = 4
    REACH_MAX_SEQ_LEN = 5
    REACH_MAX_OUTPUT_LEN = 6


@dataclass(frozen=True, slots=True)
class Status:
    """The result of a call. Two are equal when their codes are."""

    code: Code = Code.OK
    message: str = field(default="", compare=False)

    def is_ok(self) -> bool:
        return self.code is Code.OK

    def status_code(self) -> Code:
        return self.code

    def status_msg(self) -> str:
        return self.message

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"

    IsOk, StatusCode, StatusMsg, ToString = is_ok, status_code, status_msg, __str__


RequestId = str | int


@dataclass(slots=True)
class InferenceRequest:
    """A prompt and how to answer it. An id is in use until the request has ended."""

    request_id: RequestId
    input_ids: tuple[int, ...] = ()
    params: SamplingParams = field(default_factory=SamplingParams)
    max_output_len: int | None = None

    def to_request(self) -> Request:
        params = self.params
        if self.max_output_len is not None:
            params = replace(params, max_tokens=self.max_output_len)
        return Request(_key(self.request_id), self.input_ids, params)


@dataclass(frozen=True, slots=True)
class InferenceResponse:
    """The tokens of one step of one request."""

    request_id: RequestId
    output_ids: tuple[int, ...] = ()
    flags: EndFlag = EndFlag.CONTINUE
    error: str = ""

    def is_eos(self) -> bool:
        """Whether this is the request's last response."""
        return self.flags is not EndFlag.CONTINUE

    def get_flags(self) -> int:
        return self.flags

    def get_request_id(self) -> RequestId:
        return self.request_id

    IsEOS, GetFlags, GetRequestId = is_eos, get_flags, get_request_id


Callback = Callable[[InferenceResponse], None]


class InferenceEngine:
    """One model on a thread of its own. init ... finalize; the callback runs on the engine's thread."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Request | str | None] = queue.SimpleQueue()
        self._live: dict[str, RequestId] = {}
        self._lock = threading.Lock()  # guards _live
        self._thread: threading.Thread | None = None
        self._is_open = False  # guarded like _live

    def init(self, callback: Callback, config: EngineConfig | str) -> Status:
        """Load the model. `config` is a configuration, or the path of its JSON form (the fields of EngineConfig)."""
        try:
            if isinstance(config, str):
                config = msgspec.json.decode(Path(config).read_bytes(), type=EngineConfig)
            tokenizer = load_tokenizer(config.model) if config.model else ByteTokenizer()
            executor: Executor = RankExecutor(config, sorted(tokenizer.eos_ids))
        except (OSError, ServingError, msgspec.MsgspecError) as error:
            return _failed(error)
        self._callback = callback
        self._executor = executor
        self._engine = Engine(config, executor, tokenizer)
        self._config = config
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="engine-api", daemon=True)
        self._thread.start()
        return Status()

    def forward(self, request: InferenceRequest) -> Status:
        """Start a request; its tokens arrive at the callback. A bad one ends there with ILLEGAL_INPUT."""
        key = _key(request.request_id)
        with self._lock:
            if not self._is_open:
                return Status(Code.ERROR, "the engine is not running")
            if key in self._live:
                return Status(Code.INVALID_ARG, f"request id {request.request_id!r} is in use")
            self._live[key] = request.request_id
        try:
            self._inbox.put(request.to_request())
        except ServingError as error:
            with self._lock:
                del self._live[key]
            return _failed(error)
        return Status()

    def control_request(self, request_id: RequestId, operation: Operation) -> Status:
        """Stop a request: its last response has the flag CANCEL."""
        if operation is not Operation.STOP:
            return Status(Code.INVALID_ARG, "the only operation is STOP")
        with self._lock:
            if _key(request_id) not in self._live:
                return Status(Code.NOT_FOUND, f"no running request {request_id!r}")
        self._inbox.put(_key(request_id))
        return Status()

    def get_processing_request(self) -> tuple[Status, int]:
        with self._lock:
            return Status(), len(self._live)

    def get_max_batch_size(self) -> tuple[Status, int]:
        if self._thread is None:
            return Status(Code.ERROR, "the engine is not initialised"), 0
        return Status(), self._config.max_batch

    def get_request_block_quotas(self) -> tuple[Status, tuple[int, int, int]]:
        """Free blocks, free prefill places, prefill tokens a step; as of the last step."""
        if self._thread is None:
            return Status(Code.ERROR, "the engine is not initialised"), (0, 0, 0)
        stats, limits = self._engine.stats(), self._config.limits(self._executor.info.block_size)
        places = max(0, limits.prefill_places - stats.num_waiting)
        return Status(), (stats.num_free_blocks, places, limits.prefill_tokens)

    def finalize(self) -> Status:
        """End what runs (flag EXEC_ERROR) and the model. Not from the callback."""
        thread, self._thread = self._thread, None
        if thread is None:
            return Status(Code.ERROR, "the engine is not initialised")
        self._inbox.put(None)
        thread.join()
        self._executor.close()
        return Status()

    Init, Forward, ControlRequest, Finalize = init, forward, control_request, finalize
    GetProcessingRequest, GetMaxBatchSize = get_processing_request, get_max_batch_size
    GetRequestBlockQuotas = get_request_block_quotas

    def _run(self) -> None:
        try:
            while self._take_inbox():
                self._deliver(self._engine.start_step())
                self._engine.finish_step()
            reason = "the engine is closing"
        except RankDied as error:
            reason = str(error)
        self._deliver(self._engine.fail_all(reason))
        with self._lock:  # the thread is gone: later requests are refused, queued ones end here
            self._is_open = False
            left = list(self._live)
        self._deliver([Delta(key, finish_reason=FinishReason.ERROR, error=reason) for key in left])

    def _take_inbox(self) -> bool:
        """Messages that have arrived; waits for one when idle. False when it is time to close."""
        while not self._engine.has_work or not self._inbox.empty():
            message = self._inbox.get()
            if message is None:
                return False
            if isinstance(message, str):
                self._engine.abort(message)
                continue
            try:
                self._engine.add(message)
            except BadRequest as error:
                self._respond(message.id, (), EndFlag.ILLEGAL_INPUT, str(error))
        return True

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self._respond(delta.request_id, delta.token_ids, _flag_of(delta), delta.error or "")

    def _respond(self, key: str, output_ids: tuple[int, ...], flag: EndFlag, error: str) -> None:
        with self._lock:
            request_id = self._live[key] if flag is EndFlag.CONTINUE else self._live.pop(key)
        with contextlib.suppress(Exception):  # a caller's mistake must not end the other requests
            self._callback(InferenceResponse(request_id, output_ids, flag, error))


_FLAGS = {
    FinishReason.EOS: EndFlag.EOS,
    FinishReason.STOP: EndFlag.EOS,
    FinishReason.ABORT: EndFlag.CANCEL,
    FinishReason.ERROR: EndFlag.EXEC_ERROR,
    FinishReason.LENGTH: EndFlag.REACH_MAX_OUTPUT_LEN,
}


def _flag_of(delta: Delta) -> EndFlag:
    return EndFlag.CONTINUE if delta.finish_reason is None else _FLAGS[delta.finish_reason]


def _key(request_id: RequestId) -> str:
    return f"{type(request_id).__name__}:{request_id}"  # 1 and "1" are two requests


def _failed(error: Exception) -> Status:
    code = Code.INVALID_ARG if isinstance(error, BadRequest | msgspec.MsgspecError) else Code.ERROR
    return Status(code, str(error))
