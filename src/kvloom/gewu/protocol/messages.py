"""Messages between the daemon and the engine host of a model (MessagePack), and what a host is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvloom.gewu.modelfiles import ModelFiles


class Open(msgspec.Struct, array_like=True):
    """The first message to a worker: load this model."""

    model: str  # a path valid in the worker
    backend: str  # of EngineConfig
    kv_bytes: int  # budget of the KV cache
    kv_tokens: int  # tokens it need not exceed


class Job(msgspec.Struct, array_like=True, tag="job"):
    """Answer these messages. `salt` keys the prefix cache, `level` is the QoS class.

    `answer`: its first tokens, which a worker that is gone has told; this one goes on behind them.
    """

    key: str
    messages: tuple[tuple[str, str], ...]
    level: int
    salt: str
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_ctx: int | None = None  # tokens of prompt and answer; None = as many as the model has
    answer: list[int] = []


class Abort(msgspec.Struct, array_like=True, tag="abort"):
    """End job `key`; no event of it follows."""

    key: str


class Floor(msgspec.Struct, array_like=True, tag="floor"):
    """See ClassPlanner: `floor` waits, below `hard_floor` nothing runs, `is_dropping` takes its blocks too, and
    `is_trimming` the kept KV of idle sessions."""

    floor: int
    hard_floor: int
    is_dropping: bool
    is_trimming: bool = False


class Ping(msgspec.Struct, array_like=True, tag="ping"):
    """Answered between two steps."""


class Loading(msgspec.Struct, array_like=True, tag="loading"):
    """A sign of life while the model is loaded."""

    done_bytes: int
    total_bytes: int


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The model is loaded."""

    backend: str
    weight_bytes: int
    kv_bytes: int
    max_seq_len: int
    kv_tokens: int  # that the KV cache holds


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The model cannot be loaded, or failed in a step; the worker ends after this."""

    error: str


class Event(msgspec.Struct, array_like=True):
    """More text of a job. `finish` None, "stop" or "length"; exactly one event a job has one, unless it is aborted."""

    key: str
    text: str
    finish: str | None = None
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0  # tokens so far
    error: str | None = None  # with finish "abort": this job failed, the others did not
    token_ids: list[int] = []  # of the answer, those that this brings


class Events(msgspec.Struct, array_like=True, tag="events"):
    """What one step brought."""

    events: list[Event]


class Held(msgspec.Struct, array_like=True, tag="held"):
    """Tokens of KV cache that each session's running requests hold now, by salt; sent when it changes."""

    tokens: dict[str, int]


class Pong(msgspec.Struct, array_like=True, tag="pong"):
    """The answer to a Ping."""


Order = Job | Abort | Floor | Ping
Report = Loading | Ready | Failed | Events | Held | Pong


class Host(Protocol):
    """A loaded model. What it says arrives on the daemon's loop, see Listeners."""

    info: Ready
    pid: int | None  # None: in this process
    held_tokens: dict[str, int]  # see Held

    def send(self, order: Order) -> None:
        """Without waiting. An order to a host that has died is dropped: `Listeners.death` tells of it."""
        ...

    def watch(self, interval_s: float) -> None:
        """Called every `interval_s` while it has work: one that gives no sign of life for too long is ended."""

    async def close(self) -> None:
        """End it; when this returns its memory is free. No listener is called any more."""
        ...


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who hears of a host."""

    events: Callable[[list[Event]], None]  # what a step brought
    death: Callable[[str], None]  # once, with the reason, when it ends by itself


class Opener(Protocol):
    """Loads a model; `files` stay the caller's, `setup.model` is filled in here. Raises ModelError."""

    has_processes: bool  # hosts are processes, which take memory of their own

    async def __call__(self, setup: Open, files: ModelFiles, on: Listeners) -> Host: ...
