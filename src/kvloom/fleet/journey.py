"""Journey: one request on its way through the fleet; lost with one replica, it goes on with another. Pure.

A token is a function of logits, parameters, seed and position, and logits do not depend on who else is in the batch: a
replica that is given the prompt, the answer so far and the seed goes on with the very tokens that the lost one would
have said. That holds for weights in one form, computed by one kind of kernels: their `layout`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from msgspec import structs

from kvloom.contract.request import Delta, Request

MAX_MOVES = 2  # a request that ends whoever computes it must not walk the fleet


def with_seed(request: Request, draw: Callable[[], int]) -> Request:
    """The request with a seed that another replica can be given; a greedy one needs none."""
    if request.params.is_greedy or request.params.seed is not None:
        return request
    return replace(request, params=replace(request.params, seed=draw()))


@dataclass(slots=True)
class Journey:
    """`request` has a seed (`with_seed`). Owned by the ingress's loop."""

    request: Request
    told: list[int] = field(default_factory=list)  # tokens of the answer so far
    lost: list[str] = field(default_factory=list)  # replicas that died under it
    replica: str = ""  # where it is
    layout: str = ""  # of the weights that said what was told; "" = nobody has answered yet
    num_cached: int | None = None  # as the first delta said

    @property
    def num_moves(self) -> int:
        return len(self.lost)

    @property
    def required_layout(self) -> str:
        """What a replica must be like to go on; "" = any may begin."""
        return self.layout if self.told else ""

    def arrived(self, replica: str, layout: str) -> bool:
        """The replica has accepted it; whether it may answer there, with the weights and kernels that it began with."""
        self.replica = replica
        if self.required_layout not in ("", layout):
            return False
        self.layout = layout
        return True

    def add(self, delta: Delta) -> Delta:
        """What the caller is told of it: that a request has moved changes no figure of its answer."""
        self.told += delta.token_ids
        if self.num_cached is None:
            self.num_cached = delta.num_cached_tokens
        if delta.num_cached_tokens == self.num_cached:
            return delta
        return structs.replace(delta, num_cached_tokens=self.num_cached)

    def lose(self) -> bool:
        """Its replica is gone; whether it may go on elsewhere."""
        self.lost.append(self.replica)
        self.replica = ""
        return self.num_moves <= MAX_MOVES

    def next_request(self) -> Request:
        """What the next replica is asked: the rest of the answer."""
        return replace(self.request, answer=(*self.request.answer, *self.told))
