"""Journey: one request on its way through the fleet; when its replica is lost it continues on another one. Pure.

A token is a function of logits, parameters, seed and position, and logits do not depend on the rest of the batch. So a
replica that gets the prompt, the answer so far and the seed continues with exactly the tokens that the lost one would
have sampled, if its weights have the same form and the same kind of kernels computes them: its `layout` is equal.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from msgspec import structs

from kvloom.contract.request import Delta, Request

# most moves of one request, so that a request that kills replicas does not visit them all
MAX_MOVES = 2


def with_seed(request: Request, draw: Callable[[], int]) -> Request:
    """The request with a seed that can be given to another replica; a greedy one needs none."""
    if request.params.is_greedy or request.params.seed is not None:
        return request
    return replace(request, params=replace(request.params, seed=draw()))


@dataclass(slots=True)
class Journey:
    """`request` has a seed (`with_seed`). Owned by the ingress's loop."""

    request: Request
    told: list[int] = field(default_factory=list)  # tokens of the answer so far
    lost: list[str] = field(default_factory=list)  # replicas that were lost while it ran there
    replica: str = ""  # the present replica
    layout: str = ""  # layout of the weights that computed the answer so far; "" = none has answered yet
    num_cached: int | None = None  # as in the first delta

    @property
    def num_moves(self) -> int:
        return len(self.lost)

    @property
    def required_layout(self) -> str:
        """The layout that a replica needs in order to continue; "" = any may begin."""
        return self.layout if self.told else ""

    def arrived(self, replica: str, layout: str) -> bool:
        """The replica has accepted it. Returns whether its layout is that of the answer so far."""
        self.replica = replica
        if self.required_layout not in ("", layout):
            return False
        self.layout = layout
        return True

    def add(self, delta: Delta) -> Delta:
        """The delta for the caller: figures are as if the request had stayed on one replica."""
        self.told += delta.token_ids
        if self.num_cached is None:
            self.num_cached = delta.num_cached_tokens
        if delta.num_cached_tokens == self.num_cached:
            return delta
        return structs.replace(delta, num_cached_tokens=self.num_cached)

    def lose(self) -> bool:
        """Its replica is gone. Returns whether it may continue on another one."""
        self.lost.append(self.replica)
        self.replica = ""
        return self.num_moves <= MAX_MOVES

    def next_request(self) -> Request:
        """The request for the next replica: the rest of the answer."""
        return replace(self.request, answer=(*self.request.answer, *self.told))
