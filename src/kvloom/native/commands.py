"""What the commands of all libraries share: printing flags for compiler and linker, and installing."""

import os
from pathlib import Path
from typing import Annotated

import typer

from kvloom.native.build import BuildError
from kvloom.native.install import Development

Cflags = Annotated[bool, typer.Option("--cflags", help="Print what the compiler needs.")]
Libs = Annotated[bool, typer.Option("--libs", help="Print what the linker needs.")]
Prefix = Annotated[Path, typer.Option(help="What lib, include and lib/pkgconfig go under.")]
Destdir = Annotated[Path | None, typer.Option(help="Written before the prefix, which the .pc file keeps: to pack.")]
DEFAULT_PREFIX = Path("/usr/local")


def print_flags(files: Development, cflags: bool, libs: bool) -> None:
    """Print the flags asked for; without any, prints and installs nothing."""
    if not cflags and not libs:
        return
    prefix = files.data_prefix(os.environ)
    _install(files, prefix, None)
    print(" ".join([files.compiler_flags(prefix)] * cflags + [files.linker_flags(prefix)] * libs))


def print_installed(files: Development, prefix: Path, destdir: Path | None) -> None:
    """Install the library, and print the files written."""
    for path in _install(files, Path(os.path.expanduser(prefix)).absolute(), destdir):
        print(path)


def _install(files: Development, prefix: Path, destdir: Path | None) -> list[Path]:
    """Install; an error is one line and exit code 1."""
    name = files.library.name
    try:
        return files.install(prefix, destdir)
    except BuildError as error:
        raise SystemExit(f"{name}: {error}") from None
    except OSError as error:
        raise SystemExit(f"{name}: {error.filename or prefix}: {error.strerror}") from None
