"""Counters of EMSConnector in vLLM's log line and in its Prometheus metrics (vllm:ems_*)."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "lookups": "Requests whose prefix was looked up in EMS.",
    "lookup_blocks": "Blocks that were looked up.",
    "hit_blocks": "Blocks that were found by lookups.",
    "saved_blocks": "Blocks that EMS has taken, summed over ranks.",
    "saved_bytes": "Bytes of those.",
    "unsaved_blocks": "Blocks that EMS did not take: no room, or it was down.",
    "loaded_blocks": "Blocks that came from EMS, summed over ranks.",
    "loaded_bytes": "Bytes of those.",
    "failed_blocks": "Blocks that were found and did not come; they are computed.",
    "save_seconds": "Time from the beginning to the end of saves.",
    "load_seconds": "Time from the beginning to the end of loads.",
}


class EMSStats(KVConnectorStats):
    """Sums since the last report, by name."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(self.data[name], 3) for name in COUNTERS if self.data.get(name)}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class EMSPromMetrics(KVConnectorPromMetrics):
    """One counter for each name and engine."""

    def __init__(
        self, vllm_config: Any, metric_types: dict[Any, Any], labelnames: list[str], per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            name: self._counter_cls(name=f"vllm:ems_{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in self._metrics and value:
                self._metrics[name].labels(*labels).inc(value)
