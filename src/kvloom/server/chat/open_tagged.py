"""Tagged calls whose marks are not all there: models leave out what ends an argument, or the call. Pure."""

import re
from collections.abc import Collection
from typing import NamedTuple

from kvloom.server.chat.form import CallForm

Arguments = list[tuple[str, str]]  # keys and values, with the white space at the marks


class Found(NamedTuple):
    """What stands in the text of a call that has not ended, and what follows it. `is_open`: no mark ends the last
    value.
    """

    arguments: Arguments
    rest: str
    is_open: bool


def found_in(form: CallForm, text: str, keys: Collection[str]) -> Found:
    """`text` begins behind the mark before a key; `keys` are those of the tool that were not given yet.

    A value ends where its own mark stands before another one, or without it where the call ends or one of the other
    arguments begins on a line of its own; or else with the text.
    """
    arguments: Arguments = []
    while True:
        key, *value = re.split(_loosely(form.key_end), text, maxsplit=1)
        if not value:
            return Found(arguments, "", False)
        end = re.search(_ends(form, keys), value[0])
        arguments.append((key.strip(), value[0][: end.start()] if end else value[0]))
        if end is None:
            return Found(arguments, "", True)
        text = value[0][end.end() :]
        if end["key"] is None:
            return Found(arguments, text, False)


def split(form: CallForm, key: str, value: str, keys: Collection[str]) -> Arguments:
    """A value in which the mark between it and others of the `keys` is missing, as theirs and its own."""
    parts = re.split(rf"{_other(form, keys)}({_any(keys)}){_loosely(form.key_end)}", value)
    return [(key, parts[0]), *zip(parts[1::2], parts[2::2], strict=True)]


def _ends(form: CallForm, keys: Collection[str]) -> str:
    """What ends a value; `key`: the mark of the next argument."""
    own, last = _loosely(form.value_end), [_loosely(mark) for mark in (form.tail, form.end) if mark.strip()]
    call_end = rf"(?:{'|'.join(last)})(?:\s*{last[-1]})?"
    other = rf"{_other(form, keys)}(?={_any(keys)}{_loosely(form.key_end)})"
    next_key = rf"(?P<key>{own}\s*{_loosely(form.key_begin)}|{other})"
    return rf"{next_key}|(?:{own}\s*)?\s*{call_end}|{own}\s*\Z"


def _other(form: CallForm, keys: Collection[str]) -> str:
    """The mark of another argument, on a line of its own."""
    return rf"\n\s*{_loosely(form.key_begin)}" if keys else r"(?!)"


def _any(keys: Collection[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, keys))})"


def _loosely(mark: str) -> str:
    """The mark with any white space within it."""
    return r"\s*".join(map(re.escape, mark.split()))
