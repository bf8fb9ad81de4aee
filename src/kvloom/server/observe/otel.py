"""Spans of OpenTelemetry (extra `otel`): a request, and inside it queue, prefill and decode.

Attributes are those of the semantic conventions for generative AI, and vLLM's where these do not cover servers.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from kvloom.server.observe.tracing import Trace

log = logging.getLogger(__name__)

CLOSE_S = 2.0  # seconds that the last spans get at shutdown
SERVICE = "kvloom"
_OPERATIONS = {
    "/chat/completions": "chat",
    "/responses": "chat",
    "/messages": "chat",
    "/embeddings": "embeddings",
}  # with or without /v1; of other paths: text_completion


def open_otlp(endpoint: str) -> "OtelTracer":
    """A tracer that sends spans in batches, on a thread, over HTTP to `endpoint` ("" = as OTEL_EXPORTER_OTLP_* say).

    Spans that the collector does not accept in time are dropped.
    """
    url = f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None
    exporter = OTLPSpanExporter(endpoint=url)
    return OtelTracer(BatchSpanProcessor(exporter), exporter.shutdown)


class OtelTracer:
    """Implements tracing.Tracer over any span processor. OTEL_TRACES_SAMPLER selects the sampling.

    `give_up` ends a running export when the time to close is over.
    """

    def __init__(self, processor: SpanProcessor, give_up: Callable[[], None] = lambda: None) -> None:
        self._give_up = give_up
        name = os.environ.get("OTEL_SERVICE_NAME") or SERVICE
        number = version("kvloom")
        resource = Resource.create({"service.name": name, "service.version": number})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("kvloom.server", number)
        self._propagator = TraceContextTextMapPropagator()

    def ended(self, trace: Trace) -> None:
        """Make the spans of a request that ends now."""
        try:
            self._spans(trace)
        except Exception:  # a bug in tracing must not fail the request
            log.exception("a trace could not be made")

    def _spans(self, trace: Trace) -> None:
        end_ns = time.time_ns()
        start_ns = end_ns - _ns(trace.timing.age_s)
        carrier = {"traceparent": trace.caller.traceparent, "tracestate": trace.caller.tracestate}
        parent = self._propagator.extract({name: value for name, value in carrier.items() if value})
        operation = _OPERATIONS.get(trace.caller.path.removeprefix("/v1"), "text_completion")
        request = self._tracer.start_span(
            f"{operation} {trace.model}", parent, SpanKind.SERVER, _attributes(trace, operation), start_time=start_ns
        )
        if request.is_recording():
            self._phases(trace, request, start_ns, end_ns)
        if trace.error:
            request.set_attribute("error.type", trace.error)
            request.set_status(Status(StatusCode.ERROR, trace.error))
        request.end(end_ns)

    def _phases(self, trace: Trace, request: Span, start_ns: int, end_ns: int) -> None:
        """Make a span for each phase that began; the phase in which the request ended lasts to the end."""
        context, timing = set_span_in_context(request), trace.timing
        lengths = [("queue", timing.queue_s if timing.has_slot else None)]
        if timing.has_slot:
            lengths.append(("prefill", timing.first_token_s))
        if timing.first_token_s is not None:
            lengths.append(("decode", timing.decode_s))
        at_ns = start_ns
        for name, length_s in lengths:
            until_ns = end_ns if length_s is None else min(end_ns, at_ns + _ns(length_s))
            self._tracer.start_span(name, context, start_time=at_ns).end(until_ns)
            at_ns = until_ns

    def close(self) -> None:
        """Send the remaining spans, within CLOSE_S."""
        closing = threading.Thread(target=self._provider.shutdown, name="otel-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            log.warning("the collector of traces has not taken the last ones")
            self._give_up()


def _attributes(trace: Trace, operation: str) -> dict[str, AttributeValue]:
    timing, params = trace.timing, trace.params
    found: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": SERVICE,
        "gen_ai.request.model": trace.model,
        "gen_ai.response.model": trace.model,
        "gen_ai.response.id": trace.id,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.seed": params.seed,
        "gen_ai.usage.input_tokens": trace.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": trace.num_cached_tokens,
        "gen_ai.usage.output_tokens": timing.num_tokens,
        "gen_ai.response.finish_reasons": tuple(trace.finish_reasons) or None,
        "gen_ai.latency.time_in_queue": timing.queue_s if timing.has_slot else None,
        "gen_ai.latency.time_to_first_token": None
        if timing.first_token_s is None
        else timing.queue_s + timing.first_token_s,
        "gen_ai.latency.e2e": timing.age_s,
        "url.path": trace.caller.path,
    }
    return {name: value for name, value in found.items() if value is not None}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
