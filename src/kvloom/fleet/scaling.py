"""How many replicas are wanted, by queued prompt tokens or by requests. Pure; Serve applies its delays."""

import math
from collections.abc import Mapping
from typing import Any

METRIC = "queued_tokens"
MAILBOXES = "mailboxes"  # calls that are no requests


def wanted(num_queued: float, num_busy: float, per_replica: float) -> int:
    """Replicas for `num_queued` tokens; at least one while any request runs."""
    return max(math.ceil(num_queued / per_replica), 1 if num_busy > 0 or num_queued > 0 else 0)


def on_queued_tokens(context: Any) -> tuple[int, Mapping[str, Any]]:
    """A policy as Serve calls it: returns the number of replicas and an empty state."""
    number = wanted(_told(context, METRIC), context.total_num_requests, context.config.get_target_ongoing_requests())
    return _within(context, number)


def on_requests(context: Any) -> tuple[int, Mapping[str, Any]]:
    """The same by requests that run or wait for a replica, as Serve counts them."""
    num_requests = max(0, context.total_num_requests - _told(context, MAILBOXES))
    number = math.ceil(num_requests / context.config.get_target_ongoing_requests())
    return _within(context, number)


def _told(context: Any, metric: str) -> float:
    """The sum over all replicas."""
    return float(sum((context.aggregated_metrics or {}).get(metric, {}).values()))


def _within(context: Any, number: int) -> tuple[int, Mapping[str, Any]]:
    low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return min(max(number, low), high), {}
