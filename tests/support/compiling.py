"""C and C++ of the tests, compiled once: a file of this name, of these words, sources and headers, is there already.

Paths of the checkout are told to the compiler as they are within it: another checkout of the same files finds it too.
"""

import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvloom.native.build import NativeLibrary
from tests.support.kept import kept
from tests.support.waiting import is_locked_out, until

ROOT = Path(__file__).parents[2]
OURS = ("-DKVLOOM_", "-DGEWU_")  # macros of the sources; those of the system's headers are everywhere


def compiled(command: Sequence[str | Path], name: str, includes: Iterable[Path] = ()) -> Path:
    """What `command` makes, with `-o` and a path of this name added to it. includes: what is read and is no header."""
    words = [str(word).replace(f"{ROOT}/", "") for word in command]
    causes = [repr(words).encode(), *(path.read_bytes() for path in (*_read_by(words), *includes))]
    return kept(causes, name, lambda path: subprocess.run([*words, "-o", str(path)], cwd=ROOT, check=True))


def objects(command: Sequence[str | Path], sources: Iterable[Path]) -> list[Path]:
    """One of each source. A macro is not defined for who does not use it, and shares its object with everybody else."""
    found = []
    for source in sources:
        text = source.read_text()
        words = [word for word in map(str, command) if not word.startswith(OURS) or word[2:].partition("=")[0] in text]
        found.append(compiled([*words, "-c", source], f"{source.stem}.o"))
    return found


def units(command: Sequence[str | Path], sources: Sequence[Path]) -> list[Path]:
    """As `objects`, of C++: those to which no macro is told are one, as their headers take longer than all the rest."""
    told = [source for source in sources if any(f"#ifndef {word[2:]}" in source.read_text() for word in OURS)]
    others = [word for source in sources if source not in told for word in ("-include", source)]
    words = [word for word in map(str, command) if not word.startswith(OURS)]
    return [compiled([*words, *others, "-x", "c++", "-c", "/dev/null"], "others.o"), *objects(command, told)]


def cache_with(library: NativeLibrary, folder: Path) -> Path:
    """A user's cache in `folder`, in which there is nothing but the library, as it has been compiled before."""
    path = library.path()
    own = folder / "cache" / Path(*path.parts[-4:])  # kvloom, its name, its digest, its file
    own.parent.mkdir(parents=True)
    shutil.copy(path, own)
    return folder / "cache"


def hasty_compiler(folder: Path, command: str = "g++") -> Path:
    """It without its optimiser, which takes longer than all the rest: what it makes is used, not measured."""
    path = folder / f"hasty-{command}"
    path.write_text(f'#!/bin/sh\nexec {command} "$@" -O0\n')
    path.chmod(0o755)
    return path


def _read_by(words: Sequence[str]) -> Iterator[Path]:
    """Sources and objects among the words, and all headers beside them and in folders that are included."""
    folders = []
    for before, word in zip(["", *words], words, strict=False):
        path = ROOT / word.removeprefix("-I")
        if path.is_file():
            yield path
            folders.append(path.parent)
        elif path.is_dir() and (word.startswith("-I") or before == "-idirafter"):
            folders.append(path)
    for folder in dict.fromkeys(folders):
        yield from sorted(path for path in folder.rglob("*.h*") if path.is_file())


def runs_for_two(owner: Any, compiler: str, ask: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> int:
    """How often `owner` compiles what two threads ask for, the second while the first does."""
    runs: list[Path] = []
    other = threading.Thread(target=ask)

    def compiling(*given: Any) -> None:
        path = given[-1]
        runs.append(path)
        if len(runs) == 1:
            other.start()
            until(lambda: len(runs) == 2 or any(map(is_locked_out, path.parent.glob("*.lock"))))
        path.touch()

    monkeypatch.setattr(owner, compiler, compiling)
    assert ask().exists()
    other.join()
    return len(runs)
