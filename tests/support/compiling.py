"""C and C++ of the tests, compiled once: a file of this name, of these words, sources and headers, is there already.

Processes of a run that want the same file wait for the one that makes it.
"""

import fcntl
import hashlib
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

MADE = Path(__file__).parents[2] / ".pytest_cache" / "compiled"
OURS = ("-DKVLOOM_", "-DGEWU_")  # macros of the sources; those of the system's headers are everywhere


def compiled(command: Sequence[str | Path], name: str) -> Path:
    """What `command` makes, with `-o` and a path of this name added to it."""
    words = [str(word) for word in command]
    digest = hashlib.sha256(repr(words).encode())
    for path in _read_by(words):
        digest.update(path.read_bytes())
    target = MADE / digest.hexdigest()[:16] / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            part = target.with_suffix(".part")
            subprocess.run([*words, "-o", str(part)], check=True)
            part.rename(target)
    return target


def objects(command: Sequence[str | Path], sources: Iterable[Path]) -> list[Path]:
    """One of each source. A macro is not defined for who does not use it, and shares its object with everybody else."""
    found = []
    for source in sources:
        text = source.read_text()
        words = [word for word in map(str, command) if not word.startswith(OURS) or word[2:].partition("=")[0] in text]
        found.append(compiled([*words, "-c", source], f"{source.stem}.o"))
    return found


def _read_by(words: Sequence[str]) -> Iterator[Path]:
    """Sources and objects among the words, and all headers beside them and in folders that are included."""
    folders = []
    for before, word in zip(["", *words], words, strict=False):
        path = Path(word.removeprefix("-I"))
        if path.is_file():
            yield path
            folders.append(path.parent)
        elif path.is_dir() and (word.startswith("-I") or before == "-idirafter"):
            folders.append(path)
    for folder in dict.fromkeys(folders):
        yield from sorted(path for path in folder.rglob("*.h*") if path.is_file())
