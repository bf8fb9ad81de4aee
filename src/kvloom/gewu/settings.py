"""The daemon's knobs: environment variables for what tests and devices set, options for what people set."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvloom.engine.config import BACKENDS
from kvloom.engine.errors import BadRequest
from kvloom.gewu.fakehost import FakeSettings
from kvloom.gewu.memory import parse_bytes

SYSTEM_SOCKET = Path("/run/gewu/gewu.sock")


@dataclass(frozen=True, slots=True)
class Settings:
    socket: Path
    budget_bytes: int | None = None
    idle_unload_s: float = 60.0
    psi_file: Path = Path("/proc/pressure/memory")  # its folder's "cpu" is the processor's
    backend: str = "auto"  # of the engine
    fake: FakeSettings | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)  # path prefix -> what stands there

    def resolve(self, path: str) -> str:
        """The path to open for what a client asks for: the longest alias that is a prefix, at a slash, is replaced."""
        for prefix in sorted(self.aliases, key=len, reverse=True):
            rest = path.removeprefix(prefix)
            if rest != path and (not rest or rest.startswith("/") or prefix.endswith("/")):
                return self.aliases[prefix] + rest
        return path


def find_socket(environ: Mapping[str, str]) -> Path:
    """Where the service listens: $GEWU_SOCKET, else the user's, else the system's."""
    if environ.get("GEWU_SOCKET"):
        return Path(environ["GEWU_SOCKET"])
    if environ.get("XDG_RUNTIME_DIR"):
        return Path(environ["XDG_RUNTIME_DIR"]) / "gewu.sock"
    return SYSTEM_SOCKET


def find_service(environ: Mapping[str, str]) -> Path:
    """Where a client finds the service, as libqos.so does: the system's when this user has none of his own."""
    path = find_socket(environ)
    return path if environ.get("GEWU_SOCKET") or path.exists() else SYSTEM_SOCKET


def read_settings(
    aliases: Mapping[str, str], backend: str = "auto", environ: Mapping[str, str] = os.environ
) -> Settings:
    """Raises BadRequest naming the variable or option that is wrong."""
    if backend not in BACKENDS:
        raise BadRequest("backend", f"must be one of {', '.join(BACKENDS)}, got {backend!r}")
    fields: dict[str, object] = {}
    for name, variable, parse in (
        ("budget_bytes", "GEWU_MEM_BUDGET", parse_bytes),
        ("idle_unload_s", "GEWU_IDLE_UNLOAD_S", float),
        ("psi_file", "GEWU_PSI_FILE", Path),
        ("fake", "GEWU_FAKE_ENGINE", _parse_fake),
    ):
        if environ.get(variable):
            try:
                fields[name] = parse(environ[variable])
            except (ValueError, msgspec.DecodeError) as error:
                raise BadRequest(variable, str(error)) from None
    return Settings(find_socket(environ), backend=backend, aliases=aliases, **fields)  # type: ignore[arg-type]


def _parse_fake(text: str) -> FakeSettings:
    """JSON of FakeSettings; "1" for the defaults."""
    return FakeSettings() if text == "1" else msgspec.json.decode(text, type=FakeSettings)
