"""EngineLike: what the server needs of an engine; EngineThread is one. EngineFactory: what a plug-in gives.

Replicated: what is told of an engine that is several.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvloom.contract.config import EngineConfig
from kvloom.contract.messages import Progress, RankInfo
from kvloom.contract.request import Delta, Request
from kvloom.contract.tokenizer import Tokenizer
from kvloom.engine.adapters import Adapter
from kvloom.engine.feed import Feed
from kvloom.engine.stats import Stats


class Closing(Protocol):
    """What runs requests: closed, it ends them with an error. Blocks; safe from any thread."""

    def close(self) -> None: ...


class EngineLike(Closing, Protocol):
    """One loaded model. Safe to call from the loop, but for `preload_adapter` and `close`, which block."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to work; feeds are read on `loop`."""

    @property
    def max_seq_len(self) -> int: ...
    @property
    def is_ready(self) -> bool: ...
    def check_ready(self) -> None: ...
    @property
    def info(self) -> RankInfo: ...
    def stats(self) -> Stats: ...
    def open(self, requests: Sequence[Request]) -> Feed: ...
    def stream(self, request: Request) -> AsyncGenerator[Delta]: ...
    def abort(self, request_id: str) -> None: ...
    def preload_adapter(self, path: str) -> Adapter: ...
    async def load_adapter(self, path: str) -> Adapter: ...
    def unload_adapter(self, adapter: int) -> None: ...
    async def reset_prefix_cache(self, preempts: bool) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self, wants_same_weights: bool) -> None: ...


class EngineFactory(Protocol):
    """An entry point of the group kvloom.engines. It may have an attribute `check(config)`, for `config check`."""

    def __call__(
        self, config: EngineConfig, vocabulary: Callable[[], Tokenizer], progress: Progress | None = None
    ) -> EngineLike:
        """Load the model of `config`; blocks until it is there. Raises BadRequest, ModelError.

        `vocabulary` reads the model's tokenizer, `progress(done_bytes, total_bytes)` may be called meanwhile.
        """
        ...


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """One replica. Totals are since it started."""

    name: str
    node: str
    role: str  # "" where all do everything
    is_ready: bool
    load: int  # tokens before a new prompt there, as the router sees it
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@runtime_checkable
class Replicated(Protocol):
    """An engine that is several. Moves: requests that went on elsewhere when a replica was lost under them."""

    num_moves: int
    num_lost: int  # requests that could not

    def replicas(self) -> Sequence[ReplicaFigures]: ...
