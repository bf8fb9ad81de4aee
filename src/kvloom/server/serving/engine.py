"""EngineLike: what the server needs of an engine; EngineThread is one. EngineFactory: what a plug-in provides.

Replicated: what an engine of several replicas reports.
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
    """Runs requests; `close` ends them with an error. It blocks, and may be called from any thread."""

    def close(self) -> None: ...


class EngineLike(Closing, Protocol):
    """One loaded model. Called on the loop, except `preload_adapter` and `close`, which block."""

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
        """Load the model of `config`; blocks until it is loaded. Raises BadRequest, ModelError.

        `vocabulary` reads the model's tokenizer; `progress(done_bytes, total_bytes)` may be called meanwhile.
        """
        ...


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """One replica. Totals are counted since its start."""

    name: str
    node: str
    role: str  # "" where all do the same
    is_ready: bool
    load: int  # estimated tokens before a new prompt there
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@runtime_checkable
class Replicated(Protocol):
    """An engine of several replicas. Moves: requests that continued on another replica when theirs was lost."""

    num_moves: int
    num_lost: int  # requests that could not

    def replicas(self) -> Sequence[ReplicaFigures]: ...
