"""The daemon's settings: environment variables for tests and devices, options for people."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from kvloom.contract.config import BACKEND_NAMES, MAX_CRASH_PATIENCE_S
from kvloom.contract.errors import BadRequest
from kvloom.gewu.hosts.fake import FakeSettings
from kvloom.gewu.service.memory import parse_bytes

SYSTEM_SOCKET = Path("/run/gewu/gewu.sock")
_IDLE_UNLOAD_S = 60.0
_MAX_IDLE_S = 1e9
_WORKER_SILENCE_S = 30.0
_MIN_SILENCE_S = 0.1  # a process that answers at all does so within less
_CRASH_PATIENCE_S = 120.0
_PSI_FILE = Path("/proc/pressure/memory")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    """All of them, checked."""

    socket: Path
    budget_bytes: int | None = None
    idle_unload_s: float = _IDLE_UNLOAD_S
    worker_silence_s: float = _WORKER_SILENCE_S  # a model process that does not answer a ping for this long is ended
    crash_patience_s: float = _CRASH_PATIENCE_S  # how long requests wait for a successor of a dead model process
    psi_file: Path = _PSI_FILE  # its "cpu" file is the processor's
    backend: str = "auto"  # backend of the engine
    fake: FakeSettings | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)  # path prefix -> replacement

    def resolve(self, path: str) -> str:
        """The path with the longest matching alias, a prefix that ends at a slash, replaced; without one, unchanged.

        A path that leaves the alias's folder by ".." is not replaced.
        """
        for prefix in sorted(self.aliases, key=len, reverse=True):
            rest = path.removeprefix(prefix)
            is_below = rest != path and (not rest or rest.startswith("/") or prefix.endswith("/"))
            if is_below and ".." not in rest.split("/"):
                return self.aliases[prefix] + rest
        return path


def find_socket(environ: Mapping[str, str]) -> Path:
    """Where the service listens: $GEWU_SOCKET, else the user's path, else the system's."""
    if environ.get("GEWU_SOCKET"):
        return Path(environ["GEWU_SOCKET"])
    if environ.get("XDG_RUNTIME_DIR"):
        return Path(environ["XDG_RUNTIME_DIR"]) / "gewu.sock"
    return SYSTEM_SOCKET


def find_service(environ: Mapping[str, str]) -> Path:
    """Where a client finds the service, as libqos.so does: the system's when this user runs none."""
    path = find_socket(environ)
    return path if environ.get("GEWU_SOCKET") or path.exists() else SYSTEM_SOCKET


def read_settings(
    aliases: Mapping[str, str], backend: str = "auto", environ: Mapping[str, str] = os.environ
) -> Settings:
    """Raises BadRequest that names the wrong variable or option."""
    if backend.lower() not in BACKEND_NAMES:
        raise BadRequest("backend", f"must be one of {', '.join(BACKEND_NAMES)}, got {backend[:40]!r}")
    return Settings(
        find_socket(environ),
        _read(environ, "GEWU_MEM_BUDGET", parse_bytes, None),
        _read(environ, "GEWU_IDLE_UNLOAD_S", _seconds(0, _MAX_IDLE_S), _IDLE_UNLOAD_S),
        _read(environ, "GEWU_WORKER_SILENCE_S", _seconds(_MIN_SILENCE_S, _MAX_IDLE_S), _WORKER_SILENCE_S),
        _read(environ, "GEWU_CRASH_PATIENCE_S", _seconds(0, MAX_CRASH_PATIENCE_S), _CRASH_PATIENCE_S),
        _read(environ, "GEWU_PSI_FILE", Path, _PSI_FILE),
        BACKEND_NAMES[backend.lower()],
        _read(environ, "GEWU_FAKE_ENGINE", _parse_fake, None),
        aliases,
    )


def _read(environ: Mapping[str, str], variable: str, parse: Callable[[str], T], default: T) -> T:
    text = environ.get(variable)
    if not text:
        return default
    try:
        return parse(text)
    except (ValueError, msgspec.DecodeError) as error:
        raise BadRequest(variable, str(error)) from None


def _seconds(low: float, high: float) -> Callable[[str], float]:
    """Reads a number of seconds from `low` to `high`."""

    def parse(text: str) -> float:
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not low <= seconds <= high:
            raise ValueError(f"must be a number of seconds between {low:g} and {high:g}, got {text!r:.80}")
        return seconds

    return parse


def _parse_fake(text: str) -> FakeSettings:
    """JSON of FakeSettings; "1" for the defaults."""
    return FakeSettings() if text == "1" else msgspec.json.decode(text, type=FakeSettings)
