"""Notes to a caller while a body is parsed: what of it was left out. The answer tells them in a header."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_notes: ContextVar[list[str] | None] = ContextVar("notes", default=None)
_MAX_CHARS = 200
_MOST = 8


@contextmanager
def noting() -> Iterator[list[str]]:
    """A context whose notes are in the list that it gives."""
    notes: list[str] = []
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def note(text: str) -> None:
    """Tell the caller `text`, as a line of printable ASCII; each once, and the first few only."""
    line = "".join(char if " " <= char <= "~" else "?" for char in " ".join(text.split())[:_MAX_CHARS])
    notes = _notes.get()
    if notes is not None and line not in notes and len(notes) < _MOST:
        notes.append(line)
