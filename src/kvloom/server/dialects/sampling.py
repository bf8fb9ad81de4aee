"""The sampling parameters of bodies: bounds of their fields, and SamplingParams of what a body gives.

A body has a parameter when it has a field for it; what its protocol says otherwise stands in its dialect.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import Meta

from kvloom.contract.sampling import OFF, ROWS, Kind, SamplingParams
from kvloom.server.serving.service import GenerationService

_MAX_BOUND = 2**63 - 1  # of msgspec's integers


def bounds(name: str, high: float | None = None, opens_low: bool | None = None) -> Meta:
    """The bounds that a field has, those of the parameter but for what is given here."""
    row = ROWS[name]
    most = min(_MAX_BOUND, row.high if high is None else high) if row.high is not None else None
    is_open = row.opens_low if opens_low is None else opens_low
    return Meta(gt=row.low, le=most) if is_open else Meta(ge=row.low, le=most)


class Named:
    """The sampling parameters that bodies of one type have, by SamplingParams' names.

    A field has the parameter's name, the one in `names`, or vLLM's.
    """

    def __init__(self, body: type[msgspec.Struct], **names: str) -> None:
        wanted = {name: names.get(name) or row.vllm or name for name, row in ROWS.items() if not row.is_composed}
        self.names: Mapping[str, str] = {
            name: field for name, field in wanted.items() if field in body.__struct_fields__
        }
        self._names = tuple(self.names)
        self._lists = tuple(name for name in self.names if OFF[name] == ())
        self._read = attrgetter(*self.names.values())

    def of_kinds(self, kinds: Iterable[Kind]) -> tuple[str, ...]:
        """Names of its parameters of these kinds."""
        return tuple(name for name in self.names if ROWS[name].kind in kinds)

    def given(self, body: msgspec.Struct) -> dict[str, Any]:
        """The parameters that the body sets: those that are not null."""
        found = {name: value for name, value in zip(self._names, self._read(body), strict=True) if value is not None}
        for name in self._lists:
            if name in found:
                found[name] = tuple(found[name])
        return found

    def params(self, body: msgspec.Struct, **own: Any) -> SamplingParams:
        """Those given, else off; but `own`, which the dialect makes. Raises BadRequest."""
        return SamplingParams(**(self.given(body) | own))


def advised(
    params: SamplingParams, body: msgspec.Struct, service: GenerationService, names: Mapping[str, str] | None = None
) -> SamplingParams:
    """`params` with the model's sampling advice for every parameter that `body` does not set.

    `names`: of parameters, where those of the body's fields differ.
    """
    advice, names = service.card.advice, names or {}
    taken: dict[str, Any] = {
        name: value for name, value in advice.items() if getattr(body, names.get(name, name), None) is None
    }
    return replace(params, **taken) if taken else params
