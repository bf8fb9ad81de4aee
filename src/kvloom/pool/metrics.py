"""Numbers of nodes as Prometheus reads them; misses by cause."""

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvloom.pool.node import NodeStats, PoolStats

_USAGE = {
    "blocks": "Blocks in the pool",
    "used_bytes": "Bytes of blocks",
    "capacity_bytes": "Bytes of memory taken from the system",
    "rcache_bytes": "Bytes of copies of other nodes' blocks",
    "quota_bytes": "Bytes the tenant may use",
}
_COUNTS = {
    "load_keys": "Blocks asked for by loads",
    "load_hits": "Blocks found by loads",
    "no_room": "Blocks that found no room",
    "evicted": "Blocks evicted",
    "corrupt": "Blocks whose bytes changed in memory",
    "corrupt_on_wire": "Blocks of other nodes that arrived damaged",
    "peer_reads": "Blocks sent to other nodes",
    "peer_writes": "Blocks received from other nodes",
    "push_done": "Blocks sent to their home",
    "push_failed": "Blocks that did not reach their home",
    "push_dropped": "Blocks not sent home because too many waited",
}
_GAUGES = {
    "sessions": "Connections of engines",
    "sessions_limit": "Connections of engines that are served at once",
    "staging_bytes": "Memory of sessions for what they are saving",
    "staging_limit_bytes": "The most that staging may take",
}
_NODE_COUNTS = {
    "sessions_waited": "Times that callers had to wait because as many as may be were served",
    "accept_failures": "Times that the system had no descriptor or memory for a caller",
    "auth_failures": "Clients and peers with a wrong proof",
    "sessions_broken": "Connections of clients that the system broke",
    "peer_sessions_ended": "Connections of other nodes that ended",
    "control_failures": "Heartbeats that the control plane did not answer properly",
    "limits_refused": "Limits of tenants that could not be kept, at each heartbeat",
    "state_failures": "Times that what the control plane said could not be written to its file",
}


class _Collector:
    def __init__(self, nodes: Iterable[NodeStats], num_refused: int | None) -> None:
        self._nodes = list(nodes)
        self._num_refused = num_refused

    def collect(self) -> Iterator[Metric]:
        rows = [(node.node_id, pool) for node in self._nodes for pool in node.pools]
        for name, text in _USAGE.items():
            gauge = GaugeMetricFamily(f"ems_{name}", text, labels=["node", "tenant"])
            for node_id, pool in rows:
                gauge.add_metric([node_id, pool.tenant], pool.usage.get(name, 0))
            yield gauge
        for name, text in _COUNTS.items():
            counter = CounterMetricFamily(f"ems_{name}", text, labels=["node", "tenant"])
            for node_id, pool in rows:
                counter.add_metric([node_id, pool.tenant], pool.counts.get(name, 0))
            yield counter
        yield _split(rows, "miss_", "ems_misses", "Blocks that loads did not find, by cause of the first one", "cause")
        yield _split(rows, "save_", "ems_saves", "Blocks saved, by what became of them", "status")
        if self._num_refused is not None:
            text = "Calls of the control plane without its token"
            yield CounterMetricFamily("ems_control_refused", text, value=self._num_refused)
        yield _split(rows, "refused_", "ems_refused", "Blocks that were not stored, by cause", "cause")
        rows += [(node.node_id, PoolStats("", {}, node.counts)) for node in self._nodes]  # of no tenant yet
        yield _split(rows, "denied_", "ems_denied", "Requests that were refused, by cause", "cause")
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"ems_{name}", text, labels=["node"])
            for node in self._nodes:
                gauge.add_metric([node.node_id], node.gauges.get(name, 0))
            yield gauge
        for name, text in _NODE_COUNTS.items():
            counter = CounterMetricFamily(f"ems_{name}", text, labels=["node"])
            for node in self._nodes:
                counter.add_metric([node.node_id], node.counts.get(name, 0))
            yield counter


def _split(rows: list[tuple[str, PoolStats]], prefix: str, name: str, text: str, label: str) -> Metric:
    counter = CounterMetricFamily(name, text, labels=["node", "tenant", label])
    for node_id, pool in rows:
        for key, value in sorted(pool.counts.items()):
            if key.startswith(prefix):
                counter.add_metric([node_id, pool.tenant, key.removeprefix(prefix)], value)
    return counter


def render(nodes: Iterable[NodeStats], num_refused: int | None = None) -> bytes:
    """The numbers in the Prometheus text format. num_refused: calls of the control plane without its token."""
    registry = CollectorRegistry()
    collector: Any = _Collector(nodes, num_refused)
    registry.register(collector)
    return generate_latest(registry)
