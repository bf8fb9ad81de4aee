"""What a request may ask of an engine, by name, so that what an engine cannot do is refused before it runs.

An engine lists in RankInfo.lacks which of FEATURES it does not have, and why. Pure.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from kvloom.contract.errors import BadRequest
from kvloom.contract.sampling import ROWS, SamplingParams, is_asked

ALWAYS = frozenset(name for name, row in ROWS.items() if row.is_always)


class Asked(Protocol):
    """A Request, or a Generation of the server."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def pooling(self) -> str: ...
    @property
    def is_look(self) -> bool: ...
    @property
    def priority(self) -> int: ...
    @property
    def cache_salt(self) -> str: ...
    @property
    def gives_kv(self) -> bool: ...
    @property
    def kv_location(self) -> object: ...


# features besides SamplingParams; an adapter is named in several ways
_BESIDE: Mapping[str, Callable[[Asked], object]] = {
    "generation": lambda a: not (a.pooling or a.is_look),
    "pooling": lambda a: a.pooling,
    "priority": lambda a: a.priority,
    "cache_salt": lambda a: a.cache_salt,
    "kv_transfer": lambda a: a.gives_kv or a.kv_location,
}
BESIDE = (*_BESIDE, "adapter")
FEATURES = (*(name for name in ROWS if name not in ALWAYS), *BESIDE)
_NAMES = {
    **{name: row.word for name, row in ROWS.items() if row.word},
    "pooling": "input",
    "generation": "prompt",
    "adapter": "model",
    "kv_transfer": "kv_transfer_params",
}  # the caller's more specific word for it


def check_capable(lacks: Mapping[str, str], asked: Asked, adapter: object) -> None:
    """Raises BadRequest that names the first feature asked for that is in `lacks`, with the reason given there.

    `adapter`: truthy when one is asked for.
    """
    for name, why in lacks.items():
        if name in ROWS:
            is_wanted: object = is_asked(asked.params, name)
        else:
            is_wanted = adapter if name == "adapter" else _BESIDE[name](asked)
        if is_wanted:
            raise BadRequest(_NAMES.get(name, name), f"the engine of this model cannot do it: {why}")
