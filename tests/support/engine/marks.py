"""Texts with the marks removed."""

from kvloom.engine.text.marks import Marks


def restored(marks: Marks, text: str) -> str:
    """The text as it would be without marks."""
    return text.translate({ord(mark): original for mark, original in marks.originals.items()})
