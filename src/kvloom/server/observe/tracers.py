"""Decides whether to trace, and where to send spans. Imports OpenTelemetry only when traces are asked for."""

import importlib
import importlib.util
import logging
from collections.abc import Mapping
from typing import cast

from kvloom.contract.errors import BadRequest
from kvloom.server.observe.tracing import Tracer

log = logging.getLogger(__name__)

EXTRA = "opentelemetry.exporter.otlp.proto.http"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def open_tracer(endpoint: str, environment: Mapping[str, str]) -> Tracer | None:
    """A tracer that sends to `endpoint`, or to the one that OpenTelemetry's variables name; None without either.

    Raises BadRequest for an endpoint that cannot be used. Variables without the extra `otel` are only logged, because
    they may be meant for another program.
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
    return cast(Tracer, importlib.import_module("kvloom.server.observe.otel").open_otlp(endpoint))


def _has_extra() -> bool:
    try:
        return importlib.util.find_spec(EXTRA) is not None
    except ModuleNotFoundError:  # one of its parents
        return False
