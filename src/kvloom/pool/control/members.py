"""Members: which nodes are alive, and whose a node's id is where two agents show the same. Pure."""

from collections import deque
from collections.abc import Iterable

ALIVE_S = 10.0  # a node that has not been heard of for longer is not offered to others
_MAX_LIVES = 16  # of a node that are remembered


class Members:
    """Of this run of the control plane. Times in seconds of a clock that nobody sets."""

    def __init__(self, known: Iterable[str], now_s: float) -> None:
        """known: nodes that were alive when the control plane last was. They count as heard of now: who tells the first
        node that beats of no others has it keep what belongs to them."""
        self._heard_s = dict.fromkeys(known, now_s)
        self._lives: dict[str, deque[str]] = {}

    def hear(self, node_id: str, incarnation: str, now_s: float) -> bool:
        """Notes a heartbeat. False, and nothing is noted, when a later agent took over the id and is alive.

        incarnation: of the agent, another one each time it starts; "" = one that does not say.
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

    def is_alive(self, node_id: str, now_s: float) -> bool:
        """Whether it was heard of lately."""
        heard_s = self._heard_s.get(node_id)
        return heard_s is not None and now_s - heard_s <= ALIVE_S

    def forget(self, node_id: str) -> None:
        """As if it had never been heard of."""
        self._heard_s.pop(node_id, None)
        self._lives.pop(node_id, None)
