"""JSON that an end cut off, read as Anthropic's client reads it: what is whole of it. Pure."""

import re
from typing import Any

import msgspec

# a string, another value, a bracket or a mark; a number is one only if what follows ends it
_TOKEN = re.compile(
    r'\s*(?:(?P<text>"[^"\\]*+(?:\\.[^"\\]*+)*+")'
    r"|(?P<value>(?:-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null)(?=[\s,\]}]|\Z))"
    r"|(?P<mark>[\[\]{}:,]))",
    re.ASCII | re.DOTALL,
)
_CLOSES = {"{": "}", "[": "]"}


def object_so_far(text: str) -> dict[str, Any]:
    """The object that `text` is or begins, without a string or word that is cut; {} where it is none."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError):
        pass
    try:
        return msgspec.json.decode(_closed(text), type=dict[str, Any])
    except (ValueError, RecursionError):
        return {}


def _closed(text: str) -> str:
    """`text` up to its last whole value, and what closes the brackets that are open there."""
    open_brackets: list[str] = []
    kept, closing, at, before = 0, "", 0, ""
    while token := _TOKEN.match(text, at):
        at, mark = token.end(), token["mark"] or ""
        if mark in _CLOSES:
            open_brackets.append(_CLOSES[mark])
        elif mark in ("]", "}"):
            if not open_brackets:
                return ""
            open_brackets.pop()
        is_key = bool(token["text"]) and open_brackets[-1:] == ["}"] and before in ("{", ",")
        if mark not in (",", ":") and not is_key:
            kept, closing = at, "".join(reversed(open_brackets))
        before = mark
    return text[:kept] + closing
