"""Members: which nodes are alive, and which of two agents with the same node id owns it. Pure."""

from collections import deque
from collections.abc import Iterable

ALIVE_S = 10.0  # seconds; a node that was silent for longer is not offered to others
LOST_S = 3600.0  # seconds; a node that others never reached is forgotten once it was silent for longer
_MAX_LIVES = 16  # incarnations of a node that are remembered


class Members:
    """Members of this run of the control plane. Times in seconds of a monotonic clock."""

    def __init__(self, known: Iterable[str], now_s: float) -> None:
        """known: nodes that were alive when the control plane last ran. They count as heard of now: otherwise the first
        node that beats would be told that there are no others, and would keep blocks whose home they are.
        """
        self._heard_s = dict.fromkeys(known, now_s)
        self._lives: dict[str, deque[str]] = {}

    def hear(self, node_id: str, incarnation: str, now_s: float) -> bool:
        """Record a heartbeat. False, and nothing is recorded, when a later agent has taken over the id and is alive.

        incarnation: a new one at every start of the agent; "" = unknown.
        """
        if incarnation:
            lives = self._lives.setdefault(node_id, deque(maxlen=_MAX_LIVES))
            if incarnation in lives:
                if lives[-1] != incarnation and self.is_alive(node_id, now_s):
                    return False
                lives.remove(incarnation)
            lives.append(incarnation)
        self._heard_s[node_id] = now_s
        return True

    def is_alive(self, node_id: str, now_s: float, within_s: float = ALIVE_S) -> bool:
        """Whether it was heard of recently."""
        heard_s = self._heard_s.get(node_id)
        return heard_s is not None and now_s - heard_s <= within_s

    def forget(self, node_id: str) -> None:
        """Forget the node completely."""
        self._heard_s.pop(node_id, None)
        self._lives.pop(node_id, None)
