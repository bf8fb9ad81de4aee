"""`kvloom engine`: prints flags to compile against the Engine API's library, and installs it."""

import shlex
import sys
from collections.abc import Mapping
from typing import Annotated

import typer

from kvloom.engine_api.build import LIBRARY
from kvloom.engine_api.host import main as run_host
from kvloom.native.commands import DEFAULT_PREFIX, Cflags, Destdir, Libs, Prefix, print_flags, print_installed
from kvloom.native.install import Development

app = typer.Typer(help="The engine as a C++ library.", no_args_is_help=True, add_completion=False)

HOST = "libexec/kvloom-engine-host"  # the same path as in cpp/process.cpp
# The document's program includes headers named util.h and metrics.h: ours come last in the search order.
_CFLAGS = "-I{include}/kvloom_engine -idirafter {include}/kvloom_engine/sample"


def _programs() -> Mapping[str, str]:
    python = shlex.quote(sys.executable)
    return {
        HOST: "#!/bin/sh\n# Holds the engine of a program, with the Python that installed libkvloom_engine.so.\n"
        f'exec {python} -P -m kvloom.engine_api.host "$@"\n'
    }


_FILES = Development(LIBRARY, "kvloom_engine", "The engine of kvloom as a C++ library", _CFLAGS, _programs)


@app.callback(invoke_without_command=True)
def flags(cflags: Cflags = False, libs: Libs = False) -> None:
    """The engine as a C++ library: $(kvloom engine --cflags --libs)."""
    print_flags(_FILES, cflags, libs)


@app.command()
def install(prefix: Prefix = DEFAULT_PREFIX, destdir: Destdir = None) -> None:
    """Install libkvloom_engine.so, its headers, its host and kvloom_engine.pc for C++ programs."""
    print_installed(_FILES, prefix, destdir)


@app.command(hidden=True)
def host(fd: Annotated[int, typer.Argument(help="Descriptor of the library's socket.")]) -> None:
    """Hold the engine of the program that started this; its library does so where no host is installed."""
    run_host(fd)
