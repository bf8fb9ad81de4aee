"""KvRouter: Ray Serve's router in front of the engines. Decides by choice.py, with the data of knowledge.py."""

import random
from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from kvloom.fleet.routing.board import View, board_of
from kvloom.fleet.routing.choice import Candidate, Guard, Rules, choose
from kvloom.fleet.routing.knowledge import Knowledge, Report, keys_of
from kvloom.fleet.routing.ledger import Ledger
from kvloom.fleet.wire import Hint, decode_hint


class KvRouter(RequestRouter):
    """Runs on the router's loop of an ingress; the hint is the second argument of each streaming call."""

    def initialize_state(
        self,
        factor: float = 2.0,
        slack_tokens: int = 2048,
        load_cost: float = 0.15,
        is_alone: bool = True,
        is_of_two: bool = False,
    ) -> None:
        """`is_alone`: there is one ingress, so replicas have no load that this router did not assign.

        `is_of_two`: as Serve's own router: two random replicas, of which Serve takes the one with fewer requests.
        """
        self._rules = Rules(Guard(factor, slack_tokens), load_cost)
        self._is_alone, self._is_of_two = is_alone, is_of_two
        self._knowledge, self._ledger = Knowledge(), Ledger()
        self._keys: dict[str, str] = {}  # ledger keys by Serve's id of a call
        self._stats: dict[str, Mapping[str, Any]] = {}  # as last reported, by replica
        self._turn = 0
        self._board = board_of(self._deployment_id.name)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One list a replica, the best first; or the two that were drawn.

        Empty where no replica has the layout that an answer began with: the request waits for one.
        """
        self._learn_begun()
        self._turn += 1
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        hint = _hint_of(pending_request)
        found = {_name(replica.replica_id): replica for replica in candidate_replicas}
        if hint.only in found:
            return [[found[hint.only]]]
        alike = [id for id in found if self._is_alike(id, hint)]
        wanted = [id for id in alike if id not in hint.avoid] or alike
        if self._is_of_two:
            return [[found[id] for id in random.sample(wanted, min(2, len(wanted)))]]
        candidates = [self._candidate(id, hint) for id in wanted]
        return [[found[id]] for id in choose(candidates, hint.num_tokens, self._rules, self._turn)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        hint, replica = _hint_of(pending_request), _name(replica_id)
        if not hint.key:
            return
        candidate = self._candidate(replica, hint)
        self._ledger.routed(hint.key, replica, hint.num_tokens - candidate.num_known)
        self._keys[pending_request.metadata.internal_request_id] = hint.key
        keys = keys_of(hint.prefix)
        self._knowledge.routed(replica, keys)
        if self._stats.get(replica, {}).get("has_tier"):
            self._knowledge.saved(keys)
        self._publish()

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._learn_begun()
        key = self._keys.pop(internal_request_id, None)
        if key is not None:
            self._ledger.ended(key)
            self._publish()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        names = {_name(replica.replica_id) for replica in replicas}
        self._knowledge.keep(names)
        self._ledger.keep(names)
        self._stats = {id: stats for id, stats in self._stats.items() if id in names}
        for replica in replicas:
            self._learn(_name(replica.replica_id), replica.routing_stats or {})
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._publish()

    def _learn(self, id: str, stats: Mapping[str, Any]) -> None:
        """Take a report. Serve repeats all reports whenever any replica has a new one."""
        if not stats or stats == self._stats.get(id):
            return
        self._stats[id] = stats
        figures = stats["figures"]
        self._knowledge.reported(
            id,
            Report(
                figures["num_blocks"], figures["num_cached_blocks"], figures["num_evicted_blocks"],
                epoch=figures["total_crashes"],
            ),
        )  # fmt: skip
        if not self._is_alone:
            self._ledger.reported(id, stats["queued_tokens"])

    def _learn_begun(self) -> None:
        while not self._board.begun.empty():
            self._ledger.begun(self._board.begun.get())

    def _is_alike(self, id: str, hint: Hint) -> bool:
        """Whether the replica may continue the answer, as far as is known."""
        return not hint.layout or self._stats.get(id, {}).get("layout", hint.layout) == hint.layout

    def _candidate(self, id: str, hint: Hint) -> Candidate:
        stats, keys = self._stats.get(id, {}), keys_of(hint.prefix)
        block_size = -(-hint.num_tokens // max(1, len(keys))) if not stats else stats["block_size"]
        num_known = self._knowledge.num_known(id, keys)
        num_pooled = self._knowledge.num_pooled(keys) if stats.get("has_tier") else 0
        most = max(0, hint.num_tokens - 1)  # the last prompt token is always computed
        known = min(num_known * block_size, most)
        return Candidate(id, self._ledger.load(id), known, max(0, min(num_pooled * block_size, most) - known))

    def _publish(self) -> None:
        names = [_name(id) for id in self.curr_replicas]
        self._board.views = [
            View(id, self._ledger.load(id), self._knowledge.num_keys(id), self._stats.get(id, {})) for id in names
        ]


def _name(replica_id: ReplicaID) -> str:
    return str(replica_id.unique_id)


def _hint_of(pending: PendingRequest | None) -> Hint:
    """The hint of a call; an empty one for calls that are not requests of a client."""
    if pending is None or len(pending.args) < 2:
        return Hint("", 0)
    return decode_hint(pending.args[1])
