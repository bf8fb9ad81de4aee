"""Messages between the daemon and the engine host of a model (MessagePack), and what a host is."""

from collections.abc import Callable
from typing import Protocol

import msgspec


class Open(msgspec.Struct, array_like=True):
    """The first message to a worker: load this model."""

    model: str  # a path valid in the worker
    backend: str  # of EngineConfig
    max_seq_len: int | None
    kv_bytes: int  # budget of the KV cache
    kv_tokens: int  # tokens it need not exceed


class Job(msgspec.Struct, array_like=True, tag="job"):
    """Answer these messages. `salt` keys the prefix cache, `level` is the QoS class."""

    key: str
    messages: tuple[tuple[str, str], ...]
    level: int
    salt: str
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()


class Abort(msgspec.Struct, array_like=True, tag="abort"):
    key: str


class Floor(msgspec.Struct, array_like=True, tag="floor"):
    """See ClassPlanner: `floor` waits, below `hard_floor` nothing runs, `is_dropping` takes its blocks too, and
    `is_trimming` the kept KV of idle sessions."""

    floor: int
    hard_floor: int
    is_dropping: bool
    is_trimming: bool = False


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


class Events(msgspec.Struct, array_like=True, tag="events"):
    """What one step brought."""

    events: list[Event]


class Held(msgspec.Struct, array_like=True, tag="held"):
    """Tokens of KV cache that each session's running requests hold now, by salt; sent when it changes."""

    tokens: dict[str, int]


Order = Job | Abort | Floor
Report = Ready | Failed | Events | Held


class Host(Protocol):
    """A loaded model. Events arrive on the daemon's loop; a host that dies calls `on_death` once."""

    info: Ready
    pid: int | None  # None: in this process
    held_tokens: dict[str, int]  # see Held

    def send(self, order: Order) -> None: ...
    async def close(self) -> None: ...


OnEvents = Callable[[list[Event]], None]
OnDeath = Callable[[str], None]


class Opener(Protocol):
    """Loads a model; `model_fd` stays the caller's. Raises ModelError."""

    async def __call__(self, setup: Open, model_fd: int, on_events: OnEvents, on_death: OnDeath) -> Host: ...
