"""Board: shared by the router and the engine of one ingress, which are in one process, each on a loop of its own.

The router owns its data and publishes copies; the engine sends it messages.
"""

import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class View:
    """One replica as the router sees it; `stats` as last reported, empty before."""

    id: str
    load: int = 0  # estimated tokens before a new prompt
    num_keys: int = 0  # blocks that it is believed to hold
    stats: Mapping[str, Any] = field(default_factory=dict)


class Board:
    """`views` is replaced as a whole, never changed in place."""

    def __init__(self) -> None:
        self.views: Sequence[View] = ()
        self.begun: queue.SimpleQueue[str] = queue.SimpleQueue()  # keys of requests that have their first token


_boards: dict[str, Board] = {}


def board_of(deployment: str) -> Board:
    """The board of a deployment in this process. May be called from any thread."""
    return _boards.setdefault(deployment, Board())
