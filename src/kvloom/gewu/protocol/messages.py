"""Messages between the daemon and the host of a model (MessagePack), and the interface of a host."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvloom.contract.lifecycle import Failed, Loading, Ping, Pong, Ready
from kvloom.gewu.modelfiles import ModelFiles


class Open(msgspec.Struct, array_like=True):
    """The first message to a worker: load this model."""

    model: str  # a path valid in the worker
    backend: str  # of EngineConfig
    kv_bytes: int  # bytes of the KV cache
    kv_tokens: int  # tokens; a larger cache is useless


class Job(msgspec.Struct, array_like=True, tag="job"):
    """Answer these messages. `salt` keys the prefix cache, `level` is the QoS class.

    `answer`: the first tokens of the answer, delivered by a worker that has died; this worker continues behind them.
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
    max_ctx: int | None = None  # tokens of prompt and answer; None = the model's maximum
    answer: list[int] = []


class Abort(msgspec.Struct, array_like=True, tag="abort"):
    """End job `key`; no event of it follows."""

    key: str


class Floor(msgspec.Struct, array_like=True, tag="floor"):
    """See ClassPlanner: levels below `floor` wait, below `hard_floor` nothing runs; `is_dropping` frees those
    sequences' blocks too, `is_trimming` frees the cached KV of idle sessions.
    """

    floor: int
    hard_floor: int
    is_dropping: bool
    is_trimming: bool = False


class WorkerInfo(msgspec.Struct, array_like=True):
    """Facts of a loaded model."""

    backend: str
    weight_bytes: int
    kv_bytes: int
    max_seq_len: int
    kv_tokens: int  # tokens that the KV cache holds


class Event(msgspec.Struct, array_like=True):
    """More text of a job. `finish` is None, "stop" or "length"; exactly one event of a job has one, unless it is
    aborted.
    """

    key: str
    text: str
    finish: str | None = None
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0  # tokens of the answer so far
    error: str | None = None  # with finish "abort": this job failed, others did not
    token_ids: list[int] = []  # tokens of the answer that this event adds


class Events(msgspec.Struct, array_like=True, tag="events"):
    """The events of one step."""

    events: list[Event]


class Held(msgspec.Struct, array_like=True, tag="held"):
    """KV cache tokens that each session's running requests hold, by salt; sent when they change."""

    tokens: dict[str, int]


Order = Job | Abort | Floor | Ping
Report = Loading | Ready[WorkerInfo] | Failed | Events | Held | Pong


class Host(Protocol):
    """A loaded model. Its messages arrive on the daemon's loop, see Listeners."""

    info: WorkerInfo
    pid: int | None  # None: in this process
    held_tokens: dict[str, int]  # see Held

    def send(self, order: Order) -> None:
        """Send an order without waiting. Orders to a dead host are dropped: `Listeners.death` reports it."""
        ...

    def watch(self, interval_s: float) -> None:
        """Called every `interval_s` while the host has work; ends a host that is silent for too long."""

    async def close(self) -> None:
        """End the host; afterwards its memory is free, and no listener is called."""
        ...


@dataclass(frozen=True, slots=True)
class Listeners:
    """Callbacks for a host's messages."""

    events: Callable[[list[Event]], None]  # the events of a step
    death: Callable[[str], None]  # called once, with the reason, when the host ends by itself


class Opener(Protocol):
    """Loads a model; `files` stay the caller's, `setup.model` is filled in here. Raises ModelError."""

    has_processes: bool  # hosts are processes with memory of their own

    @property
    def pids(self) -> list[int]:
        """Of processes that hold no model."""
        ...

    async def __call__(self, setup: Open, files: ModelFiles, on: Listeners) -> Host: ...
