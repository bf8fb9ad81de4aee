"""Traces through OpenTelemetry's exporters: the spans, trace context of callers, and a collector that fails."""

import http.server
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from kvloom.contract.errors import BadRequest
from kvloom.server.observe import tracers
from kvloom.server.observe.otel import OtelTracer, open_otlp
from kvloom.server.observe.tracers import open_tracer
from tests.support.processes import CLI, serving
from tests.support.servers import MODEL, FakeServer, fake_server
from tests.support.waiting import until

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
OPERATIONS = {"/v1/messages": "chat", "/v1/embeddings": "embeddings", "/v1/completions": "text_completion"}
PROMPT = "nobody may read this"


@pytest.fixture
def memory() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(memory: InMemorySpanExporter) -> Iterator[FakeServer]:
    with fake_server(tracer=OtelTracer(SimpleSpanProcessor(memory)), has_eos=False, step_s=0.002) as server:
        yield server


def spans_of(memory: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """Name -> span of the only finished request; its root span is under the operation's name."""
    until(lambda: any(span.kind is SpanKind.SERVER for span in memory.get_finished_spans()))
    return {span.name.split()[0]: span for span in memory.get_finished_spans()}


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_is_a_span_with_queue_prefill_and_decode(traced: FakeServer, memory: InMemorySpanExporter, is_stream):
    traced.chat(PROMPT, max_tokens=8, temperature=0.5, seed=7, stream=is_stream, n=2)
    spans = spans_of(memory)
    assert set(spans) == {"chat", "queue", "prefill", "decode"}
    request = spans["chat"]
    assert (request.name, request.kind, request.parent) == (f"chat {MODEL}", SpanKind.SERVER, None)
    attributes = dict(request.attributes or {})
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == MODEL
    assert attributes["gen_ai.request.max_tokens"] == 8
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert attributes["gen_ai.request.seed"] == 7
    assert attributes["gen_ai.usage.input_tokens"] == len(f"user: {PROMPT}\nassistant: ")
    assert attributes["gen_ai.usage.output_tokens"] == 16
    assert attributes["gen_ai.response.finish_reasons"] == ("length", "length")
    assert attributes["url.path"] == "/v1/chat/completions"
    assert all(PROMPT not in str(value) for span in spans.values() for value in (span.attributes or {}).values())
    phases = [spans[name] for name in ("queue", "prefill", "decode")]
    assert all(phase.parent and phase.parent.span_id == request.context.span_id for phase in phases)
    assert phases[0].start_time == request.start_time
    assert [phase.end_time for phase in phases[:2]] == [phase.start_time for phase in phases[1:]]
    assert phases[2].end_time <= request.end_time
    assert phases[1].end_time > phases[1].start_time
    assert phases[2].end_time > phases[2].start_time


def test_a_route_without_v1_is_the_same_operation(traced: FakeServer, memory: InMemorySpanExporter):
    traced.post("/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
    assert dict(spans_of(memory)["chat"].attributes or {})["url.path"] == "/chat/completions"


def test_it_belongs_to_the_callers_trace(traced: FakeServer, memory: InMemorySpanExporter):
    headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}
    traced.post("/generate", {"inputs": PROMPT}, headers=headers)
    spans = spans_of(memory)
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE_ID}
    request = spans["text_completion"]
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == PARENT_ID
    assert request.context.trace_state.get("vendor") == "1"


def test_each_route_names_its_operation(traced: FakeServer, memory: InMemorySpanExporter):
    said = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    asked: dict[str, dict[str, Any]] = {
        "/v1/messages": said,
        "/v1/embeddings": {"model": MODEL, "input": "hi"},
        "/v1/completions": {"model": MODEL, "prompt": "hi", "max_tokens": 2},
    }
    for path, body in asked.items():
        assert traced.post(path, body).status_code == 200
        assert set(spans_of(memory)) & {"chat", "embeddings", "text_completion"} == {OPERATIONS[path]}
        memory.clear()


@pytest.mark.parametrize("header", ["00-" + "0" * 32 + "-b7ad6b7169203331-01", "nonsense"])
def test_a_malformed_context_begins_a_trace_of_its_own(traced: FakeServer, memory: InMemorySpanExporter, header: str):
    assert traced.post("/generate", {"inputs": "hi"}, headers={"traceparent": header}).status_code == 200
    assert spans_of(memory)["text_completion"].parent is None


def test_a_caller_that_does_not_sample_is_not_sampled(traced: FakeServer, memory: InMemorySpanExporter):
    traced.post("/generate", {"inputs": "hi"}, headers={"traceparent": TRACEPARENT[:-1] + "0"})
    traced.complete("hi", max_tokens=1)
    assert all(f"{span.context.trace_id:032x}" != TRACE_ID for span in spans_of(memory).values())


