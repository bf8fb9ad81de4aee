"""How calls of replicas fail, in the fleet's own terms."""

from collections.abc import AsyncGenerator, Callable


class ReplicaLost(Exception):
    """The process that answered is gone, or cannot be reached."""


# takes an encoded request and an encoded hint, returns the items of its stream. Raises ReplicaLost
Call = Callable[[bytes, bytes], AsyncGenerator[bytes]]
