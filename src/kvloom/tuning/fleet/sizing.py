"""How many replicas a trace needs for an SLO, and the plot of that. Pure except for the simulations themselves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvloom.bench.plot import Chart, Line, page
from kvloom.contract.errors import BadRequest
from kvloom.tuning.figures import percentile
from kvloom.tuning.fleet.simulate import FleetSimulated

_COLORS = ("#2563eb", "#16a34a", "#d97706", "#7c3aed")


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in ms of the time to first token and of the mean time per further token, for `percent` % of the requests.

    None = no limit. A failed request exceeds every limit.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    percent: float = 99.0

    def __post_init__(self) -> None:
        """Raises BadRequest naming the field."""
        for name in ("ttft_ms", "tpot_ms"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise BadRequest(f"slo_{name}", f"must be above 0, got {value:g}")
        if not 0 < self.percent <= 100:
            raise BadRequest("slo_percentile", f"must be above 0, at most 100, got {self.percent:g}")


@dataclass(frozen=True, slots=True)
class Point:
    """Result for a number of replicas with a routing. Times in ms at the SLO's percentile."""

    routing: str
    num_replicas: int
    ttft_ms: float | None  # None = nothing was measured
    tpot_ms: float | None
    hit_rate: float
    num_failed: int
    tokens_per_s: float
    is_within: bool | None  # whether the SLO is kept; None = there is no SLO

    def row(self) -> dict[str, object]:
        """The row of a table."""
        within = {} if self.is_within is None else {"within": "yes" if self.is_within else "no"}
        return {
            "routing": self.routing,
            "replicas": self.num_replicas,
            "TTFT, ms": _rounded(self.ttft_ms, 1),
            "TPOT, ms": _rounded(self.tpot_ms, 2),
            "hit rate": round(self.hit_rate, 3),
            "failed": self.num_failed,
            "tok/s": round(self.tokens_per_s, 1),
            **within,
        }


def _rounded(value: float | None, digits: int) -> float | str:
    return "-" if value is None else round(value, digits)


def point_of(routing: str, num_replicas: int, found: FleetSimulated, slo: Slo) -> Point:
    ttft = sorted(1e3 * run.first_token_s for run in found.times if run.first_token_s is not None and not run.error)
    tpot = sorted(found.tpot_ms)
    worst = percentile(ttft, slo.percent) if ttft else None, percentile(tpot, slo.percent) if tpot else None
    limits = (slo.ttft_ms, slo.tpot_ms)
    is_kept = all(limit is None or value is None or value <= limit for value, limit in zip(worst, limits, strict=True))
    failed = found.figures.num_failed
    speed = found.figures.generate_speed
    is_within = None if limits == (None, None) else is_kept and not failed
    return Point(routing, num_replicas, *worst, found.hit_rate, failed, speed, is_within)


def fewest(at: Callable[[int], Point], most: int, least: int = 1) -> tuple[int | None, list[Point]]:
    """The smallest number of replicas from `least` to `most` that keeps the SLO, and all points tried, in order.

    Doubles until the SLO is kept, then bisects, assuming that more replicas are never worse.
    """
    points: dict[int, Point] = {}

    def is_within(count: int) -> bool:
        if count not in points:
            points[count] = at(count)
        return bool(points[count].is_within)

    low, high = least - 1, least
    while not is_within(high):
        if high == most:
            return None, [points[count] for count in sorted(points)]
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_within(middle) else (middle, high)
    return high, [points[count] for count in sorted(points)]


def plot_html(points: Sequence[Point], slo: Slo, needed: Mapping[str, int | None], title: str) -> str:
    """A page with both times over the number of replicas, the limits, and the result."""
    charts = []
    for name, caption, limit in (("ttft_ms", "TTFT", slo.ttft_ms), ("tpot_ms", "TPOT", slo.tpot_ms)):
        lines = []
        for color, routing in zip(_COLORS, needed, strict=False):
            told = [(p.num_replicas, getattr(p, name)) for p in points if p.routing == routing]
            mine = [(float(count), float(value)) for count, value in told if value is not None]
            lines.append(Line(routing, mine, color))
        if limit is not None:
            ends = [float(min(p.num_replicas for p in points)), float(max(p.num_replicas for p in points))]
            lines.append(Line(f"limit {limit:g} ms", [(end, limit) for end in ends], "#dc2626", is_dashed=True))
        charts.append(Chart(f"{caption} at the {slo.percent:g}th percentile, ms", "replicas", lines, is_log2=True))
    return page(title, charts, [point.row() for point in points])
