"""EngineReplica: one engine with its ranks, as an actor of Ray Serve. Streams deltas to the caller."""

import asyncio
import functools
import gc
import logging
import os
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from kvloom.contract.errors import BadRequest, ModelError, ServingError
from kvloom.fleet.agent import pool_tier
from kvloom.fleet.figures import told
from kvloom.fleet.mail.outbox import ITEM_S, Outbox
from kvloom.fleet.plan import Plan, form_of, layout_of, served_as
from kvloom.fleet.wire import About, Brought, Ended, Hello, decode_asked, decode_item, decode_opening, encode, fault
from kvloom.rank.opening import model_tokenizer
from kvloom.server.config.backends import factory_of
from kvloom.server.serving.card import ModelCard
from kvloom.server.serving.engine import EngineLike

log = logging.getLogger(__name__)

_SAVE_POLL_S = 0.002
_LOST_S = 30.0  # an engine that is down for so much longer than requests wait counts as lost


class EngineReplica:
    """`name` and `node` are Ray's. Owned by the actor's loop."""

    def __init__(self, plan: Plan, name: str, node: str, role: str = "") -> None:
        self._plan, self.name, self._node, self._role = plan, name, node, role
        self._engine: EngineLike | None = None
        self._card: ModelCard | None = None
        self.form = ""  # form of its weights
        self._layout, self._serves = "", ""
        self._outboxes: dict[str, Outbox] = {}  # outboxes by mailbox, except full ones
        self.num_mailboxes = 0  # outboxes filled here
        self._queued: dict[str, int] = {}  # request -> prompt tokens of requests without an answer yet
        self._adapters: list[str] = []
        self._unready_since_s: float | None = None

    async def start(self) -> None:
        """Load the model. Raises ServingError, one sentence."""
        card = self._plan.config(self._node).models[0]
        if self._plan.args.kv_pool:
            card = replace(card, engine=replace(card.engine, kv_tier=pool_tier(card.engine.kv_tier)))
        engine = await asyncio.to_thread(self._open, card)
        engine.start(asyncio.get_running_loop())
        self._engine, self._card = engine, card
        self.form = form_of(card.engine, engine.info)
        self._layout = layout_of(self.form)
        self._serves = served_as(card.engine, self._adapters)
        gc.collect()
        gc.freeze()  # objects loaded by now are never garbage, so they are not scanned again

    def _open(self, card: ModelCard) -> EngineLike:
        load = functools.cache(functools.partial(model_tokenizer, card.engine.model))
        engine = factory_of(card.engine.backend)(card.engine, load)
        try:
            for name, path in card.lora_modules:
                try:
                    self._adapters.append(engine.preload_adapter(str(path.resolve())).info.digest)
                except BadRequest as error:
                    raise BadRequest("loraModules", f"{name}={path}: {error.problem}") from None
        except ServingError:
            engine.close()
            raise
        return engine

    @property
    def engine(self) -> EngineLike:
        """Raises ModelError before `start`."""
        if self._engine is None:
            raise ModelError("the replica has not loaded its model")
        return self._engine

    def about(self) -> About:
        info, engine = self.engine.info, self.engine
        who = (self.name, self._layout, self._plan.version, self._node, os.getpid())
        return About(*who, engine.max_seq_len, info, self._adapters, self._serves)

    async def stream(self, data: bytes) -> AsyncGenerator[bytes]:
        """Yields Hello, the first deltas, and the number of deltas at the end; others go as letters once the caller has
        a mailbox here, and before that as one item a step, at most one in ITEM_S.
        """
        asked = decode_asked(data)
        request, num_told = asked.request, 0
        self._queued[request.id] = len(request.prompt_ids)
        try:
            with self.engine.open([request]) as feed:
                yield encode(Hello(self.name, self._layout, self._serves))
                while step := await feed.get():
                    self._queued.pop(request.id, None)
                    yield encode(Brought(num_told, [delta for _, delta in step]))
                    num_told += len(step)
                    if step[-1][1].finish_reason is not None:
                        break
                    if (outbox := self._outboxes.get(asked.box)) is not None:
                        num_told = await outbox.carry(asked.key, feed, num_told)
                        break
                    await asyncio.sleep(ITEM_S)
                yield encode(Ended(num_told))
        except ServingError as error:
            yield encode(fault(error))
        finally:
            self._queued.pop(request.id, None)

    async def post(self, data: bytes) -> AsyncGenerator[bytes]:
        """Fill the mailbox of an ingress; ends when it has had no requests for a while."""
        opening = decode_opening(data)
        if opening.replica != self.name or opening.box in self._outboxes:
            return
        self._outboxes[opening.box] = outbox = Outbox()
        self.num_mailboxes += 1
        try:
            async with aclosing(outbox.items()) as items:
                async for item in items:
                    if outbox.is_full:
                        self._forget(opening.box, outbox)
                    yield item
        finally:
            self.num_mailboxes -= 1
            self._forget(opening.box, outbox)

    def _forget(self, box: str, outbox: Outbox) -> None:
        if self._outboxes.get(box) is outbox:
            del self._outboxes[box]

    async def prefill(self, data: bytes) -> AsyncGenerator[bytes]:
        """As `stream`, up to the first token, which is sent once the prompt's blocks are in the pool; another replica
        decodes.
        """
        is_told = False
        async with aclosing(self.stream(data)) as items:
            async for item in items:
                if is_told := not isinstance(decode_item(item), Hello):
                    await self._saved()
                yield item
                if is_told:
                    return

    async def _saved(self) -> None:
        """Wait until blocks and states on their way to the pool have arrived, at most as long as a load may take."""
        assert self._card is not None
        tier = self._card.engine.kv_tier
        until_s = time.monotonic() + (tier.timeout_s if tier else 0.0)
        while time.monotonic() < until_s:
            stats = self.engine.stats()
            if not (stats.num_saving_blocks or stats.num_saving_states):
                return
            await asyncio.sleep(_SAVE_POLL_S)

    def check(self) -> None:
        """Raises ModelError when the ranks are permanently lost."""
        if self.engine.is_ready:
            self._unready_since_s = None
            return
        now_s = time.monotonic()
        self._unready_since_s = self._unready_since_s or now_s
        assert self._card is not None
        if now_s - self._unready_since_s > self._card.engine.crash_patience_s + _LOST_S:
            raise ModelError("the model's process does not come back")

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of requests without an answer yet."""
        return sum(self._queued.values())

    def report(self) -> dict[str, Any]:
        """The report for routers, as plain values."""
        info = self.engine.info
        return {
            "figures": told(self.engine.stats()),
            "layout": self._layout,
            "version": self._plan.version,
            "node": self._node,
            "role": self._role,
            "pid": os.getpid(),
            "is_ready": self.engine.is_ready,
            "block_size": info.block_size,
            "queued_tokens": self.queued_tokens,
            "has_tier": self._card is not None and self._card.engine.kv_tier is not None,
        }

    def close(self) -> None:
        """Blocks until the ranks are gone."""
        if self._engine is not None:
            self._engine.close()
