"""Ingress: the whole server with every dialect and no model, as an ASGI app in front of a FleetEngine."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from starlette.types import ASGIApp

from kvloom.contract.errors import ServingError
from kvloom.fleet.engine import FleetEngine, Ways, manners_of
from kvloom.fleet.lost import ReplicaLost
from kvloom.fleet.plan import Plan
from kvloom.fleet.wire import About
from kvloom.rank.opening import model_tokenizer
from kvloom.server.config.settings import ServerConfig
from kvloom.server.dialects.operators.status import Control
from kvloom.server.errors import Forbidden
from kvloom.server.http.app import AppSettings, make_app
from kvloom.server.http.parsing import Parsing
from kvloom.server.http.slow import BodyTimeoutMiddleware
from kvloom.server.keeping.store import ResponseStore
from kvloom.server.run.guards import guard, policy_of
from kvloom.server.run.mount import make_dialects
from kvloom.server.secure.api_keys import KeyRing
from kvloom.server.serving.admission import Admission
from kvloom.server.serving.health import Health
from kvloom.server.serving.registry import Models
from kvloom.server.serving.service import GenerationService
from kvloom.server.serving.vision.hosts import image_hosts

log = logging.getLogger(__name__)

_POLL_S = 0.2
_ENDED_ELSEWHERE = "this server is one of a fleet: end it with `serve shutdown`, or where `kvloom fleet run` runs"


@dataclass(frozen=True, slots=True)
class Fleet:
    """Access of an ingress to the replicas. `describe` raises ReplicaLost, ServingError."""

    describe: Callable[[], Awaitable[About]]
    ways: Ways


class Ingress:
    """Owned by the actor's loop."""

    def __init__(self, plan: Plan, fleet: Fleet, node: str) -> None:
        """Raises ServingError."""
        self._plan, self._fleet = plan, fleet
        self._config = share_of(plan.config(node), plan.args.ingresses)
        admission = Admission(self._config.max_link_num, self._config.max_queued_tokens)
        self._models = Models([], self._config.options, {}, admission)
        self._health = Health(self._models, is_loading=True)
        self._parsing = Parsing(self._models, self._config.num_parsers)
        self._engine: FleetEngine | None = None

    def app(self) -> ASGIApp:
        """Answers 503 until `load` has ended."""
        store = None
        if self._config.response_store is not None:
            store = ResponseStore(self._config.response_store, self._config.response_limits)
        control = Control(_refuse, f"{self._config.host}:{self._config.port}")
        dialects = make_dialects(self._models, self._health, control, self._config, store)
        settings = AppSettings(self._config.max_body_bytes, image_hosts=image_hosts(self._config.image_hosts))
        keys = KeyRing(self._config.api_key_hashes) if self._config.api_key_hashes else None
        app = make_app(self._health, dialects, settings, self._parsing)
        return guard(BodyTimeoutMiddleware(app), policy_of(self._config), keys)

    async def load(self) -> None:
        """Waits until a replica has described itself."""
        about = await self._about()
        card = await asyncio.to_thread(self._config.models[0].advised)
        tokenizer = await asyncio.to_thread(model_tokenizer, card.engine.model)
        self._engine = FleetEngine(about, self._fleet.ways, manners_of(self._plan.args))
        self._engine.start(asyncio.get_running_loop())
        service = GenerationService(card, self._engine, tokenizer, self._models.admission)
        self._models.add(service)
        for name, path in card.lora_modules:
            self._models.put_adapter(service.with_adapter(name, str(path), self._engine.preload_adapter(str(path)).id))
        self._health.is_loading = False

    async def _about(self) -> About:
        while True:
            try:
                return await self._fleet.describe()
            except (ReplicaLost, ServingError) as problem:
                log.info("no replica yet: %s", problem)
                await asyncio.sleep(_POLL_S)

    async def close(self, grace_s: float) -> None:
        """Refuse new requests; running ones get `grace_s`."""
        self._health.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._models.num_active:
                    await asyncio.sleep(_POLL_S)
        if self._engine is not None:
            self._engine.close()


def share_of(config: ServerConfig, num_ingresses: int) -> ServerConfig:
    """The limits of one of several ingresses: all together admit as many requests as one server would."""
    tokens = config.max_queued_tokens
    return replace(
        config,
        max_link_num=math.ceil(config.max_link_num / num_ingresses),
        max_queued_tokens=None if tokens is None else math.ceil(tokens / num_ingresses),
    )


async def _refuse(grace_s: float | None) -> None:
    raise Forbidden(_ENDED_ELSEWHERE)
