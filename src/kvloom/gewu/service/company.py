"""Company: which requests a model's process has beside each other. Pure.

Whatever a process has when it dies is a suspect, and goes alone from then on, until it is cleared (repute.py).
"""

from collections.abc import Collection, Sequence

from kvloom.gewu.qos import Level
from kvloom.gewu.service.sessions import Request


def company(started: Sequence[Request], sent: Collection[str], hard_floor: Level) -> list[Request]:
    """Those of a model's started requests that its process should have now; `sent`: keys of those that it has.

    Suspects come first, the highest class before others; one below `hard_floor` would not run, so nobody waits for it.
    """
    suspects = [request for request in started if request.is_suspect and request.level >= hard_floor]
    if not suspects:
        return [request for request in started if not request.is_suspect]
    return [min(suspects, key=lambda request: (request.key not in sent, -request.level))]
