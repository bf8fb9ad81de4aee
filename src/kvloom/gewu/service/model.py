"""A model that the daemon knows: its files, state, process and memory."""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvloom.contract.errors import ModelError
from kvloom.gewu.modelfiles import ModelFiles
from kvloom.gewu.prober.probe import Found
from kvloom.gewu.protocol.messages import Floor, Host, Job, Listeners, Open, Opener
from kvloom.gewu.service.memory import kv_need
from kvloom.gewu.service.sessions import Request
from kvloom.processes.keeper import Keeper

log = logging.getLogger(__name__)

# tokens of a model's KV cache, all its sessions together, when there is room and no session asks for more
KV_TOKENS = 8_192
_CHANGED = "the model's files were changed since this session was created; create a new session"


class State(Enum):
    """See models.py."""

    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"


@dataclass(slots=True, eq=False)
class Model:
    """A model that a session uses or has used recently, loaded or not."""

    found: Found
    files: ModelFiles  # open while the model is known, so that no other file can take their place
    state: State = State.ABSENT
    host: Host | None = None
    task: asyncio.Task[None] | None = None  # while LOADING
    wanted_tokens: int = KV_TOKENS  # of KV cache, when there is room
    kv_tokens: int = 0  # tokens that its KV cache holds, or will
    sent: set[str] = field(default_factory=set)  # keys of the requests that the host has
    is_growing: bool = False  # takes no more requests: once idle it is loaded again with a larger KV cache
    held_bytes: int = 0  # bytes with a full KV cache
    fixed_bytes: int = 0  # of these, without the KV cache, measured after loading; 0 = not measured
    num_loads: int = 0
    last_used_s: float = 0.0
    load_s: float = 0.0
    floor: Floor | None = None  # as the host knows it
    died_s: float | None = None  # when its process died, until it is replaced

    @property
    def key(self) -> str:
        """Equal for the same files, whoever opens them."""
        return self.found.key

    def context(self, max_ctx: int | None) -> int | None:
        """Context length in tokens for a session that asks for `max_ctx`; None = unknown."""
        return min((n for n in (max_ctx, self.found.max_seq_len) if n is not None), default=None)

    def forget_host(self) -> None:
        """Its process has ended: set it to ABSENT."""
        self.state, self.host, self.held_bytes, self.floor = State.ABSENT, None, 0, None
        self.kv_tokens, self.is_growing, self.died_s = 0, False, None
        self.sent.clear()

    def kv_need(self, request: Request) -> int:
        """Tokens of KV cache for a request, prompt and answer."""
        context = self.context(request.session.max_ctx)
        return kv_need(request.num_prompt_bytes, request.chat.max_tokens, context)

    def patience_left_s(self, patience_s: float) -> float:
        """Seconds that its requests still wait for a successor of the dead process; 0 = none died, or time is up."""
        return 0.0 if self.died_s is None else max(0.0, self.died_s + patience_s - time.monotonic())

    def is_unchanged(self) -> bool:
        """Whether its files are still those that were examined."""
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
    """The Job for a request."""
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


class FilesChanged(ModelError):
    """The files have changed: trying again does not help."""


async def open_host(model: Model, opener: Opener, setup: Open, on: Listeners, patience_s: float) -> Host:
    """Raises ModelError, also when the files are not, or no longer, those that were examined.

    After the death of a process whose requests wait, it retries until `patience_s` have passed since then.
    """
    keeper = Keeper()
    while True:
        try:
            return await _open_unchanged(model, opener, setup, on)
        except FilesChanged:
            raise
        except ModelError as error:
            left_s = model.patience_left_s(patience_s)
            if not left_s:
                raise
            pause_s = keeper.pause_s()
            log.warning("%s: %s; the next try is in %g s", model.found.path, error, pause_s)
            await asyncio.sleep(min(pause_s, left_s))
        except Exception:  # a bug here, or no thread for it, must not leave apps waiting for ever
            log.exception("%s cannot be loaded", model.found.path)
            raise ModelError("the service failed; its log says more") from None


async def _open_unchanged(model: Model, opener: Opener, setup: Open, on: Listeners) -> Host:
    if not await asyncio.to_thread(model.is_unchanged):
        raise FilesChanged(_CHANGED)
    try:
        host = await opener(setup, model.files, on)
    except ModelError:
        if model.is_unchanged():
            raise
        raise FilesChanged(_CHANGED) from None  # what it met there is of no use to anyone
    if not model.is_unchanged():
        await host.close()
        raise FilesChanged(_CHANGED)
    return host
