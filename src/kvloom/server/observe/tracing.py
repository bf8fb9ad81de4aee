"""Traces: what the server needs of a tracer, and the parent trace of a request. OpenTelemetry is used in otel.py only.

Spans are made when a request has ended, from times that are recorded anyway, so that tokens cost nothing more.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvloom.contract.request import FinishReason
from kvloom.contract.sampling import SamplingParams
from kvloom.server.observe.timing import Timing

FINISH_NAMES = {
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}


@dataclass(frozen=True, slots=True)
class Caller:
    """The HTTP request: its path, and W3C Trace Context headers ("" = none)."""

    path: str = ""
    traceparent: str = ""
    tracestate: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """A generation that has ended: numbers and names, never text."""

    caller: Caller
    id: str
    model: str
    params: SamplingParams
    num_prompt_tokens: int
    num_cached_tokens: int
    timing: Timing
    finish_reasons: Sequence[str] = ()
    error: str = ""  # the kind of a ServingError


class Tracer(Protocol):
    """Must neither wait nor raise: requests must not depend on it."""

    def ended(self, trace: Trace) -> None: ...
    def close(self) -> None: ...


_NOBODY = Caller()
CALLER: ContextVar[Caller] = ContextVar("caller", default=_NOBODY)


class CallerMiddleware:
    """ASGI: sets CALLER to this request while it is answered. Only installed with a tracer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            CALLER.set(Caller(scope["path"], headers.get("traceparent", ""), headers.get("tracestate", "")))
        await self._app(scope, receive, send)
