"""A shared library: prebuilt next to its package (a wheel), or compiled once into the user's cache.

The copy in the cache is only loaded by kvloom itself; programs link with the one that install.py installs. Wheel builds
use this module too, with only the standard library.
"""

import hashlib
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ems.common.folders import cache_folder
from ems.native.build import compile_once, is_whole, publish, reason_of_compiler


class BuildError(Exception):
    """The compiler is missing or failed; the message is one line."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """The compiler of a language, and the flags of all libraries in it."""

    language: str  # for people
    variable: str  # environment variable that names another compiler
    command: str
    flags: tuple[str, ...]
    # all files are compiled as one: the headers that each includes take longer than everything else
    makes_units: bool


_FLAGS = ("-D_GNU_SOURCE", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror", "-pthread", "-shared")
C = Compiler("C", "CC", "cc", ("-std=c11", *_FLAGS), makes_units=False)
CPP = Compiler("C++", "CXX", "c++", ("-std=c++17", *_FLAGS), makes_units=True)
# nodelete: the library's threads outlive a dlclose
_LINK_FLAGS = ("-Wl,-z,nodelete", "-Wl,-z,defs")


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The sources of a shared library, and the name under which programs link with it."""

    name: str  # its folder's name in the cache and in the user's data
    package: Path  # the folder with include/, the sources and, in a wheel, lib/
    soname: str  # its number is raised when programs linked before would not work any more
    sources: str  # glob, in `package`
    exports: str  # version script, in `package`
    compiler: Compiler

    @property
    def include(self) -> Path:
        return self.package / "include"

    @property
    def prebuilt(self) -> str:
        """Its path in a wheel, relative to `package`."""
        return f"lib/{self.soname}"

    def source_files(self) -> list[Path]:
        return sorted(self.package.glob(self.sources))

    def path(self) -> Path:
        """The library's path; compiles it if needed. Raises BuildError, OSError."""
        prebuilt = self.package / self.prebuilt
        if prebuilt.exists():
            return prebuilt
        path = cache_folder() / self.name / self._digest() / self.soname
        if not is_whole(path):
            compile_once(path, self.name, self.compile)
        return path

    def compile(self, path: Path, extra_flags: tuple[str, ...] = ()) -> None:
        """Compile it to `path`, whole or not at all. Raises BuildError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / self.soname
            compiler = os.environ.get(self.compiler.variable, self.compiler.command)
            sources = map(str, self._units(Path(folder)))
            command = [compiler, *self.compiler.flags, f"-I{self.include}", *sources, *self._link_flags()]
            try:
                subprocess.run([*command, "-o", str(built), *extra_flags], check=True, capture_output=True, text=True)
            except FileNotFoundError:
                what = f"there is no {self.compiler.language} compiler {compiler!r}"
                raise BuildError(f"{what}; install one or set {self.compiler.variable}") from None
            except subprocess.CalledProcessError as error:
                why = reason_of_compiler(error.stderr)
                raise BuildError(f"compiling {self.soname} with {compiler} failed: {why}") from None
            publish(built, path)

    def _units(self, folder: Path) -> list[Path]:
        """The files for the compiler. A combined one is written into `folder`."""
        sources = self.source_files()
        if not self.compiler.makes_units:
            return sources
        unit = folder / "unit.cpp"
        unit.write_text("".join(f'#include "{source}"\n' for source in sources))
        return [unit]

    def _link_flags(self) -> tuple[str, ...]:
        script = f"-Wl,--version-script={self.package / self.exports}"
        return (*_LINK_FLAGS, f"-Wl,-soname,{self.soname}", script)

    def _digest(self) -> str:
        digest = hashlib.sha256(" ".join((*self.compiler.flags, *_LINK_FLAGS, self.soname)).encode())
        folder = (self.package / self.exports).parent
        for source in sorted([*folder.iterdir(), *self.include.rglob("*.h")]):
            digest.update(source.read_bytes())
        return digest.hexdigest()[:16]
