"""KvTier: what the rank process needs of a store where KV blocks outlive the engine. The engine knows none by name."""

import importlib
import logging
from collections.abc import Callable
from typing import Protocol, cast

from msgspec.structs import replace

from kvloom.contract.config import TierConfig
from kvloom.contract.messages import AdapterInfo, Batch, Moved, Runner, StepOutput, Transfer
from kvloom.rank.tier.kvmemory import KvMemory
from kvloom.rank.tier.watch import Watch

log = logging.getLogger(__name__)


class KvTier(Protocol):
    """Moves full blocks between a KvMemory and somewhere else. No method waits; all are called from one thread.

    A block of a transfer belongs to the tier until `poll` has reported the transfer; every one is reported once, at the
    deadline at the latest. Damaged and missing blocks end the prefix that is reported as moved.
    """

    @property
    def is_up(self) -> bool:
        """Whether a transfer has a chance now."""

    @property
    def pool(self) -> str:
        """Names the store; equal where the same blocks are found. "" while that is not known."""

    def load(self, transfer: Transfer) -> None:
        """Begin to fill the transfer's blocks with what its keys name. May raise: then it moved nothing."""
        ...

    def save(self, transfer: Transfer) -> None:
        """Begin to store the transfer's blocks under its keys; they do not change meanwhile. May raise, as `load`."""
        ...

    def poll(self) -> list[Moved]:
        """The transfers that ended since the last call, however they ended."""
        ...

    def close(self) -> None:
        """Give up transfers under way and the connection. Once, after the last `poll`."""
        ...


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


def with_tier(runner: Runner, config: TierConfig, memory: KvMemory) -> "TieredRunner":
    """The runner with the tier of `config` over its `memory`. Raises ServingError, also when the two do not agree."""
    memory.check(runner.info)
    watch = Watch(memory) if config.is_watched else None
    tiered = TieredRunner(runner, open_tier(config, watch.memory if watch else memory), watch)
    watched = "-watched" if watch else ""  # its blocks travel with their sums
    layout = f"{memory.layout}-x{memory.world_size}{watched}"
    tiered.info = replace(tiered.info, kv_model=memory.model, kv_layout=layout)
    return tiered


class TieredRunner:
    """A runner with an outer tier: transfers begin before a step and are reported after it. A tier's bug is a miss.

    Unless a `watch` sees that it is a wrong byte: that ends the rank.
    """

    def __init__(self, runner: Runner, tier: KvTier, watch: Watch | None = None) -> None:
        self.info, self.kv_layers = runner.info, runner.kv_layers
        self._runner = runner
        self._tier = tier
        self._watch = watch
        self._refused: list[Moved] = []

    def run(self, batch: Batch) -> StepOutput:
        if self._watch is not None:
            self._watch.begin(batch)
        for load in batch.loads:
            self._begin(self._tier.load, load)
        for save in batch.saves:
            self._begin(self._tier.save, save)
        output = self._runner.run(batch)
        output.moved, self._refused = self._refused, []
        try:
            output.moved += self._tier.poll()
            output.is_tier_up, output.pool = self._tier.is_up, self._tier.pool
        except Exception:  # a tier is other people's code: its bugs cost what it would have saved, and no request
            log.exception("the KV tier failed")
        if self._watch is not None:
            self._watch.end(batch, output.moved)
        return output

    def load_adapter(self, id: int, path: str) -> AdapterInfo:
        return self._runner.load_adapter(id, path)

    def prepare_next(self) -> None:
        self._runner.prepare_next()

    def unload_adapter(self, id: int) -> None:
        self._runner.unload_adapter(id)

    def close(self) -> None:
        """The tier's connections; the runner goes on without it."""
        self._tier.close()

    def _begin(self, begin: Callable[[Transfer], None], transfer: Transfer) -> None:
        try:
            begin(transfer)
        except Exception:  # as in `run`; and whoever waits for the transfer is told
            log.exception("the KV tier refused a transfer")
            self._refused.append(Moved(transfer.id, 0))
