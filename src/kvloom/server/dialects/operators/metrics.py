"""GET /metrics for Prometheus: the documented server's names, and vLLM's with their prefix, over the same numbers.

Like vLLM's, names with its prefix have the label `engine`; there is one engine a model, "0".
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from kvloom.contract.capacity import SHARE
from kvloom.contract.errors import ServingError
from kvloom.contract.request import FinishReason
from kvloom.engine.adapters import MAX_ADAPTERS
from kvloom.server.dialects.operators.metrics_names import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    PICTURE_COUNTERS,
    PICTURE_GAUGES,
)
from kvloom.server.errors import ErrorReply, tgi_reply
from kvloom.server.http.reply import Endpoint, HttpRequest, Reply
from kvloom.server.observe.meter import Throughput
from kvloom.server.serving.engine import ReplicaFigures, Replicated
from kvloom.server.serving.pictures.service import PictureService
from kvloom.server.serving.registry import Models
from kvloom.server.serving.service import GenerationService

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FINISHED = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_PREFIX = "vllm:"  # of metrics that are passed on
_MODEL = "model_name"
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by the sleeper's level


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
            Endpoint(
                "GET", "/metrics", self.metrics, "Counters and histograms for Prometheus",
                is_management=True, is_metrics=True,
            ),
        )  # fmt: skip

    def error_reply(self, error: ServingError) -> ErrorReply:
        return tgi_reply(error)

    async def metrics(self, request: HttpRequest) -> Reply:
        return Reply(generate_latest(self._registry), media_type=MEDIA_TYPE)

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client at each scrape."""
        known = set()
        for family in self._own():
            known.add(family.name)
            yield family
        yield from _passed_on(self._models, known)

    def _own(self) -> Iterator[Metric]:
        services = list(self._models)
        for names, text, value in COUNTERS:
            for name in names:
                counter = CounterMetricFamily(name, text, labels=_label_names(name))
                for service in services:
                    counter.add_metric(_labels(name, service), value(service))
                yield counter
        for names, text, value in GAUGES:
            for name in names:
                yield _gauge(name, text, (), (((), service, value(service)) for service in services))
        for names, text, histogram_of in HISTOGRAMS:
            for name in names:
                family = HistogramMetricFamily(name, text, labels=_label_names(name))
                for service in services:
                    histogram = histogram_of(service)
                    family.add_metric(_labels(name, service), histogram.cumulative(), histogram.sum)
                yield family
        yield from (
            self._finished(),
            self._waiting(),
            self._sleep_states(),
            self._adapters(),
            self._accepted(),
            *self._rates(),
        )
        yield from map(_cache_config, services)
        yield from _of_replicas(services)
        yield from _of_pictures(self._models.pictures)

    def _rates(self) -> Iterator[Metric]:
        """Tokens a second, in the documented server's form."""
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
        name, labels = "vllm:request_success", ["finished_reason"]
        success = CounterMetricFamily(name, "Choices that ended by themselves.", labels=_label_names(name) + labels)
        for service in self._models:
            counts = dict.fromkeys(("stop", "length", "abort"), 0)
            for reason, count in service.meter.num_finished.items():
                counts[_FINISHED.get(reason, "abort")] += count
            for reason_name, count in counts.items():
                success.add_metric([*_labels(name, service), reason_name], count)
        return success

    def _accepted(self) -> Metric:
        name, text = "vllm:spec_decode_num_accepted_tokens_per_pos", "Guesses that the model confirmed, by position."
        accepted = CounterMetricFamily(name, text, labels=[*_label_names(name), "position"])
        for service in self._models:
            for position, count in enumerate(service.engine.stats().accepted_by_position):
                accepted.add_metric([*_labels(name, service), str(position)], count)
        return accepted

    def _waiting(self) -> Metric:
        """Their sum is vllm:num_requests_waiting."""
        rows = []
        for service in self._models:
            stats = service.engine.stats()
            capacity = stats.num_waiting - stats.num_loading + service.admission.num_waiting
            rows += [(("capacity",), service, capacity), (("deferred",), service, stats.num_loading)]
        text = "Requests that wait: for their turn (capacity), or for the KV pool (deferred)."
        return _gauge("vllm:num_requests_waiting_by_reason", text, ("reason",), rows)

    def _sleep_states(self) -> Metric:
        rows = [
            ((state,), service, service.sleeper.level == level)
            for service in self._models
            for level, state in enumerate(_SLEEP_STATES)
        ]
        return _gauge("vllm:engine_sleep_state", "1 for the state that the model is in.", ("sleep_state",), rows)

    def _adapters(self) -> Metric:
        """Names of the adapters in use, joined to one text each, as in vLLM; the value is the time."""
        rows = []
        for service in self._models:
            names = {s.adapter: s.name for s in self._models.served if s.adapter and s.parent == service.name}
            used: dict[bool, set[str]] = {True: set(), False: set()}
            for item in service.running():
                used[item.timing.has_slot].add(names.get(item.requests[0].adapter, ""))
            texts = (",".join(sorted(used[is_running] - {""})) for is_running in (True, False))
            rows.append(((str(MAX_ADAPTERS), *texts), service, time.time()))
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        return _gauge("vllm:lora_requests_info", "LoRA adapters that requests run or wait with.", labels, rows)


