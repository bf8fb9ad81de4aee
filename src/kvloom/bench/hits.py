"""What a server's prefix cache found while it was measured, by kind, from its /metrics."""

from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvloom.bench.client import Target
from kvloom.client.address import authorization

_COUNTED = (  # counters of the server, as differences
    "block_hits",
    "window_hits",
    "snapshot_hits",
    "stateless_tokens",
    "windowless_tokens",
    "kv_tier_loaded_blocks",
    "kv_tier_loaded_states",
)
_KEPT = ("snapshots", "snapshot_bytes")  # gauges, at the end


def figures_of(target: Target) -> dict[str, int]:
    """Those of these that the server shows of its model; none of a server without such metrics, or that keeps them
    elsewhere.
    """
    wanted = {**{f"{name}_total": name for name in _COUNTED}, **{name: name for name in _KEPT}}
    try:
        url, headers = f"{target.url}/metrics", authorization(target.api_key)
        text = httpx.get(url, headers=headers, trust_env=False).raise_for_status().text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except (httpx.HTTPError, ValueError):
        return {}
    return {
        wanted[sample.name]: int(sample.value)
        for sample in samples
        if sample.name in wanted and sample.labels.get("model_name") == target.model
    }


def between(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """What was counted meanwhile, and what is kept after it."""
    return {name: count - (before.get(name, 0) if name in _COUNTED else 0) for name, count in after.items()}
