"""Adapters: which LoRA adapters the ranks of one model hold. Owned by the engine's thread, used between steps."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvloom.checkpoints.lora import FIELD
from kvloom.contract.errors import BadRequest, NotFound
from kvloom.contract.messages import AdapterInfo
from kvloom.contract.request import Request
from kvloom.engine.link.executor import Process
from kvloom.engine.schedule.blocks import Scope, Switch, adapter_salt

MAX_ADAPTERS = 64  # loaded at once
NEVER = 1 << 62  # position of what a prompt does not contain
_LOST = "the adapter was lost when the model restarted"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded adapter: requests name it by `id`, which is never used again."""

    id: int
    path: str
    info: AdapterInfo


class Adapters:
    """Loads and drops LoRA adapters on every rank. `used` gives the adapter ids of running sequences (0, the base
    model, may be among them).
    """

    def __init__(self, executor: Process, used: Callable[[], Iterable[int]]) -> None:
        self._executor, self._used = executor, used
        self._loaded: dict[int, Adapter] = {}
        self._leaving: set[int] = set()  # refused to new requests; dropped after their last sequence
        self._lost: dict[int, str] = {}  # id -> why the adapter could not be loaded again after a restart of the model
        self._ending: dict[int, str] = {}  # id -> why its sequences end; the next whole `reload` returns it
        self._last_id = 0

    def load(self, path: str) -> Adapter:
        """Load an adapter on all ranks. Raises BadRequest, with nothing changed, and RankDied."""
        if len(self._loaded) >= MAX_ADAPTERS:
            raise BadRequest(FIELD, f"{MAX_ADAPTERS} adapters are loaded already; unload one first")
        self._last_id += 1
        adapter = Adapter(self._last_id, path, self._executor.load_adapter(self._last_id, path))
        self._loaded[adapter.id] = adapter
        return adapter

    def unload(self, id: int) -> None:
        """Drop the adapter as soon as no sequence uses it. Unknown ids are ignored. Raises RankDied."""
        self.leave(id)
        self.sweep()

    def leave(self, id: int) -> None:
        """Refuse the adapter to new requests; ranks drop it at a later sweep. Unknown ids are ignored."""
        self._lost.pop(id, None)
        if id in self._loaded:
            self._leaving.add(id)

    def digest(self, id: int) -> str:
        """SHA-256 of the adapter's files, which is part of its blocks' salt; "" for the base model. Raises NotFound
        when it is gone.
        """
        if id == 0:
            return ""
        if id in self._lost:
            raise NotFound(self._lost[id])
        if id not in self._loaded or id in self._leaving:
            raise NotFound("the adapter was unloaded")
        return self._loaded[id].info.digest

    def scope(self, request: Request) -> Scope:
        """Salt and switch of a request's blocks. Raises NotFound when its adapter is gone."""
        digest = self.digest(request.adapter)
        if not digest or not (wanted := self._loaded[request.adapter].info.invocation):
            return Scope(adapter_salt(request.cache_salt, digest))
        return Scope(request.cache_salt, Switch(last_of(wanted, request.prompt_ids), digest))

    def sweep(self) -> None:
        """Drop the leaving adapters that no sequence uses any more. Raises RankDied."""
        for id in self._leaving.difference(self._used()) if self._leaving else ():
            self._executor.unload_adapter(id)
            self._leaving.discard(id)
            del self._loaded[id]

    def reload(self) -> dict[int, str]:
        """Load every adapter in use into freshly started ranks. Returns id -> problem for those that cannot be loaded
        or whose files have changed, also when a call before, which raised, has found that.

        Raises RankDied.
        """
        for id in self._leaving.difference(self._used()):
            del self._loaded[id]
        self._leaving.intersection_update(self._loaded)
        for id, adapter in list(self._loaded.items()):
            try:
                info = self._executor.load_adapter(id, adapter.path)
            except BadRequest as error:
                self._ending[id] = self._lost[id] = f"{_LOST}: {error.problem}"
                del self._loaded[id]
                self._leaving.discard(id)
                continue
            self._loaded[id] = Adapter(id, adapter.path, info)
            if info.digest != adapter.info.digest:
                self._ending[id] = f"{_LOST}: its files have changed"
        ending, self._ending = self._ending, {}
        return ending


def last_of(wanted: Sequence[int], prompt_ids: Sequence[int]) -> int:
    """Where the last `wanted` tokens of a prompt begin, as peft finds them; NEVER when it has none."""
    wanted = tuple(wanted)
    starts = range(len(prompt_ids) - len(wanted), -1, -1)
    return next((at for at in starts if tuple(prompt_ids[at : at + len(wanted)]) == wanted), NEVER)
