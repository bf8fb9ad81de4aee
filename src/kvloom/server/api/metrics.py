"""GET /metrics for Prometheus: the documented server's names, and vLLM's with their prefix, over the same numbers."""

import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvloom.engine.errors import ServingError
from kvloom.engine.request import FinishReason
from kvloom.server.errors import ErrorReply, tgi_reply
from kvloom.server.generation import GenerationService
from kvloom.server.meter import Histogram, Throughput
from kvloom.server.models import Models
from kvloom.server.reply import Call, Endpoint, Reply

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FINISHED = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class Metrics:
    def __init__(self, models: Models, clock: Callable[[], float] = time.monotonic) -> None:
        self._models, self._clock = models, clock
        self._began_s = clock()
        self._throughputs: dict[str, tuple[Throughput, Throughput]] = {}  # of the prompt, of the answer
        self._registry = CollectorRegistry()
        self._registry.register(self)  # anything that has `collect`

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return (
            Endpoint("GET", "/metrics", self.metrics, "Counters and histograms for Prometheus", is_management=True),
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        return tgi_reply(error)

    async def metrics(self, call: Call) -> Reply:
        return Reply(generate_latest(self._registry), media_type=MEDIA_TYPE)

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client at each scrape."""
        rows = [(service, [service.name]) for service in self._models]
        for names, text, value in _COUNTERS:
            for name in names:
                counter = CounterMetricFamily(name, text, labels=["model_name"])
                for service, labels in rows:
                    counter.add_metric(labels, value(service))
                yield counter
        for names, text, value in _GAUGES:
            for name in names:
                gauge = GaugeMetricFamily(name, text, labels=["model_name"])
                for service, labels in rows:
                    gauge.add_metric(labels, value(service))
                yield gauge
        for names, text, histogram_of in _HISTOGRAMS:
            for name in names:
                family = HistogramMetricFamily(name, text, labels=["model_name"])
                for service, labels in rows:
                    histogram = histogram_of(service)
                    family.add_metric(labels, histogram.cumulative(), histogram.sum)
                yield family
        yield self._finished()
        yield from self._rates()

    def _rates(self) -> Iterator[Metric]:
        """Tokens a second, as the documented server tells them."""
        prompt = GaugeMetricFamily("avg_prompt_throughput_toks_per_s", "Prompt tokens a second.", labels=["model_name"])
        answer = GaugeMetricFamily("avg_generation_throughput_toks_per_s", "Tokens a second.", labels=["model_name"])
        now_s = self._clock()
        for service in self._models:
            stats = service.engine.stats()
            fresh = (Throughput(self._began_s), Throughput(self._began_s))
            of_prompt, of_answer = self._throughputs.setdefault(service.name, fresh)
            prompt.add_metric([service.name], of_prompt.rate(now_s, stats.total_prompt_tokens))
            answer.add_metric([service.name], of_answer.rate(now_s, stats.total_output_tokens))
        yield from (prompt, answer)

    def _finished(self) -> Metric:
        success = CounterMetricFamily(
            "vllm:request_success", "Choices that ended by themselves.", labels=["model_name", "finished_reason"]
        )
        for service in self._models:
            counts = dict.fromkeys(("stop", "length", "abort"), 0)
            for reason, count in service.meter.num_finished.items():
                counts[_FINISHED.get(reason, "abort")] += count
            for reason_name, count in counts.items():
                success.add_metric([service.name, reason_name], count)
        return success


def _kv_use(service: GenerationService) -> float:
    stats = service.engine.stats()
    return 1 - stats.num_free_blocks / max(1, stats.num_blocks)


def _host_use(service: GenerationService) -> float:
    stats = service.engine.stats()
    return 1 - stats.num_free_host_blocks / stats.num_host_blocks if stats.num_host_blocks else 0.0


def _hit_rate(service: GenerationService) -> float:
    stats = service.engine.stats()
    return stats.total_cached_tokens / max(1, stats.total_prompt_tokens)


def _failed_share(service: GenerationService) -> float:
    return service.meter.num_failed / max(1, service.meter.num_received)


def _num_waiting(service: GenerationService) -> int:
    return service.engine.stats().num_waiting + service.admission.num_waiting


def _first_token(service: GenerationService) -> Histogram:
    return service.meter.first_token


def _between_tokens(service: GenerationService) -> Histogram:
    return service.meter.between_tokens


# names, help, value of a model
Number = Callable[[GenerationService], float]
_COUNTERS: Sequence[tuple[tuple[str, ...], str, Number]] = (
    (("request_received",), "Generations asked for.", lambda s: s.meter.num_received),
    (("request_success",), "Generations that ended by themselves.", lambda s: sum(s.meter.prompt_tokens.counts)),
    (("request_failed",), "Generations that ended with an error.", lambda s: s.meter.num_failed),
    (("request_aborted",), "Generations whose client went away.", lambda s: s.meter.num_aborted),
    (
        ("num_preemptions", "vllm:num_preemptions"),
        "Requests put back for want of KV blocks.",
        lambda s: s.engine.stats().total_preemptions,
    ),
    (
        ("prompt_tokens", "vllm:prompt_tokens"),
        "Prompt tokens of accepted requests.",
        lambda s: s.engine.stats().total_prompt_tokens,
    ),
    (
        ("generation_tokens", "vllm:generation_tokens"),
        "Tokens generated.",
        lambda s: s.engine.stats().total_output_tokens,
    ),
    (("vllm:prefix_cache_queries",), "Prompt tokens looked up.", lambda s: s.engine.stats().total_prompt_tokens),
    (("vllm:prefix_cache_hits",), "Prompt tokens found cached.", lambda s: s.engine.stats().total_cached_tokens),
    (("vllm:spec_decode_num_draft_tokens",), "Tokens guessed ahead.", lambda s: s.engine.stats().total_draft_tokens),
    (
        ("vllm:spec_decode_num_accepted_tokens",),
        "Guesses that the model confirmed.",
        lambda s: s.engine.stats().total_accepted_tokens,
    ),
    (
        ("kv_tier_loaded_blocks",),
        "KV blocks taken from the outer pool since the model's process started.",
        lambda s: s.engine.stats().total_tier_loaded_blocks,
    ),
    (("kv_tier_saved_blocks",), "KV blocks given to it.", lambda s: s.engine.stats().total_tier_saved_blocks),
    (("model_restarts",), "Times the model's process was restarted.", lambda s: s.engine.stats().total_restarts),
)
_GAUGES: Sequence[tuple[tuple[str, ...], str, Number]] = (
    (
        ("num_requests_running", "vllm:num_requests_running"),
        "Requests in the batch.",
        lambda s: s.engine.stats().num_running,
    ),
    (
        ("num_requests_swapped", "vllm:num_requests_swapped"),
        "Requests that wait with their KV blocks in host memory.",
        lambda s: s.engine.stats().num_swapped,
    ),
    (("num_requests_waiting", "vllm:num_requests_waiting"), "Requests that wait.", _num_waiting),
    (
        ("npu_cache_usage_perc", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "Share of KV blocks in use, 0 to 1.",
        _kv_use,
    ),
    (("cpu_cache_usage_perc", "vllm:cpu_cache_usage_perc"), "Share of host KV blocks in use, 0 to 1.", _host_use),
    (("all_radix_match_num",), "Prompt tokens looked up.", lambda s: s.engine.stats().total_prompt_tokens),
    (("npu_radix_match_hit_num",), "Prompt tokens found cached.", lambda s: s.engine.stats().total_cached_tokens),
    (("npu_prefix_cache_hit_rate",), "Share of prompt tokens found cached, 0 to 1.", _hit_rate),
    (("failed_request_perc",), "Share of generations that failed, 0 to 1.", _failed_share),
)
_HISTOGRAMS: Sequence[tuple[tuple[str, ...], str, Callable[[GenerationService], Histogram]]] = (
    (
        ("time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
        "From the request to its first token.",
        _first_token,
    ),
    (
        (
            "time_per_output_token_seconds",
            "vllm:time_per_output_token_seconds",
            "vllm:request_time_per_output_token_seconds",
        ),
        "Mean time between tokens of a generation.",
        _between_tokens,
    ),
    (("vllm:request_queue_time_seconds",), "Wait for a place.", lambda s: s.meter.queue),
    (("vllm:request_prefill_time_seconds",), "From the place to the first token.", lambda s: s.meter.prefill),
    (("vllm:request_decode_time_seconds",), "From the first token to the last.", lambda s: s.meter.decode),
    (("vllm:e2e_request_latency_seconds",), "From the request to its last token.", lambda s: s.meter.whole),
    (
        ("request_prompt_tokens", "vllm:request_prompt_tokens"),
        "Prompt tokens of a generation.",
        lambda s: s.meter.prompt_tokens,
    ),
    (
        ("request_generation_tokens", "vllm:request_generation_tokens"),
        "Tokens generated for a generation.",
        lambda s: s.meter.output_tokens,
    ),
)
