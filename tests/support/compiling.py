"""C and C++ programs of the tests, compiled once: kept under their name, command, sources and headers.

The compiler gets paths relative to the checkout, so that another checkout with the same files finds the results.
"""

import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ems.native.build import publish
from kvloom.native.build import NativeLibrary
from tests.support.kept import kept
from tests.support.waiting import is_locked_out, until

ROOT = Path(__file__).parents[2]
OURS = ("-DKVLOOM_", "-DGEWU_")  # macros of the sources; system headers define others


def compiled(command: Sequence[str | Path], name: str, includes: Iterable[Path] = ()) -> Path:
    """The result of `command`, run with `-o` and a path that ends in `name`. includes: files it reads that are no
    headers.
    """
    words = [str(word).replace(f"{ROOT}/", "") for word in command]
    causes = [repr(words).encode(), *(path.read_bytes() for path in (*_read_by(words), *includes))]
    return kept(causes, name, lambda path: subprocess.run([*words, "-o", str(path)], cwd=ROOT, check=True))


def objects(command: Sequence[str | Path], sources: Iterable[Path]) -> list[Path]:
    """One object for each source. A macro is left out where the source does not use it, so that such objects are
    shared.
    """
    found = []
    for source in sources:
        text = source.read_text()
        words = [word for word in map(str, command) if not word.startswith(OURS) or word[2:].partition("=")[0] in text]
        found.append(compiled([*words, "-c", source], f"{source.stem}.o"))
    return found


def units(command: Sequence[str | Path], sources: Sequence[Path]) -> list[Path]:
    """As `objects`, for C++: sources that use no macro are compiled as one unit, because their headers take most of
    the time.
    """
    told = [source for source in sources if any(f"#ifndef {word[2:]}" in source.read_text() for word in OURS)]
    others = [word for source in sources if source not in told for word in ("-include", source)]
    words = [word for word in map(str, command) if not word.startswith(OURS)]
    return [compiled([*words, *others, "-x", "c++", "-c", "/dev/null"], "others.o"), *objects(command, told)]


def cache_with(library: NativeLibrary, folder: Path) -> Path:
    """A user's cache in `folder` that contains only the compiled library."""
    path = library.path()
    own = folder / "cache" / Path(*path.parts[-4:])  # kvloom, its name, its digest, its file
    own.parent.mkdir(parents=True)
    shutil.copy(path, own)
    return folder / "cache"


def hasty_compiler(folder: Path, command: str = "g++") -> Path:
    """A compiler without its optimizer, which takes most of the time; the results are only used, not measured."""
    path = folder / f"hasty-{command}"
    path.write_text(f'#!/bin/sh\nexec {command} "$@" -O0\n')
    path.chmod(0o755)
    return path


def _read_by(words: Sequence[str]) -> Iterator[Path]:
    """Sources and objects in the command, and all headers beside them and in include folders."""
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
    """How often `owner` compiles when two threads ask for the same library, the second while the first compiles."""
    runs: list[Path] = []
    other = threading.Thread(target=ask)

    def compiling(*given: Any) -> None:
        path = given[-1]
        runs.append(path)
        if len(runs) == 1:
            other.start()
            until(lambda: len(runs) == 2 or any(map(is_locked_out, path.parent.glob("*.lock"))))
        _publish_nothing(path)

    monkeypatch.setattr(owner, compiler, compiling)
    assert ask().exists()
    other.join()
    return len(runs)


def runs_for_damaged(owner: Any, compiler: str, ask: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often `owner` compiles for a library in the cache that is as it was, empty, cut short, or overwritten."""
    runs: list[Path] = []

    def compiling(*given: Any) -> None:
        runs.append(given[-1])
        _publish_nothing(given[-1])

    monkeypatch.setattr(owner, compiler, compiling)
    whole = ask().read_bytes()
    found = []
    for data in (whole, b"", whole[:-1], whole + b"\0", bytes(len(whole))):
        ask().write_bytes(data)
        runs.clear()
        assert ask().read_bytes() == whole
        found.append(len(runs))
    return found


def _publish_nothing(path: Path) -> None:
    """Put an empty library in the place of a compiled one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (built := path.with_suffix(".built")).touch()
    publish(built, path)
