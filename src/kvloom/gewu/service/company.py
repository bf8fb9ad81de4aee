"""Company: which requests a model's process runs together. Pure.

All requests in a process that dies become suspects, and run alone from then on until they are cleared (repute.py).
"""

from collections.abc import Collection, Sequence

from kvloom.gewu.qos import Level
from kvloom.gewu.service.sessions import Request


def company(started: Sequence[Request], sent: Collection[str], hard_floor: Level) -> list[Request]:
    """The started requests of a model that its process should have now; `sent`: keys of those that it has.

    Suspects come first, alone, the highest class before others. A suspect below `hard_floor` would not run, so others
    do not wait for it.
    """
    suspects = [request for request in started if request.is_suspect and request.level >= hard_floor]
    if not suspects:
        return [request for request in started if not request.is_suspect]
    return [min(suspects, key=lambda request: (request.key not in sent, -request.level))]