def _cache_config(service: GenerationService) -> Metric:
    """The value is always 1: the configuration is in the labels, under vLLM's names."""
    info, config = service.engine.info, service.card.engine
    values = {
        "block_size": info.block_size,
        "cache_dtype": config.kv_dtype,
        "cpu_offload_gb": 0,  # weights are never computed with from elsewhere
        "enable_prefix_caching": config.enable_prefix_cache,
        "gpu_memory_utilization": SHARE,
        "kv_cache_memory_bytes": info.kv_bytes,
        "kv_cache_size_tokens": info.num_blocks * info.block_size,
        "num_cpu_blocks": info.num_host_blocks,
        "num_gpu_blocks": info.num_blocks,
        "num_gpu_blocks_override": config.num_blocks,
        "prefix_caching_hash_algo": "sha256",
        "sliding_window": None,
        "swap_space_bytes": config.host_cache_bytes,
    }
    row = (tuple(map(str, values.values())), service, 1)
    return _gauge("vllm:cache_config_info", "What the KV cache is like.", tuple(values), [row])


_OF_REPLICAS: Sequence[
    tuple[type[CounterMetricFamily | GaugeMetricFamily], str, str, Callable[[ReplicaFigures], float]]
]
_OF_REPLICAS = (
    (GaugeMetricFamily, "replica_ready", "1 while the replica takes requests.", lambda r: r.is_ready),
    (GaugeMetricFamily, "replica_load_tokens", "Tokens before a new prompt there.", lambda r: r.load),
    (GaugeMetricFamily, "replica_requests_running", "Requests in its batch.", lambda r: r.num_running),
    (GaugeMetricFamily, "replica_requests_waiting", "Requests that wait there.", lambda r: r.num_waiting),
    (CounterMetricFamily, "replica_prompt_tokens", "Prompt tokens that it was given.", lambda r: r.prompt_tokens),
    (CounterMetricFamily, "replica_cached_tokens", "Of these, found in its prefix cache.", lambda r: r.cached_tokens),
    (CounterMetricFamily, "replica_generation_tokens", "Tokens that it generated.", lambda r: r.output_tokens),
)


def _of_replicas(services: Sequence[GenerationService]) -> Iterator[Metric]:
    """Each replica by its name, and the moves between them; nothing where an engine is one."""
    fleets = [(service, service.engine) for service in services if isinstance(service.engine, Replicated)]
    if not fleets:
        return
    labels = ["model_name", "replica", "node"]
    for kind, name, text, value in _OF_REPLICAS:
        family = kind(name, text, labels=labels)
        for service, engine in fleets:
            for replica in engine.replicas():
                family.add_metric([service.name, replica.name, replica.node], value(replica))
        yield family
    moves = CounterMetricFamily("request_moves", "Requests that went on at another replica.", labels=["model_name"])
    lost = CounterMetricFamily("requests_lost", "Requests that could not.", labels=["model_name"])
    for service, engine in fleets:
        moves.add_metric([service.name], engine.num_moves)
        lost.add_metric([service.name], engine.num_lost)
    yield from (moves, lost)


def _of_pictures(services: Sequence[PictureService]) -> Iterator[Metric]:
    """Metrics of text-to-image models; none without such models."""
    if not services:
        return
    for name, text, value in PICTURE_COUNTERS:
        counter = CounterMetricFamily(name, text, labels=["model_name"])
        for service in services:
            counter.add_metric([service.name], value(service))
        yield counter
    for name, text, value in PICTURE_GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=["model_name"])
        for service in services:
            gauge.add_metric([service.name], value(service))
        yield gauge
    whole = HistogramMetricFamily(
        "image_request_seconds", "From the request to its last picture.", labels=["model_name"]
    )
    for service in services:
        whole.add_metric([service.name], service.meter.whole.cumulative(), service.meter.whole.sum)
    yield whole


def _gauge(
    name: str, text: str, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], GenerationService, float]]
) -> Metric:
    """`rows`: the values of `labels`, the model, the value."""
    gauge = GaugeMetricFamily(name, text, labels=[*_label_names(name), *labels])
    for values, service, value in rows:
        gauge.add_metric([*_labels(name, service), *values], value)
    return gauge


def _label_names(name: str) -> list[str]:
    return ["model_name", "engine"] if name.startswith("vllm:") else ["model_name"]


def _labels(name: str, service: GenerationService) -> list[str]:
    return [service.name, "0"] if name.startswith("vllm:") else [service.name]


def _passed_on(services: Iterable[GenerationService], known: Collection[str]) -> Iterator[Metric]:
    """Metrics of a foreign engine (vLLM's own), of families that are not `known`, with the names under which the models
    are served.
    """
    found: dict[str, Metric] = {}
    for service in services:
        text = service.engine.stats().engine_metrics
        for family in text_string_to_metric_families(text) if text else ():
            if family.name in known or not family.name.startswith(_PREFIX) or family.name.endswith("_created"):
                continue
            kept = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                labels = {**sample.labels, _MODEL: service.name}
                kept.add_sample(sample.name, labels, sample.value)
    yield from found.values()
