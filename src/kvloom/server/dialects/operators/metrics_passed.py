"""Metrics of a foreign engine (vLLM's own), appended to the server's: only those with names that it lacks."""

from collections.abc import Collection, Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvloom.server.serving.service import GenerationService

_PREFIX = "vllm:"
_MODEL = "model_name"


def passed_on(services: Iterable[GenerationService], known: Collection[str]) -> Iterator[Metric]:
    """Families that are not `known`, with the names under which the models are served."""
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
