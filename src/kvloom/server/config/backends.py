"""Values of `backendType`: the name of a plug-in engine, or one of the documents' own names, which are not here.

A plug-in is an entry point of the group `kvloom.engines`: its name, and a function that opens an EngineLike. kvloom's
own engines are registered there too, but are known without searching the installed packages, which would delay a start.
"""

import importlib.metadata
from collections.abc import Mapping
from importlib import import_module
from typing import cast

from kvloom.contract.config import BACKEND_NAMES
from kvloom.contract.errors import BadRequest, ModelError
from kvloom.server.serving.engine import EngineFactory

GROUP = "kvloom.engines"
_RANKS = "kvloom.rank.opening:open_engine"
# kvloom's own entry points
OWN: Mapping[str, str] = {"cpu": _RANKS, "torch": _RANKS, "mock": _RANKS, "vllm": "kvloom.vllm.opening:open_engine"}
_OPENED_AS = {"auto": "cpu", "reference": "torch", "fake": "mock"}  # by which of OWN
# spec table 2-5 and later releases: libraries of Ascend devices; "" is their default
ELSEWHERE = ("atb", "mindformer", "torchair", "ms")


def backend_of(name: str) -> str:
    """EngineConfig.backend for a name in any letter case; other hardware's names give the best one here. Raises
    BadRequest.
    """
    known = name.lower()
    if known in ELSEWHERE or not known:
        return "auto"
    if known in BACKEND_NAMES:
        return BACKEND_NAMES[known]
    if known in OWN or known in (others := _others()):
        return known
    here = ", ".join((*BACKEND_NAMES, *(own for own in OWN if own not in BACKEND_NAMES), *sorted(others)))
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
    """Raises BadRequest, which lists the available names, for an unknown one."""
    backend_of(name)


def is_elsewhere(name: str) -> bool:
    """Whether it names a library of other hardware, which the back end of this machine replaces."""
    return name.lower() in ELSEWHERE


def factory_of(backend: str) -> EngineFactory:
    """The function that opens the engine of an EngineConfig.backend.

    Raises BadRequest when none of that name is installed, ModelError when it cannot be imported.
    """
    name = _OPENED_AS.get(backend, backend)
    value = OWN.get(name) or _others().get(name)
    if value is None:
        raise BadRequest("backend", f"no engine named {backend!r} is installed")
    module, _, function = value.partition(":")
    try:
        factory = getattr(import_module(module), function)
    except Exception as error:  # a third party's module may raise anything
        raise ModelError(f"backend {name}: its plug-in {value} cannot be imported: {_one_line(error)}") from error
    if not callable(factory):
        raise ModelError(f"backend {name}: its plug-in {value} is no function that opens an engine")
    return cast(EngineFactory, factory)


def _others() -> dict[str, str]:
    """Engines of other installed distributions, by lower-case name; kvloom's own names cannot be taken."""
    found = {point.name.lower(): point.value for point in importlib.metadata.entry_points(group=GROUP)}
    return {name: value for name, value in sorted(found.items()) if name not in OWN and name not in BACKEND_NAMES}


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
