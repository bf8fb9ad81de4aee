"""Ledger: memory that the service's processes take, estimated and measured."""

from collections.abc import Callable, Iterable

from kvloom.gewu.service.memory import Readings, budget_bytes
from kvloom.gewu.service.model import Model

_SLACK_BYTES = 40 << 20  # additional bytes of a process while it loads or computes


class Ledger:
    """Uses estimates of a model until its process was measured, then measured numbers."""

    def __init__(self, has_processes: bool, service_pids: Callable[[], Iterable[int]]) -> None:
        """`service_pids`: the processes that hold no model."""
        self._service_pids = service_pids
        self._has_processes = has_processes
        self._measured: dict[int, int] = {}  # process id -> bytes

    def take(self, measured: dict[int, int], models: list[Model]) -> None:
        """Take measured sizes. A model counts with at least the size of its process."""
        self._measured = measured
        for model in models:
            if model.host is not None and model.host.pid is not None:
                model.held_bytes = max(model.held_bytes, measured.get(model.host.pid, 0))

    def loaded(self, model: Model, process_bytes: int) -> None:
        """A model was loaded; its KV cache is untouched, and its process takes `process_bytes` (0 = unknown)."""
        assert model.host is not None
        info = model.host.info
        if process_bytes and info.weight_bytes:
            model.fixed_bytes = process_bytes + _SLACK_BYTES
        if info.weight_bytes:
            fixed = model.fixed_bytes or info.weight_bytes + self._worker_bytes(model)
            model.held_bytes = fixed + info.kv_bytes

    def fixed_bytes(self, model: Model) -> int:
        """Bytes of a model without its KV cache."""
        return model.fixed_bytes or model.found.weight_bytes + self._worker_bytes(model)

    def _worker_bytes(self, model: Model) -> int:
        """Estimated bytes besides weights and KV cache."""
        return model.found.process_bytes + _SLACK_BYTES if self._has_processes else 0

    def budget(self, readings: Readings, configured_bytes: int | None, held_bytes: int) -> int:
        """Bytes for models. `held_bytes` replaces measured sizes where there are none."""
        if not self._has_processes:
            return budget_bytes(readings, configured_bytes, held_bytes)
        own = sum(self._measured.get(pid, 0) for pid in self._service_pids())
        return max(0, budget_bytes(readings, configured_bytes, sum(self._measured.values())) - own)
