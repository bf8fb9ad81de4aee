"""The Grafana dashboard queries only metrics that /metrics exports."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.servers import FakeServer

DASHBOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "kvloom.json"
FUNCTIONS = {"histogram_quantile", "sum", "max", "rate", "increase", "by", "le", "label_values"}
NEEDED = (
    "time_to_first_token_seconds",
    "time_per_output_token_seconds",
    "request_queue_time_seconds",
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_hits",
    "num_preemptions",
    "kv_cache_usage_perc",
)


def expressions(panels: list[dict[str, Any]]) -> Iterator[str]:
    for panel in panels:
        yield from (target["expr"] for target in panel.get("targets", ()))
        yield from expressions(panel.get("panels", []))


def names_of(expression: str) -> set[str]:
    """The metrics of a PromQL expression, without its label matchers, ranges and groupings."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|by \([^)]*\)", "", expression)
    return set(re.findall(r"[A-Za-z_][\w:]*", bare)) - FUNCTIONS


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


@pytest.fixture
def samples(server: FakeServer) -> dict[str, set[str]]:
    """Sample name -> its label names, on a server that has answered no request yet."""
    families = text_string_to_metric_families(server.client.get("/metrics").text)
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def test_every_metric_of_the_dashboard_is_exported(dashboard: dict[str, Any], samples: dict[str, set[str]]):
    asked = {name for expression in expressions(dashboard["panels"]) for name in names_of(expression)}
    assert len(asked) > 25
    assert asked <= samples.keys()
    for need in NEEDED:
        assert any(need in name for name in asked), f"the dashboard does not show {need}"
    for name in asked:
        assert "model_name" in samples[name]


def test_quantiles_are_of_histograms_with_buckets(dashboard: dict[str, Any], samples: dict[str, set[str]]):
    asked = set(re.findall(r"([\w:]+)_bucket\b", " ".join(expressions(dashboard["panels"]))))
    assert len(asked) >= 8
    for name in asked:
        assert "le" in samples[name + "_bucket"]
        assert {name + "_sum", name + "_count"} <= samples.keys()
    for expression in expressions(dashboard["panels"]):
        if "histogram_quantile" in expression:
            assert "sum by (le)" in expression


def test_labels_that_are_grouped_by_or_shown_are_there(dashboard: dict[str, Any], samples: dict[str, set[str]]):
    from_prometheus = {"instance"}
    for expression in expressions(dashboard["panels"]):
        labels = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}
        for name in names_of(expression):
            assert labels - from_prometheus <= samples[name], expression


def test_its_panels_do_not_overlap_and_its_variables_are_asked_of_a_metric(
    dashboard: dict[str, Any], samples: dict[str, set[str]]
):
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        box = panel["gridPos"]
        cells = {(x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for variable in dashboard["templating"]["list"][1:]:
        [name, label] = re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", variable["definition"]).groups()
        assert label in samples[name] | {"instance"}
