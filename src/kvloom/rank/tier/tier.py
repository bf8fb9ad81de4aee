"""KvTier: what a rank needs of a store where KV blocks outlive the engine. The engine knows no implementation by
name.
"""

import importlib
import logging
from collections.abc import Callable
from typing import Protocol, cast

from msgspec.structs import replace

from kvloom.contract.config import TierConfig
from kvloom.contract.messages import AdapterInfo, Batch, Moved, Runner, StepOutput, Transfer
from kvloom.contract.states import FoundState
from kvloom.rank.tier.kvmemory import KvMemory
from kvloom.rank.tier.watch import Watch

log = logging.getLogger(__name__)


class KvTier(Protocol):
    """Moves full blocks between a KvMemory and a store. No method waits; all are called from one thread.

    A block of a transfer belongs to the tier until `poll` has reported the transfer. Every transfer is reported once,
    at its deadline at the latest. A damaged or missing block ends the prefix that is reported as moved.

    With KvMemory.states, loads have a `search`: the tier keeps the state that it finds until `settle`, and reports its
    position only if all blocks before it were moved. Saves may have a `state`, which `save` copies.

    With KvMemory.windows, loads have `windows`: the position of their end is reported if all blocks before it were
    moved, and those of the window. Saves may have `windows`, which `save` copies.
    """

    @property
    def is_up(self) -> bool:
        """Whether a transfer is likely to succeed now."""

    @property
    def pool(self) -> str:
        """Name of the store: equal for tiers that find the same blocks. "" while it is not known."""

    def load(self, transfer: Transfer) -> None:
        """Start filling the transfer's blocks with the data of its keys. If it raises, nothing was moved."""
        ...

    def save(self, transfer: Transfer) -> None:
        """Start storing the transfer's blocks, which do not change meanwhile, under its keys. If it raises, nothing was
        moved.
        """
        ...

    def poll(self) -> list[Moved]:
        """Transfers that ended since the last call, successful or not."""
        ...

    def settle(self, found: FoundState) -> None:
        """Write the state that a search has found, or forget it: then an unknown id is ignored."""
        ...

    def close(self) -> None:
        """Cancel transfers under way and close the connection. Called once, after the last `poll`."""
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
    """The runner over the tier of `config` for its `memory`. Raises ServingError, also when the two do not agree."""
    memory.check(runner.info)
    watch = Watch(memory) if config.is_watched else None
    tiered = TieredRunner(runner, open_tier(config, watch.memory if watch else memory), watch)
    watched = "-watched" if watch else ""  # each block travels with its checksum
    layout = f"{memory.layout}-x{memory.world_size}{watched}"
    takes_again = tiered.info.takes_again and watch is None  # it looks at all work
    tiered.info = replace(tiered.info, kv_model=memory.model, kv_layout=layout, takes_again=takes_again)
    return tiered


class TieredRunner:
    """A runner with an outer tier: starts transfers before a step and reports them after it. An exception in the tier
    counts as a miss.

    Exceptions: wrong bytes found by a `watch`, and a state that the engine counts on and that is not written, end the
    rank.
    """

    def __init__(self, runner: Runner, tier: KvTier, watch: Watch | None = None) -> None:
        self.info, self.kv_layers, self.window_layers = runner.info, runner.kv_layers, runner.window_layers
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
        for found in batch.found:
            self._tier.settle(found)
        output = self._runner.run(batch)
        output.moved, self._refused = self._refused, []
        try:
            output.moved += self._tier.poll()
            output.is_tier_up, output.pool = self._tier.is_up, self._tier.pool
        except Exception:  # a tier is a plug-in: its bugs cost what it would have saved, but no request
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
        """Close the tier; the runner goes on without it."""
        self._tier.close()

    def _begin(self, begin: Callable[[Transfer], None], transfer: Transfer) -> None:
        try:
            begin(transfer)
        except Exception:  # as in `run`; the transfer is reported as moving nothing
            log.exception("the KV tier refused a transfer")
            self._refused.append(Moved(transfer.id, 0))
