"""What `backendType` may name: an engine that is a plug-in, or the documents' own names, which are not here.

A plug-in is an entry point of the group `kvloom.engines`: its name, and a function that opens an EngineLike. Those of
kvloom itself stand there too, but are known without a look at what is installed, so that a start need not wait for it.
"""

import importlib.metadata
from collections.abc import Mapping
from importlib import import_module
from typing import cast

from kvloom.contract.errors import BadRequest, ModelError
from kvloom.server.serving.engine import EngineFactory

GROUP = "kvloom.engines"
_RANKS = "kvloom.rank.opening:open_engine"
# kvloom's own entry points
OWN: Mapping[str, str] = {"cpu": _RANKS, "torch": _RANKS, "mock": _RANKS, "vllm": "kvloom.vllm.opening:open_engine"}
# a name as it is given, and EngineConfig.backend
_NAMES: Mapping[str, str] = {
    "default": "auto",
    "auto": "auto",
    "cpu": "cpu",
    "torch": "reference",
    "reference": "reference",
    "mock": "fake",
    "fake": "fake",
}
_OPENED_AS = {"auto": "cpu", "reference": "torch", "fake": "mock"}  # by which of OWN
# spec table 2-5 and later releases: libraries of Ascend devices; "" is their default
ELSEWHERE = ("atb", "mindformer", "torchair", "ms")


def backend_of(name: str) -> str:
    """EngineConfig.backend of a name, in any case; other hardware's take what is best here. Raises BadRequest."""
    known = name.lower()
    if known in ELSEWHERE or not known:
        return "auto"
    if known in _NAMES:
        return _NAMES[known]
    if known in OWN or known in (others := _others()):
        return known
    here = ", ".join((*_NAMES, *(own for own in OWN if own not in _NAMES), *sorted(others)))
    raise BadRequest(
        "", f'must name a back end that is installed ({here}; {", ".join(ELSEWHERE)} or "" count as default), '
        f'got "{name[:40]}"'
    )  # fmt: skip


def named_backend(name: str) -> str:
    """backend_of the option --backend. Raises BadRequest."""
    try:
        return backend_of(name)
    except BadRequest as error:
        raise BadRequest("backend", error.problem) from None


def check_backend(name: str) -> None:
    """Raises BadRequest with the names of those that are here."""
    backend_of(name)


def is_elsewhere(name: str) -> bool:
    """Whether it names a library of other hardware, for which the back end that is here stands in."""
    return name.lower() in ELSEWHERE


def factory_of(backend: str) -> EngineFactory:
    """What opens the engine of an EngineConfig.backend.

    Raises BadRequest when none is installed by that name, ModelError when it cannot be imported.
    """
    name = _OPENED_AS.get(backend, backend)
    value = OWN.get(name) or _others().get(name)
    if value is None:
        raise BadRequest("backend", f"no engine named {backend!r} is installed")
    module, _, function = value.partition(":")
    try:
        factory = getattr(import_module(module), function)
    except Exception as error:  # whatever a stranger's module does
        raise ModelError(f"backend {name}: its plug-in {value} cannot be imported: {_one_line(error)}") from error
    if not callable(factory):
        raise ModelError(f"backend {name}: its plug-in {value} is no function that opens an engine")
    return cast(EngineFactory, factory)


def _others() -> dict[str, str]:
    """The engines that other distributions bring, by name in small letters; kvloom's own names are not to be had."""
    found = {point.name.lower(): point.value for point in importlib.metadata.entry_points(group=GROUP)}
    return {name: value for name, value in sorted(found.items()) if name not in OWN and name not in _NAMES}


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
