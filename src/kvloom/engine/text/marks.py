"""Marks: keeps special tokens in users' texts recognisable as text while a chat template renders them.

In each user's text, the first character of whatever spells a special token is replaced by a stand-in: a private-use
character that occurs nowhere else in the conversation. A stand-in keeps the text's length and is neither white space
nor cased, so a template trims, cuts, joins and compares as before but finds no special token. A text without special
tokens is unchanged. After rendering, the stand-ins show which special tokens are text: see Tokenizer.encode_marked.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

_FIRST_STAND_IN, _LAST_STAND_IN = 0xF0000, 0xFFFFD  # private-use characters


class Marks:
    """The marks of one conversation: `mark` its values, render the template, then call `encode_marked` with
    `originals`.
    """

    def __init__(self, special_texts: frozenset[str], values: Any) -> None:
        self.originals: dict[str, str] = {}  # stand-in -> the character that it replaces
        strings = list(_strings(values)) if special_texts else []
        self._find = find = _finder(special_texts)
        if any(map(find.search, strings)):
            heads = {found[0][0] for text in strings for found in find.finditer(text)}
            free = (chr(i) for i in range(_FIRST_STAND_IN, _LAST_STAND_IN) if not _occurs(chr(i), strings))
            self.originals = dict(zip(free, sorted(heads), strict=False))
            self._stand_ins = {original: mark for mark, original in self.originals.items()}

    def mark(self, value: Any) -> Any:
        """The JSON value with every string in it marked."""
        return _mapped(value, self._marked) if self.originals else value

    def spelt_out(self, text: str) -> str:
        """Turns stand-ins that a template has escaped, as ASCII JSON does, back into characters."""
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
    """A pattern of whatever spells a special token, and of a beginning of one at the end of a text, which later text
    might complete.
    """
    special_texts = frozenset(filter(str.strip, special_texts))  # a template may strip white space
    whole = _one_of(special_texts) if special_texts else r"(?!)"
    beginnings = {text[:end] for text in special_texts for end in range(1, len(text))}
    beginning = _one_of(beginnings) if beginnings else r"(?!)"
    return re.compile(rf"{whole}|{beginning}(?=\s*\Z)")


def _one_of(texts: Iterable[str]) -> str:
    """A pattern that matches any of the texts, as a tree of common prefixes, so that many cost no more than one."""
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
