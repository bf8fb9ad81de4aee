"""Figures of replicas: what each reports, and their totals. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import Any

from kvloom.engine.counts import STEP_TOKEN_BOUNDS
from kvloom.engine.histogram import Histogram
from kvloom.engine.stats import Stats
from kvloom.fleet.routing.board import View
from kvloom.server.serving.engine import ReplicaFigures

_MOST_GONE = 100  # replicas that are remembered, because Serve may find one of them again
_MEANS = ("decode_step_s", "prompt_token_s")
_SUMS = [f.name for f in fields(Stats) if isinstance(f.default, int | float) and f.name not in _MEANS]


def told(stats: Stats) -> dict[str, Any]:
    """As plain values, which are sent to routers."""
    plain = {name: getattr(stats, name) for name in (*_SUMS, *_MEANS)}
    steps, accepted = [stats.step_tokens.counts, stats.step_tokens.sum], list(stats.accepted_by_position)
    return plain | {"step_tokens": steps, "accepted_by_position": accepted}


class Totals:
    """Sums over replicas from report to report, in which a counter never falls: what replicas had counted stays when
    they are gone. Owned by one engine.
    """

    def __init__(self) -> None:
        self._last: dict[str, Mapping[str, Any]] = {}  # the last report of each replica
        self._folded = told(sum_of([]))  # counters of those that have been gone for long

    def sum(self, views: Sequence[View]) -> Stats:
        """The sum with these replicas, and with the counters of all others that there were."""
        self._last |= {view.id: view.stats["figures"] for view in views if view.stats}
        present = {view.id for view in views}
        gone = [id for id in self._last if id not in present]
        for id in gone[:-_MOST_GONE]:
            self._folded = told(sum_of([self._folded, _counters(self._last.pop(id))]))
        reports = [each if id in present else _counters(each) for id, each in self._last.items()]
        return sum_of([*reports, self._folded])


def _counters(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The same with all gauges at 0."""
    kept = {name: 0 for name in figures} | {name: figures[name] for name in figures if name.startswith("total_")}
    return kept | {name: figures[name] for name in ("step_tokens", "accepted_by_position")}


def sum_of(figures: Sequence[Mapping[str, Any]]) -> Stats:
    """Counts and gauges are added; step times are the mean over replicas that have run a step."""
    values: dict[str, Any] = {name: sum(each[name] for each in figures) for name in _SUMS}
    values |= {name: _mean([each[name] for each in figures if each[name]]) for name in _MEANS}
    steps = Histogram(STEP_TOKEN_BOUNDS)
    for each in figures:
        counts, total = each["step_tokens"]
        steps.merge(counts, total)
    accepted = zip_longest(*(each["accepted_by_position"] for each in figures), fillvalue=0)
    return Stats(**values, step_tokens=steps, accepted_by_position=tuple(map(sum, accepted)))


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
