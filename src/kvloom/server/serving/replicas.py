"""What is told of the replicas behind one engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


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
