"""Marks: special tokens that stand in users' texts, made recognisable through a chat template.

In each such text the first character of what spells a special token is replaced by a stand-in: a character of private
use that occurs nowhere else. Lengths stay, nothing is put in between, stand-ins are neither white space nor have a
case: a template trims, cuts, joins and compares as it would, but finds no special token in a user's text. A text
without any comes out as it went in. Afterwards the stand-ins say which special tokens are text: see
Tokenizer.encode_marked.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

_FIRST_STAND_IN, _LAST_STAND_IN = 0xF0000, 0xFFFFD  # private use


class Marks:
    """Of one conversation: `mark` its values, render, then `encode_marked` with `originals`."""

    def __init__(self, special_texts: frozenset[str], values: Any) -> None:
        self.originals: dict[str, str] = {}  # stand-in -> the character that it stands for
        strings = list(_strings(values)) if special_texts else []
        self._find = find = _finder(special_texts)
        if any(map(find.search, strings)):
            heads = {found[0][0] for text in strings for found in find.finditer(text)}
            free = (chr(i) for i in range(_FIRST_STAND_IN, _LAST_STAND_IN) if not _occurs(chr(i), strings))
            self.originals = dict(zip(free, sorted(heads), strict=False))
            self._stand_ins = {original: mark for mark, original in self.originals.items()}

    def mark(self, value: Any) -> Any:
        """The value, of JSON's kinds, with every text marked."""
        return _mapped(value, self._marked) if self.originals else value

    def spelt_out(self, text: str) -> str:
        """Stand-ins that a template has escaped, as JSON in ASCII is, are stand-ins again."""
        for mark in self.originals:
            text = text.replace(json.dumps(mark)[1:-1], mark)
        return text

    def _marked(self, text: str) -> str:
        return self._find.sub(lambda found: self._stand_ins[found[0][:1]] + found[0][1:], text)


def _occurs(char: str, strings: Iterable[str]) -> bool:
    return any(char in text for text in strings)


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _strings(name)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(name, change): _mapped(item, change) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value


@lru_cache(16)
def _finder(special_texts: frozenset[str]) -> re.Pattern[str]:
    """What spells a special token, and the beginning of one at the end of a text, which what follows might complete."""
    special_texts = frozenset(filter(str.strip, special_texts))  # a template may trim white space
    whole = _one_of(special_texts) if special_texts else r"(?!)"
    beginnings = {text[:end] for text in special_texts for end in range(1, len(text))}
    beginning = _one_of(beginnings) if beginnings else r"(?!)"
    return re.compile(rf"{whole}|{beginning}(?=\s*\Z)")


def _one_of(texts: Iterable[str]) -> str:
    """A pattern of the texts as a tree of their beginnings, so that many of them cost no more than one."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _pattern(tree)


def _pattern(tree: Mapping[str, Any]) -> str:
    choices = [re.escape(char) + _pattern(below) for char, below in tree.items() if char]
    if not choices:
        return ""
    joined = choices[0] if len(choices) == 1 and "" not in tree else f"(?:{'|'.join(choices)})"
    return joined + "?" if "" in tree else joined
