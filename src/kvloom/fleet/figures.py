"""Figures of replicas: what each reports, and their totals. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from kvloom.engine.counts import STEP_TOKEN_BOUNDS
from kvloom.engine.histogram import Histogram
from kvloom.engine.stats import Stats
from kvloom.fleet.routing.board import View
from kvloom.server.serving.engine import ReplicaFigures

_MEANS = ("decode_step_s", "prompt_token_s")
_SUMS = [f.name for f in fields(Stats) if isinstance(f.default, int | float) and f.name not in _MEANS]


def told(stats: Stats) -> dict[str, Any]:
    """As plain values, which are sent to routers."""
    plain = {name: getattr(stats, name) for name in (*_SUMS, *_MEANS)}
    return plain | {"step_tokens": [stats.step_tokens.counts, stats.step_tokens.sum]}


def sum_of(figures: Sequence[Mapping[str, Any]]) -> Stats:
    """Counts and gauges are added; step times are the mean over replicas that have run a step."""
    values: dict[str, Any] = {name: sum(each[name] for each in figures) for name in _SUMS}
    values |= {name: _mean([each[name] for each in figures if each[name]]) for name in _MEANS}
    steps = Histogram(STEP_TOKEN_BOUNDS)
    for each in figures:
        counts, total = each["step_tokens"]
        steps.merge(counts, total)
    return Stats(**values, step_tokens=steps)


def replica_figures(view: View) -> ReplicaFigures:
    figures = view.stats.get("figures") or told(Stats())
    return ReplicaFigures(
        name=view.id,
        node=view.stats.get("node", ""),
        role=view.stats.get("role", ""),
        is_ready=view.stats.get("is_ready", False),
        load=view.load,
        num_running=figures["num_running"],
        num_waiting=figures["num_waiting"],
        num_blocks=figures["num_blocks"],
        num_free_blocks=figures["num_free_blocks"],
        prompt_tokens=figures["total_prompt_tokens"],
        cached_tokens=figures["total_cached_tokens"],
        output_tokens=figures["total_output_tokens"],
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
