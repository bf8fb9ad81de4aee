"""A model that the daemon knows: its files, its state, its process, what it takes."""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvloom.gewu.modelfiles import ModelFiles
from kvloom.gewu.prober.probe import Found
from kvloom.gewu.protocol.messages import Floor, Host, Job
from kvloom.gewu.service.memory import kv_need
from kvloom.gewu.service.sessions import Request

KV_TOKENS = 8_192  # KV cache of a model, all sessions together, when there is room and no session asks for more


class State(Enum):
    """See models.py."""

    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"


@dataclass(slots=True, eq=False)
class Model:
    """A model that some session uses or used a moment ago, in memory or not."""

    found: Found
    files: ModelFiles  # open as long as the model is known: nothing else can come to lie at their paths
    state: State = State.ABSENT
    host: Host | None = None
    task: asyncio.Task[None] | None = None  # while LOADING
    wanted_tokens: int = KV_TOKENS  # of KV cache, when there is room
    kv_tokens: int = 0  # that its KV cache holds, or will
    sent: set[str] = field(default_factory=set)  # keys of the requests that the host has
    is_growing: bool = False  # takes no more requests: when it has none it is loaded again, with a larger KV cache
    held_bytes: int = 0  # what it takes, or will when its KV cache is full
    fixed_bytes: int = 0  # of that what is no KV cache, measured once it was loaded; 0 = never
    num_loads: int = 0
    last_used_s: float = 0.0
    load_s: float = 0.0
    floor: Floor | None = None  # as the host knows it
    died_s: float | None = None  # when its process died, until the next one is there

    @property
    def key(self) -> str:
        """The same for the same files, whoever opens them."""
        return self.found.key

    def context(self, max_ctx: int | None) -> int | None:
        """Tokens of a context of a session that asks for `max_ctx`; None = not known."""
        return min((n for n in (max_ctx, self.found.max_seq_len) if n is not None), default=None)

    def forget_host(self) -> None:
        """Its process has ended: it is ABSENT."""
        self.state, self.host, self.held_bytes, self.floor = State.ABSENT, None, 0, None
        self.kv_tokens, self.is_growing, self.died_s = 0, False, None
        self.sent.clear()

    def kv_need(self, request: Request) -> int:
        """Tokens of KV cache for a request, prompt and answer."""
        context = self.context(request.session.max_ctx)
        return kv_need(request.num_prompt_bytes, request.chat.max_tokens, context)

    def patience_left_s(self, patience_s: float) -> float:
        """How long its requests wait yet for a process in the stead of one that died; 0 = none died, or too long."""
        return 0.0 if self.died_s is None else max(0.0, self.died_s + patience_s - time.monotonic())

    def is_unchanged(self) -> bool:
        """Whether its files still are what was looked at."""
        try:
            return self.files.identity() == self.found.key
        except OSError:
            return False

    def describe(self, num_sessions: int) -> dict[str, Any]:
        """For people."""
        return {
            "path": self.found.path,
            "state": self.state.value,
            "bytes": self.held_bytes,
            "kv_tokens": self.kv_tokens,
            "loads": self.num_loads,
            "load_s": round(self.load_s, 3),
            "sessions": num_sessions,
            "pid": self.host.pid if self.host else None,
            "backend": self.host.info.backend if self.host else None,
        }


def job_of(request: Request) -> Job:
    """What the host is told of a request."""
    chat, session = request.chat, request.session
    return Job(
        request.key,
        chat.messages,
        int(request.level),
        session.salt,
        chat.max_tokens,
        chat.temperature,
        chat.top_p,
        request.seed,
        chat.stop,
        session.max_ctx,
        request.answer,
    )


async def close_host(host: Host | None, loading: asyncio.Task[None] | None) -> None:
    """End a model's process, or its loading; afterwards its memory is free."""
    if loading is not None:
        loading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loading
    if host is not None:
        await host.close()
