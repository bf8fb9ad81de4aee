"""Traces: what the server needs of a tracer, and whose trace a request belongs to. OpenTelemetry itself is in otel.py.

Spans are made when a request has ended, from the times that are kept anyway: nothing is added to a token's way.
"""

import importlib
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, cast

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvloom.engine.errors import BadRequest
from kvloom.engine.request import FinishReason, SamplingParams
from kvloom.server.timing import Timing

log = logging.getLogger(__name__)

EXTRA = "opentelemetry.exporter.otlp.proto.http"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
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
    """Must not wait, and must not raise: requests do not depend on it."""

    def ended(self, trace: Trace) -> None: ...
    def close(self) -> None: ...


_NOBODY = Caller()
CALLER: ContextVar[Caller] = ContextVar("caller", default=_NOBODY)


class CallerMiddleware:
    """ASGI: CALLER is this request's while it is answered. Only there when there is a tracer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            CALLER.set(Caller(scope["path"], headers.get("traceparent", ""), headers.get("tracestate", "")))
        await self._app(scope, receive, send)


def open_tracer(endpoint: str, environment: Mapping[str, str]) -> Tracer | None:
    """A tracer that sends to `endpoint`, or where OpenTelemetry's own variables say; None when neither is there.

    Raises BadRequest for an endpoint that cannot be used. Variables without the extra `otel` are told in the log: they
    may be meant for another program.
    """
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise BadRequest("otlpEndpoint", f"must begin with http:// or https://, got {endpoint!r}")
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    is_off |= environment.get("OTEL_TRACES_EXPORTER", "").lower() == "none"
    is_asked = bool(endpoint) or any(environment.get(name) for name in ENDPOINTS)
    if is_off or not is_asked:
        return None
    if not _has_extra():
        problem = "needs the extra otel: pip install 'kvloom[otel]'"
        if endpoint:
            raise BadRequest("otlpEndpoint", problem)
        log.warning("%s is set, but tracing %s", next(name for name in ENDPOINTS if environment.get(name)), problem)
        return None
    return cast(Tracer, importlib.import_module("kvloom.server.otel").open_otlp(endpoint))


def _has_extra() -> bool:
    try:
        return importlib.util.find_spec(EXTRA) is not None
    except ModuleNotFoundError:  # one of its parents
        return False
