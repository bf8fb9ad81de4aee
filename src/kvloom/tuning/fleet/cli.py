"""The output of `kvloom simulate --fleet`. Wiring, no logic."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest
from kvloom.tuning.fleet.routing import ROUTINGS
from kvloom.tuning.fleet.simulate import Failure, FleetSimulated, Progress, Shape, simulate_fleet
from kvloom.tuning.fleet.sizing import Point, Slo, fewest, plot_html, point_of
from kvloom.tuning.steptime import StepTimes
from kvloom.tuning.trace import Arrival


@dataclass(frozen=True, slots=True)
class Asked:
    """What to simulate. `routings`: each of them. `num_replicas`: None = as many as the SLO needs, up to `most`."""

    shape: Shape
    routings: Sequence[str]
    num_replicas: int | None
    most: int
    slo: Slo
    plot: Path | None
    as_json: bool


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Options as given; `slo`: ms to the first token, ms for each further one, percentile."""

    replicas: int | None
    max_replicas: int
    routing: Sequence[str] | None
    prefill: int
    prefill_from: int
    pool_gb_s: float
    fail: Sequence[str] | None
    slo: tuple[float | None, float | None, float]
    plot: Path | None

    def asked(self, as_json: bool) -> Asked:
        """The checked options. Raises BadRequest that names the option."""
        if self.replicas is None and self.slo[:2] == (None, None):
            raise BadRequest("replicas", "or a limit (slo_ttft_ms, slo_tpot_ms) is required with --fleet")
        failures = tuple(map(failure_of, self.fail or ()))
        parts = (self.prefill, self.prefill_from, 1e9 * self.pool_gb_s, failures)
        least = 1 + max((failure.replica for failure in failures), default=0)
        if self.replicas is None and least > self.max_replicas:
            raise BadRequest("fail", f"must name one of the replicas 0 to {self.max_replicas - 1}, got {least - 1}")
        shape = Shape(self.replicas or least, "prefix", *parts)
        routings = routings_of(self.routing or ["prefix"])
        return Asked(shape, routings, self.replicas, self.max_replicas, Slo(*self.slo), self.plot, as_json)

    def check_unused(self) -> None:
        """Raises BadRequest when an option for fleets is given without a fleet."""
        given = (self.replicas, self.routing, self.prefill, self.fail, *self.slo[:2], self.plot)
        if any(given):
            raise BadRequest("fleet", "is needed by the options of a fleet: give --fleet")


def failure_of(text: str) -> Failure:
    """From "SECOND:REPLICA:DOWN_SECONDS". Raises BadRequest."""
    parts = text.split(":")
    try:
        at_s, replica, down_s = float(parts[0]), int(parts[1]), float(parts[2])
    except (ValueError, IndexError):
        raise BadRequest("fail", f"is SECOND:REPLICA:DOWN_SECONDS, as 30:0:20, got {text!r}") from None
    if len(parts) > 3 or not (0 <= at_s < 1e9 and replica >= 0 and 0 <= down_s < 1e9):
        raise BadRequest("fail", f"is SECOND:REPLICA:DOWN_SECONDS, none below 0, as 30:0:20, got {text!r}")
    return Failure(at_s, replica, down_s)


def routings_of(names: Sequence[str]) -> list[str]:
    """The names without duplicates, all of them in ROUTINGS. Raises BadRequest."""
    for name in names:
        if name not in ROUTINGS:
            raise BadRequest("routing", f"must be one of {', '.join(ROUTINGS)}, got {name!r}")
    return list(dict.fromkeys(names))


def run_fleet(
    trace: Sequence[Arrival],
    config: EngineConfig,
    times: StepTimes,
    asked: Asked,
    progress: Callable[[str], Progress],
) -> None:
    """Run the simulations and print the results. `progress`: returns the callback for a simulation of that name."""
    points: list[Point] = []
    needed: dict[str, int | None] = {}

    def at(routing: str, count: int) -> Point:
        shape = replace(asked.shape, routing=routing, num_replicas=count)
        found: FleetSimulated = simulate_fleet(trace, config, times, shape, progress(f"{routing}, {count} replicas"))
        return point_of(routing, count, found, asked.slo)

    for routing in asked.routings:
        if asked.num_replicas is not None:
            mine = [at(routing, asked.num_replicas)]
            needed[routing] = asked.num_replicas if mine[0].is_within else None
        else:
            needed[routing], mine = fewest(partial(at, routing), asked.most, asked.shape.num_replicas)
        points += mine
    if asked.plot is not None:
        title = f"Replicas for {len(trace)} requests"
        asked.plot.write_text(plot_html(points, asked.slo, needed, title), encoding="utf-8")
    _tell(points, needed, asked)


def _tell(points: Sequence[Point], needed: dict[str, int | None], asked: Asked) -> None:
    if asked.as_json:
        told = {"needed": needed, "points": points}
        sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
        return
    console = Console()
    table = Table(*(f"{name}" for name in points[0].row()))
    for point in points:
        table.add_row(*map(str, point.row().values()))
    console.print(table)
    for routing, count in needed.items() if asked.num_replicas is None else ():
        what = f"{count} replicas keep the SLO" if count else f"no number up to {asked.most} keeps the SLO"
        console.print(f"{routing}: {what}", highlight=False)
    if asked.plot is not None:
        console.print(f"wrote {asked.plot}", highlight=False, soft_wrap=True)
