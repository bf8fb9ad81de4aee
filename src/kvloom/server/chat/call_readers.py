"""Readers of one tool call each, character by character: what stands between the marks that a CallForm names.

A reader takes characters until the call ends (`is_done`) or proves to be none (`is_failed`). `name` is set once the
call is certain. `take` returns the newly known part of the arguments, as JSON text. `raw` is everything taken while
`name` was not set.
"""

import json
from collections.abc import Collection, Generator, Mapping
from typing import Any

from kvloom.server.chat.elements import member_schema
from kvloom.server.chat.form import CDATA_BEGIN, CDATA_END, ID, TYPE, CallForm
from kvloom.server.chat.json_calls import JsonValue, object_text
from kvloom.server.chat.open_tagged import found_in, split
from kvloom.server.chat.values import Brackets, json_of_quoted, typed_json, types_of

_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
_OPEN, _CLOSE = "([{", ")]}"
Steps = Generator[None, str, None]


class NoCallError(Exception):
    """The text is no call."""


def _squeezed(text: str) -> str:
    return "".join(text.split())


class MarkedReader:
    """A call whose name stands between marks: the kinds json, tagged, keyed and python."""

    def __init__(
        self, form: CallForm, schemas: Mapping[str, Mapping[str, Any]], names: Collection[str] | None = None
    ) -> None:
        """`schemas`: of the tools' parameters; an unknown tool's parameters are JSON if valid, else text. `names`: the
        only ones that make a call; None = any.
        """
        self.name: str | None = None
        self.found_name: str | None = None
        self.raw = ""
        self.is_done = self.is_failed = False
        self._form, self._schemas, self._names = form, schemas, names
        self._char = self._out = ""
        self._given: list[str] = []  # keys
        self._behind_key: list[str] | None = None  # what was taken behind the last mark before a key
        self._steps = self._read()
        next(self._steps)

    def take(self, char: str) -> str:
        if self.name is None:
            self.raw += char
        self._char, self._out = char, ""
        if self._behind_key is not None:
            self._behind_key.append(char)
        try:
            self._steps.send(char)
        except StopIteration:
            self.is_done = True
        except NoCallError:
            self.is_failed = True
        return self._out

    def close(self, is_cut: bool) -> tuple[str, str]:
        """No more text comes, and the call has not ended: the rest of the arguments, as far as marks of a tagged call
        tell them, and the text behind it. A value that is cut is left out.
        """
        if self._behind_key is None or self._form.other_end:
            return "", ""
        self._out = ""
        found = found_in(self._form, "".join(self._behind_key), self._missing(""))
        for key, value in found.arguments[: -1 if is_cut and found.is_open else None]:
            self._give(key, value, "")
        return self._out, found.rest

    def _missing(self, key: str) -> list[str]:
        """The tool's keys that were not given, but `key`."""
        properties = self._schemas.get(self.name or "", {}).get("properties")
        return [each for each in properties or () if each != key and each not in self._given]

    def _read(self) -> Steps:
        """Each step begins where `_char` is the next character, and ends when it was used."""
        yield
        form = self._form
        yield from self._literal(form.head)
        yield from self._read_name()
        if form.kind in ("tagged", "elements"):
            yield from self._literal(form.mid)
            yield from self._read_tagged()
        elif form.kind == "python":
            yield from self._read_python()
        else:
            yield from self._literal(form.mid)
            yield from self._read_object()

    def _literal(self, text: str) -> Steps:
        for index, part in enumerate(text.split(ID)):
            while index and self._char in _NAME:
                yield
            for word in part.split():
                while self._char.isspace():
                    yield
                for char in word:
                    if self._char != char:
                        raise NoCallError
                    yield

    def _read_name(self) -> Steps:
        name = ""
        while self._char.isspace():
            yield
        while self._char in _NAME:
            name += self._char
            yield
        if not name or (self._names is not None and name not in self._names):
            raise NoCallError
        self.found_name = name

    def _read_object(self) -> Steps:
        while self._char.isspace():
            yield
        if self._char not in '{"n':
            raise NoCallError
        is_streaming = self._char == "{"
        value = JsonValue()
        if is_streaming:
            self.name = self.found_name
        while True:
            is_end = value.add(self._char) or (not is_streaming and value.text == "null")
            self._out += self._char if is_streaming else ""
            if is_end:
                break
            yield
        if not is_streaming:
            arguments = object_text(value.text)
            if arguments is None:
                raise NoCallError
            self.name = self.found_name
            self._out += arguments
        if self._form.kind == "keyed":
            yield
            yield from self._rest("}")

    def _rest(self, word: str) -> Steps:
        while self._char.isspace():
            yield
        if self._char != word:
            raise NoCallError

    def _read_tagged(self) -> Steps:
        key, end = _squeezed(self._form.key_begin), _squeezed(self._form.tail) or _squeezed(self._form.end)
        whole = _squeezed(self._form.json_begin)
        self.name = self.found_name
        held = ""
        while True:
            held += "" if self._char.isspace() else self._char
            if held and held == key:
                yield
                yield from self._read_argument(key, end)
                if self._is_ended:
                    break
                held = key
                continue
            if held == end:
                break
            if whole and held == whole:
                yield
                yield from self._read_whole()
                return
            if not any(mark.startswith(held) for mark in (key, end, whole)):
                raise NoCallError
            yield
        self._out += "}" if self._given else "{}"

    def _read_whole(self) -> Steps:
        """All arguments as one JSON object."""
        yield from self._read_object()
        yield
        behind = (self._form.json_end + self._form.tail).rstrip()
        yield from self._literal(behind[:-1])
        yield from self._rest(behind[-1])

    _is_ended = False

    def _read_argument(self, key: str, end: str) -> Steps:
        """Arguments one after the other, up to the end of the call."""
        while not self._is_ended:
            before, after = self._key_marks()
            held, self._behind_key = "", [self._char]
            while not held.endswith(before):
                held += self._char
                yield
            name = held.removesuffix(before).strip()
            said = yield from self._said(before, after)
            value = yield from self._value(key, end, self._is_nested(name, said))
            missing = self._missing(name)
            for own, text in split(self._form, name, value, missing) if missing and not after else [(name, value)]:
                self._give(own, text, said)

    def _key_marks(self) -> tuple[str, str]:
        """What ends a key, and what begins its value if the kind of the value stands between both."""
        text, other = self._form.key_end, self._form.other_end
        if not other or other == text:
            return text.split()[0], ""
        if TYPE in other:
            return other.partition(TYPE)[0], other.partition(TYPE)[2]
        num = next(i for i in range(len(text)) if text[: i + 1] != other[: i + 1])
        last = next(i for i in range(len(text)) if text[len(text) - i - 1 :] != other[len(other) - i - 1 :])
        return text[:num], text[len(text) - last :]

    def _said(self, before: str, after: str) -> Generator[None, str, str]:
        if not after:
            yield from self._literal(" ".join(self._form.key_end.split()[1:]))
            return ""
        said = ""
        while not said.endswith(after):
            said += self._char
            yield
        is_text = before + said in (self._form.key_end, self._form.key_end.removesuffix(after) + after)
        return "text" if is_text else "json"

    def _value(self, key: str, end: str, is_nested: bool) -> Generator[None, str, str]:
        """A value ends at its mark only if another argument or the call's end follows, and not within itself."""
        mark, value, brackets = self._form.value_end.strip(), "", Brackets()
        behind = (key, *(one for one in (end, _squeezed(self._form.end)) if one))  # models leave out the first of both
        while True:
            value += self._char
            if not value.endswith(mark):
                yield
                continue
            held, seen = "", ""
            while True:
                yield
                seen += self._char
                held += "" if self._char.isspace() else self._char
                is_next = held in behind
                if is_next and not self._is_within(value.removesuffix(mark), is_nested, brackets):
                    self._is_ended = held != key
                    if not self._is_ended:
                        yield
                    return value.removesuffix(mark)
                if is_next or not any(one.startswith(held) for one in behind):
                    break
            value += seen[:-1]

    def _is_within(self, value: str, is_nested: bool, brackets: Brackets) -> bool:
        """Whether a value that its mark may end goes on: CDATA, or an object or list, has not ended."""
        text = value.strip()
        if text.startswith(CDATA_BEGIN):
            return not text.endswith(CDATA_END)
        return is_nested and text[:1] in ("{", "[") and brackets.are_open(value)

    def _is_nested(self, key: str, said: str) -> bool:
        """Whether what looks like an object or a list can be no text."""
        schema = self._schemas.get(self.name or "", {})
        types = types_of(member_schema(schema, schema, key), schema)
        return said == "json" or (said != "text" and types is not None and "string" not in types)

    def _give(self, key: str, value: str, said: str) -> None:
        if self._form.key_end.endswith("\n"):
            value = value.removeprefix("\n")
        if self._form.value_end.startswith("\n"):
            value = value.removesuffix("\n")
        if value.strip().startswith(CDATA_BEGIN) and value.strip().endswith(CDATA_END):
            value, said = value.strip().removeprefix(CDATA_BEGIN).removesuffix(CDATA_END), "text"
        text = typed_json(self._schemas.get(self.name or "", {}), key, value, said)
        self._put(key, text)

    def _put(self, key: str, text: str) -> None:
        start = ", " if self._given else "{"
        self._given.append(key)
        self._out += f"{start}{json.dumps(key, ensure_ascii=False)}: {text}"

    def _read_python(self) -> Steps:
        form = self._form
        if self._char != form.mid:
            raise NoCallError
        self.name = self.found_name
        close = _CLOSE[_OPEN.index(form.mid)]
        yield
        text, depth = "", 0
        while True:
            if not depth and self._char in (",", close):
                self._put_python(text)
                if self._char == close:
                    break
                text = ""
            elif form.own_quote and self._char == form.quote[0]:
                text += yield from self._between_quotes()
            elif not form.own_quote and self._char in "'\"":
                text += yield from self._quoted()
                continue
            else:
                depth += (self._char in _OPEN) - (self._char in _CLOSE)
                text += self._char
            yield
        self._out += "}" if self._given else "{}"

    def _between_quotes(self) -> Generator[None, str, str]:
        """A string between two marks of its own, as JSON text."""
        quote, text = self._form.quote, self._char
        while not (text.endswith(quote) and len(text) >= 2 * len(quote)):
            yield
            text += self._char
        return json.dumps(text[len(quote) : -len(quote)], ensure_ascii=False)

    def _quoted(self) -> Generator[None, str, str]:
        """A string as JSON text, up to a quote behind which a value can end; that character is the next."""
        quote, text, is_escaped = self._char, "", False
        yield
        while True:
            if is_escaped or self._char != quote:
                is_escaped = not is_escaped and self._char == "\\"
                text += self._char
                yield
                continue
            seen = ""
            yield
            while self._char.isspace():
                seen += self._char
                yield
            if self._char in ",:" + _CLOSE:
                return json_of_quoted(quote, text)
            text += quote + seen

    def _put_python(self, text: str) -> None:
        assign = self._form.assign
        key, is_given, value = text.partition(assign)
        if is_given:
            name = key.strip().strip('"')
            self._put(name, typed_json({}, name, value, "", is_bare=assign == ":"))
