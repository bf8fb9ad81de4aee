"""A C++ library of the pool: shipped in the wheel, or compiled once into the user's cache.

Needs a compiler and nothing else. Wheel builds use this module too, with only the standard library.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ems.common.folders import cache_folder

HERE = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra")
_COMPILE_S = 120
# After a library's own bytes, where loaders stop reading; then its length in 8 bytes, least significant first.
_END = b"kvloom-end"


class BuildError(Exception):
    """There is no compiler, or it failed; the message is one line."""


@dataclass(frozen=True, slots=True)
class Library:
    """The C++ files of a folder as one shared library. They may include headers of `ems/native`."""

    name: str
    folder: Path

    @property
    def prebuilt(self) -> Path:
        """Its path in a wheel."""
        return self.folder / "lib" / f"{self.name}.so"

    @property
    def is_there(self) -> bool:
        """Whether `path` would compile nothing."""
        try:
            return self.prebuilt.exists() or is_whole(self._kept())
        except BuildError:
            return False

    def path(self) -> Path:
        """The library's path; compiles it if needed. Raises BuildError."""
        if self.prebuilt.exists():
            return self.prebuilt
        path = self._kept()
        if not is_whole(path):
            try:
                compile_once(path, self.name, self.compile)
            except OSError as error:
                raise _unwritable(path, error) from None
        return path

    def _kept(self) -> Path:
        """Its path in the user's cache. Raises BuildError for a user without one."""
        try:
            folder = cache_folder() / "ems"
        except OSError as error:
            raise BuildError(f"{error.filename}: {error.strerror}") from None
        return folder / f"{self.name}_{platform.machine()}-{self._digest()}.so"

    def compile(self, path: Path, extra_flags: tuple[str, ...] = ()) -> None:
        """Compile it to `path`, whole or not at all, so that two builds at once do not collide. Raises BuildError."""
        compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            raise BuildError("there is no C++ compiler")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                built = Path(folder) / path.name
                # one source: the headers that each includes take longer to compile than everything else
                unit = Path(folder) / "unit.cpp"
                unit.write_text("".join(f'#include "{source}"\n' for source in sorted(self.folder.glob("*.cpp"))))
                command = [compiler, *FLAGS, *extra_flags, f"-I{HERE}", str(unit), "-o", str(built)]
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMPILE_S)
                if done.returncode:
                    raise BuildError(f"{compiler} failed: {reason_of_compiler(done.stderr)}")
                publish(built, path)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _unwritable(path, error) from None

    def _digest(self) -> str:
        digest = hashlib.sha256(repr(FLAGS).encode())
        for source in sorted({*HERE.glob("*.[hc]pp"), *self.folder.glob("*.[hc]pp")}):
            digest.update(source.read_bytes())
        return digest.hexdigest()[:16]


def reason_of_compiler(said: str) -> str:
    """The line of a compiler's messages that tells why: on a full disk an assembler says much besides."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for sign in ("No space left", "Disk quota", "error"):
        if found := next((line for line in lines if sign in line), ""):
            return found[:500]
    return lines[-1][:500] if lines else "it says nothing"


def compile_once(path: Path, name: str, compile: Callable[[Path], None]) -> None:
    """Call compile(path) unless the file is whole by now; concurrent callers wait for the lock of `name` beside it.

    Raises what `compile` raises, and OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_whole(path):
            compile(path)


def publish(built: Path, path: Path) -> None:
    """Move a finished file to `path`, marked as whole and durable: after a power cut it is there with all of its bytes,
    or not at all. Raises OSError.
    """
    with built.open("r+b") as file:
        length = file.seek(0, os.SEEK_END) + len(_END) + 8
        file.write(_END + length.to_bytes(8, "little"))
        file.flush()
        os.fsync(file.fileno())
    built.replace(path)


def is_whole(path: Path) -> bool:
    """Whether the file has the length that `publish` gave it; False for one that does not exist."""
    try:
        with path.open("rb") as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(max(0, length - len(_END) - 8))
            return file.read() == _END + length.to_bytes(8, "little")
    except OSError:
        return False


def _unwritable(path: Path, error: Exception) -> BuildError:
    return BuildError(f"compiling into {path.parent} failed: {error}")


BLOCKS = Library("libems_blocks", HERE / "sdk")
