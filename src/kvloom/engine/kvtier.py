"""KvTier: what the rank process needs of a place where KV blocks outlive the engine. The engine knows none by name."""

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from kvloom.engine.batch import AdapterInfo, Batch, Moved, Runner, StepOutput, Transfer
from kvloom.engine.config import TierConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KvMemory:
    """A rank's KV cache, and all that must agree before another process may use its bytes.

    layers: for each layer its tensors [num_blocks, block_size, ...] (torch, or anything numpy reads without a copy), K
    before V. A backend may permute the bytes inside a block. model: a fingerprint of weights and shape; layout: how the
    backend computes and arranges, beyond dtype and shape. rank, world_size: which part of every block this is.
    """

    layers: Sequence[Sequence[Any]]
    model: str
    layout: str
    rank: int = 0
    world_size: int = 1


class KvTier(Protocol):
    """Moves full blocks between a KvMemory and somewhere else. No method waits; all are called from one thread.

    A block of a transfer belongs to the tier until `poll` has reported the transfer; every one is reported once, at the
    deadline at the latest. Damaged and missing blocks end the prefix that is reported as moved.
    """

    @property
    def is_up(self) -> bool:
        """Whether a transfer has a chance now."""

    def load(self, transfer: Transfer) -> None: ...
    def save(self, transfer: Transfer) -> None: ...
    def poll(self) -> list[Moved]: ...
    def close(self) -> None: ...


OpenTier = Callable[[KvMemory, TierConfig], KvTier]


class KvRunner(Runner, Protocol):
    """A runner whose KV cache can have an outer tier."""

    def kv_memory(self, model: str) -> KvMemory:
        """`model`: path of the weights it was loaded from."""
        ...


def open_tier(config: TierConfig, memory: KvMemory) -> KvTier:
    """The tier of `config.factory`. Raises ServingError for its options."""
    module, name = config.factory.split(":")
    return cast(OpenTier, getattr(importlib.import_module(module), name))(memory, config)


class TieredRunner:
    """A runner with an outer tier: transfers begin before a step and are reported after it. A tier's bug is a miss."""

    def __init__(self, runner: Runner, tier: KvTier) -> None:
        self.info, self.kv_layers = runner.info, runner.kv_layers
        self._runner = runner
        self._tier = tier
        self._refused: list[Moved] = []

    def run(self, batch: Batch) -> StepOutput:
        for load in batch.loads:
            self._begin(self._tier.load, load)
        for save in batch.saves:
            self._begin(self._tier.save, save)
        output = self._runner.run(batch)
        output.moved, self._refused = self._refused, []
        try:
            output.moved += self._tier.poll()
            output.is_tier_up = self._tier.is_up
        except Exception:
            log.exception("the KV tier failed")
        return output

    def load_adapter(self, id: int, path: str) -> AdapterInfo:
        return self._runner.load_adapter(id, path)

    def rest(self) -> None:
        self._runner.rest()

    def unload_adapter(self, id: int) -> None:
        self._runner.unload_adapter(id)

    def _begin(self, begin: Callable[[Transfer], None], transfer: Transfer) -> None:
        try:
            begin(transfer)
        except Exception:
            log.exception("the KV tier refused a transfer")
            self._refused.append(Moved(transfer.id, 0))
