"""What happens to calls of replicas, in the fleet's own words."""

from collections.abc import AsyncGenerator, Callable


class ReplicaLost(Exception):
    """The process that answered is gone, or cannot be reached."""


# given a request and a hint, both encoded: the items of its stream. Raises ReplicaLost
Call = Callable[[bytes, bytes], AsyncGenerator[bytes]]
