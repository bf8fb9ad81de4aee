"""What `backendType` may name: the back ends that are here, and the documents' own, which are not."""

from collections.abc import Mapping

from kvloom.contract.errors import BadRequest

# the name in config.json, and EngineConfig.backend
INSTALLED: Mapping[str, str] = {
    "default": "auto",
    "auto": "auto",
    "cpu": "cpu",
    "torch": "reference",
    "reference": "reference",
    "mock": "fake",
    "fake": "fake",
}
# spec table 2-5 and later releases: libraries of Ascend devices; "" is their default
ELSEWHERE = ("atb", "mindformer", "torchair", "ms")


def backend_of(name: str) -> str:
    """EngineConfig.backend of a name, in any case; other hardware's take what is best here. Raises BadRequest."""
    known = name.lower()
    if known in ELSEWHERE or not known:
        return "auto"
    if known not in INSTALLED:
        here = ", ".join(INSTALLED)
        raise BadRequest(
            "", f'must name a back end that is installed ({here}; {", ".join(ELSEWHERE)} or "" count as default), '
            f'got "{name[:40]}"'
        )  # fmt: skip
    return INSTALLED[known]


def check_backend(name: str) -> None:
    """Raises BadRequest with the names of those that are here."""
    backend_of(name)


def is_elsewhere(name: str) -> bool:
    """Whether it names a library of other hardware, for which the back end that is here stands in."""
    return name.lower() in ELSEWHERE
