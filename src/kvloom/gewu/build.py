"""libqos.so: prebuilt next to this package (a wheel), or compiled once into the user's cache. Needs only `cc`."""

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).parent
INCLUDE = PACKAGE / "include"
NAME = "libqos.so"
_SOURCES = PACKAGE / "c"
_FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror", "-pthread", "-shared")
# nodelete: the reader and callback threads outlive a dlclose
_LINK_FLAGS = ("-Wl,-z,nodelete", "-Wl,-z,defs", f"-Wl,-soname,{NAME}")


class BuildError(Exception):
    """The compiler is missing or failed; the message says what it said."""


def library() -> Path:
    """Path of libqos.so, compiled first if need be. Raises BuildError."""
    prebuilt = PACKAGE / "lib" / NAME
    if prebuilt.exists():
        return prebuilt
    path = _cache() / "kvloom" / "gewu" / _digest() / NAME
    if not path.exists():
        compile_library(path)
    return path


def compile_library(path: Path, extra_flags: tuple[str, ...] = ()) -> None:
    """Compile libqos.so to `path`, whole or not at all. Raises BuildError. A wheel build calls this too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / NAME
        sources = [str(source) for source in sorted(_SOURCES.glob("*.c"))]
        link_flags = [*_LINK_FLAGS, f"-Wl,--version-script={_SOURCES / 'libqos.map'}"]
        command = [os.environ.get("CC", "cc"), *_FLAGS, f"-I{INCLUDE}", *sources, *link_flags, "-o", str(built)]
        try:
            subprocess.run([*command, *extra_flags], check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise BuildError(f"there is no C compiler {command[0]!r}; install one or set CC") from None
        except subprocess.CalledProcessError as error:
            raise BuildError(f"compiling {NAME} failed:\n{error.stderr}") from None
        built.rename(path)


def compiler_flags() -> str:
    """For $(kvloom gewu --cflags)."""
    return f"-I{INCLUDE}"


def linker_flags() -> str:
    """For $(kvloom gewu --libs): the program finds this library without LD_LIBRARY_PATH."""
    folder = library().parent
    return f"-L{folder} -Wl,-rpath,{folder} -lqos -pthread"


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _digest() -> str:
    digest = hashlib.sha256(" ".join((*_FLAGS, *_LINK_FLAGS)).encode())
    for source in sorted([*_SOURCES.iterdir(), *INCLUDE.rglob("*.h")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
