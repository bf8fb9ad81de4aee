"""Installs a library as C and C++ developers expect it: lib/, include/ and lib/pkgconfig/ below a prefix."""

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from ems.common.folders import data_folder
from kvloom.native.build import NativeLibrary

_SYSTEM_PREFIX = Path("/usr")  # searched by the loader without further flags
_PKG_CONFIG = """\
prefix={prefix}
libdir=${{prefix}}/lib
includedir=${{prefix}}/include

Name: {link}
Description: {description}
Version: {version}
Cflags: {cflags}
Libs: -L${{libdir}}{rpath} -l{link}
Libs.private: -pthread
"""


def _no_programs() -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, slots=True)
class Development:
    """Everything that programs are built with: a library, its headers, and the flags for compiler and linker."""

    library: NativeLibrary
    link: str  # as in -lqos, and the name for pkg-config
    description: str
    cflags: str = "-I{include}"
    programs: Callable[[], Mapping[str, str]] = _no_programs  # path below the prefix -> text of a script

    def data_prefix(self, environ: Mapping[str, str]) -> Path:
        """The prefix of --cflags and --libs: the user's data, which outlives caches and virtual environments.

        Raises OSError for a user without a home.
        """
        return data_folder(environ) / self.library.name

    def install(self, prefix: Path, destdir: Path | None = None) -> list[Path]:
        """Install everything. Returns the files written, `destdir` included.

        `prefix` is absolute. Running programs keep the library that they have loaded. Raises BuildError, OSError.
        """
        root = prefix if destdir is None else destdir.absolute() / prefix.relative_to("/")
        lib, soname = root / "lib", self.library.soname
        lib.mkdir(parents=True, exist_ok=True)
        written = [_replace(lib / soname, self.library.path().read_bytes(), 0o755)]
        written.append(_replace_link(lib / f"lib{self.link}.so", soname))
        for header in sorted(self.library.include.rglob("*.h")):
            target = root / "include" / header.relative_to(self.library.include)
            written.append(_replace(target, header.read_bytes(), 0o644))
        for path, text in self.programs().items():
            written.append(_replace(root / path, os.fsencode(text), 0o755))
        return [*written, _replace(lib / "pkgconfig" / f"{self.link}.pc", os.fsencode(self._pkg_config(prefix)), 0o644)]

    def compiler_flags(self, prefix: Path) -> str:
        """For $(kvloom ... --cflags)."""
        return self.cflags.format(include=prefix / "include")

    def linker_flags(self, prefix: Path) -> str:
        """For $(kvloom ... --libs): the program finds the library without LD_LIBRARY_PATH."""
        return f"-L{prefix / 'lib'} -Wl,-rpath,{prefix / 'lib'} -l{self.link} -pthread"

    def _pkg_config(self, prefix: Path) -> str:
        return _PKG_CONFIG.format(
            prefix=prefix,
            link=self.link,
            description=self.description,
            version=version("kvloom"),
            cflags=self.cflags.format(include="${includedir}"),
            rpath="" if prefix == _SYSTEM_PREFIX else " -Wl,-rpath,${libdir}",
        )


def _replace(path: Path, content: bytes, mode: int) -> Path:
    """Write a file whole or not at all; an identical one is left alone, so that make sees no change."""
    if path.is_file() and path.read_bytes() == content:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        new = Path(folder) / path.name
        new.write_bytes(content)
        new.chmod(mode)
        new.replace(path)
    return path


def _replace_link(path: Path, target: str) -> Path:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        new = Path(folder) / path.name
        new.symlink_to(target)
        new.replace(path)
    return path
