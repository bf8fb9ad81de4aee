"""Numbers of a node, for the control plane and for Prometheus; misses by cause."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvloom.pool.node import Node

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


class PoolStats(msgspec.Struct):
    """One tenant on one node."""

    tenant: str
    usage: dict[str, int]
    counts: dict[str, int]


class NodeStats(msgspec.Struct):
    """One node."""

    node_id: str
    pools: list[PoolStats]
    counts: dict[str, int]
    peers: dict[str, bool] = {}


def collect(node: Node, peers: dict[str, bool]) -> NodeStats:
    """The node's numbers now."""
    pools = [PoolStats(pool.tenant, pool.usage(), dict(pool.counts)) for pool in node.pools()]
    return NodeStats(node.config.node_id, pools, dict(node.counts), peers)


class _Collector:
    def __init__(self, nodes: Iterable[NodeStats]) -> None:
        self._nodes = list(nodes)

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
        failures = CounterMetricFamily("ems_auth_failures", "Clients and peers with a wrong proof", labels=["node"])
        for node in self._nodes:
            failures.add_metric([node.node_id], node.counts.get("auth_failures", 0))
        yield failures


def _split(rows: list[tuple[str, PoolStats]], prefix: str, name: str, text: str, label: str) -> Metric:
    counter = CounterMetricFamily(name, text, labels=["node", "tenant", label])
    for node_id, pool in rows:
        for key, value in sorted(pool.counts.items()):
            if key.startswith(prefix):
                counter.add_metric([node_id, pool.tenant, key.removeprefix(prefix)], value)
    return counter


def render(nodes: Iterable[NodeStats]) -> bytes:
    """The numbers in the Prometheus text format."""
    registry = CollectorRegistry()
    collector: Any = _Collector(nodes)
    registry.register(collector)
    return generate_latest(registry)