def test_an_error_and_a_departure_are_told(traced: FakeServer, memory: InMemorySpanExporter):
    traced.post("/v1/completions", {"model": MODEL, "prompt": [9999]})
    failed = spans_of(memory)["text_completion"]
    assert failed.status.status_code is StatusCode.ERROR
    assert (failed.attributes or {})["error.type"] == "invalid"
    memory.clear()
    traced.leave("/v1/completions", {"prompt": "hi", "max_tokens": 1500})
    gone = spans_of(memory)["text_completion"]
    assert gone.status.status_code is StatusCode.UNSET
    assert (gone.attributes or {})["gen_ai.response.finish_reasons"] == ("abort",)
    assert (gone.attributes or {})["gen_ai.usage.output_tokens"] > 0


def test_a_tracer_that_fails_costs_no_request(caplog: pytest.LogCaptureFixture):
    class Broken(SimpleSpanProcessor):
        def on_start(self, span: Any, parent_context: Any = None) -> None:
            raise RuntimeError("broken")

    with fake_server(tracer=OtelTracer(Broken(InMemorySpanExporter()))) as server:
        assert server.complete("hi", max_tokens=2).status_code == 200
    assert "a trace could not be made" in caplog.text


class Collector(http.server.ThreadingHTTPServer):
    """An OTLP receiver. While `is_held` it accepts requests without answering them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.asked, self.is_held, self.released = threading.Event(), False, threading.Event()

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            values = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            self.services.add(values["service.name"])
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]


class _Receiver(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.set()
        if self.server.is_held:
            self.server.released.wait(120)
            return
        self.server.take(body)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            collector.released.set()
            collector.shutdown()
            thread.join()


def test_a_collector_is_sent_the_spans_over_http():
    with collecting() as collector:
        tracer = open_otlp(collector.url)
        with fake_server(tracer=tracer) as server:
            server.post("/generate", {"inputs": "hi"}, headers={"traceparent": TRACEPARENT})
        tracer.close()
    assert {span.name for span in collector.spans} == {f"text_completion {MODEL}", "queue", "prefill", "decode"}
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    assert collector.services == {"kvloom"}


@pytest.mark.parametrize("kind", ["refuses", "never answers"])
def test_a_dead_collector_delays_neither_requests_nor_the_end(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")  # ms: the exporter calls it at once
    with collecting() as collector:
        collector.is_held = True
        tracer = open_otlp(collector.url if kind == "never answers" else "http://127.0.0.1:1")
        with fake_server(tracer=tracer) as server:
            server.complete("hi", max_tokens=2)
            if kind == "never answers":
                until(collector.asked.is_set)
            for _ in range(5):
                assert server.complete("hi", max_tokens=2).status_code == 200
            tracer.close()
            assert not collector.released.is_set()
            assert server.complete("hi", max_tokens=2).status_code == 200
        assert "the collector of traces has not taken the last ones" in caplog.text


def test_a_server_is_told_by_the_environment_and_sends_at_its_end():
    with collecting() as collector:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_SERVICE_NAME": "mine"}
        with serving([*CLI, "serve", "--port", "0", "--backend", "fake"], **variables) as running:
            httpx.post(running.url + "/generate", json={"inputs": "hi"}).raise_for_status()
            running.process.send_signal(signal.SIGTERM)
            assert running.process.wait(timeout=120) == 0
        assert {span.name.split()[0] for span in collector.spans} == {"text_completion", "queue", "prefill", "decode"}
        assert collector.services == {"mine"}


def test_it_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    asked = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    assert open_tracer("", {}) is None
    assert open_tracer("", {**asked, "OTEL_SDK_DISABLED": "true"}) is None
    assert open_tracer("", {**asked, "OTEL_TRACES_EXPORTER": "none"}) is None
    with pytest.raises(BadRequest, match=r"^otlpEndpoint: must begin with http:// or https://, got 'host:4317'$"):
        open_tracer("host:4317", {})
    monkeypatch.setattr(tracers, "EXTRA", "kvloom_has_no_such_extra.sdk")
    with pytest.raises(BadRequest, match=r"^otlpEndpoint: needs the extra otel: pip install 'kvloom\[otel\]'$"):
        open_tracer("http://127.0.0.1:1", {})
    assert open_tracer("", asked) is None
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is set, but tracing needs the extra otel" in caplog.text


def test_a_server_without_it_loads_nothing_of_it():
    script = "import kvloom.server.run.main, sys; print([name for name in sys.modules if 'opentelemetry' in name])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
