"""Prompts whose KV blocks go to another engine through the outer tier: which requests may, and when they end."""

from collections.abc import Iterable
from dataclasses import fields

from msgspec.structs import replace

from kvloom.contract.errors import BadRequest
from kvloom.contract.messages import RankInfo
from kvloom.contract.request import Delta, KvGiven, KvLocation, Request
from kvloom.engine.live import Live
from kvloom.engine.schedule.giving import Giving

FIELD = "kv_transfer_params"


def check_giving(request: Request, info: RankInfo, pool: str | None) -> None:
    """Raises BadRequest when the request's blocks cannot be given to, or taken from, another engine.

    `pool`: name of the outer tier's store; "" while it is not known, None without an outer tier.
    """
    if not request.gives_kv and request.kv_location is None:
        return
    own = None if pool is None else _own_location(info, pool)
    if own is None:
        raise BadRequest(FIELD, "needs a KV pool: give kvPoolConfig in the configuration of this server")
    for name in (each.name for each in fields(KvLocation) if request.kv_location is not None):
        theirs, ours = getattr(request.kv_location, name), getattr(own, name)
        if ours and theirs != ours:
            what = f"the blocks are of {name} {theirs!r}, this server has {ours!r}"
            raise BadRequest(f"{FIELD}.kv_pool.{name}", f"{what}: both servers need the same one")


def giving_of(request: Request, info: RankInfo) -> Giving | None:
    num_blocks = len(request.prompt_ids) // info.block_size
    return Giving(num_blocks, info.num_states + info.num_window_blocks > 0) if request.gives_kv else None


def _own_location(info: RankInfo, pool: str) -> KvLocation:
    return KvLocation(pool, info.kv_model, info.kv_layout, info.block_size)


class GivenEnds:
    """Last deltas of requests whose blocks are still being saved to the outer tier. Owned by the engine."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Live, Delta]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, live: Live, delta: Delta) -> bool:
        """Keep a last delta back. False when its request gives no blocks away."""
        if live.seq.giving is not None:
            self._held[live.request.id] = live, delta
        return live.seq.giving is not None

    def take(self, info: RankInfo, pool: str) -> Iterable[tuple[Live, Delta]]:
        """The deltas whose saves have ended, each with what the tier holds of the prompt."""
        for live, delta in list(self._held.values()):
            location, giving = _own_location(info, pool), live.seq.giving
            assert giving is not None
            if not giving.is_pending:
                self.drop(live.request.id)
                yield live, replace(delta, kv_given=KvGiven(location, giving.num_given))

    def drop(self, request_id: str) -> None:
        self._held.pop(request_id, None)

    def lose_rank(self) -> None:
        """The rank is gone: saves under way will not complete."""
        for live, _ in self._held.values():
            if live.seq.giving is not None:
                live.seq.giving.lose(is_computed=True)
