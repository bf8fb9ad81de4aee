"""Incremental parser of one tool call written as a JSON object, `{"name": ..., "arguments": {...}}`."""

import json
from collections.abc import Callable, Collection, Mapping
from enum import Enum, auto

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"
Check = Callable[[str], bool]  # of arguments, as JSON text


class _At(Enum):
    OBJECT = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()


class JsonValue:
    """Finds the end of one JSON value; does not validate its inside."""

    def __init__(self) -> None:
        self.is_begun = False
        self._chars: list[str] = []  # joined when asked for: arguments may be as long as a file
        self._depth = 0
        self._is_string = self._is_escaped = False

    @property
    def text(self) -> str:
        return "".join(self._chars)

    def add(self, char: str) -> bool:
        """Whether the value ends with this character. Numbers and words end before one that is_delimiter."""
        self._chars.append(char)
        self.is_begun = True
        if self._is_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._is_string = False
                return self._depth == 0
        elif char == '"':
            self._is_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth == 0
        return False

    def is_before(self, char: str) -> bool:
        """Whether the value ended before `char`: numbers and words do."""
        return self.is_begun and not self._depth and not self._is_string and char in ",}]" + _SPACE


class CallScanner:
    """Takes characters until the object ends (`is_done`) or proves not to be a call (`is_failed`).

    `name` is set once the call is certain: its arguments have begun, or the object is complete. `take` returns the
    newly known part of the arguments, as JSON text. `raw` is everything taken while `name` was not set.

    The object may stand in a second pair of braces: Qwen2.5-Coder's template shows calls so, and the model copies it.
    """

    def __init__(self, names: Collection[str] | None = None, needs_arguments: bool = False) -> None:
        """`names`: the only names that make a call; None = any."""
        self.name: str | None = None
        self.raw = ""
        self.is_done = self.is_failed = False
        self._names, self._needs_arguments = names, needs_arguments
        self._at = _At.OBJECT
        self._key = ""
        self._value = JsonValue()
        self.found_name: str | None = None  # read, but the call is not certain yet
        self._early: str | None = None  # arguments that came before the name
        self._is_streaming = self._has_arguments = False
        self._is_within = False  # the object stands in a second pair of braces, which is still open

    def take(self, char: str) -> str:
        if self.name is None:
            self.raw += char
        if self._at is _At.VALUE:
            return self._take_value(char)
        if char not in _SPACE or (self._at is _At.KEY and self._value.is_begun):
            self._take_structure(char)
        return self._ended() if self.is_done else ""

    def _take_structure(self, char: str) -> None:
        if self._at is _At.OBJECT and char == "{":
            self._at = _At.KEY
        elif self._at is _At.KEY and char == "{" and self.raw.split() in (["{{"], ["{", "{"]):
            self._is_within = True
        elif self._at is _At.KEY and (self._value.is_begun or char == '"'):
            if self._value.add(char):
                key = _text(self._value.text)
                self._key, self._value, self._at = key or "", JsonValue(), _At.COLON
        elif self._at is _At.COLON and char == ":":
            self._at = _At.VALUE
        elif self._at is _At.COMMA and char == ",":
            self._at = _At.KEY
        elif self._at in (_At.COMMA, _At.KEY) and char == "}":
            self.is_done, self._is_within = not self._is_within, False
        else:
            self.is_failed = True

    def _take_value(self, char: str) -> str:
        value = self._value
        if not value.is_begun:
            if char in _SPACE:
                return ""
            if char in ",:]}":
                self.is_failed = True
                return ""
            self._is_streaming = self._begins_arguments(char)
        if value.is_before(char):
            out = self._finish_value()
            if char not in _SPACE and not self.is_failed:
                self._take_structure(char)
            return out + (self._ended() if self.is_done else "")
        is_end = value.add(char)
        out = char if self._is_streaming else ""
        return out + self._finish_value() if is_end else out

    def _begins_arguments(self, char: str) -> bool:
        """Whether arguments begin here; if the name is known they are returned as they come."""
        if self._key not in _ARGUMENTS or self._has_arguments or self.found_name is None or char != "{":
            return False
        self._has_arguments = True
        self.name = self.found_name
        return True

    def _finish_value(self) -> str:
        """The value is complete. Returns arguments that were not returned before."""
        text, self._value, self._at = self._value.text, JsonValue(), _At.COMMA
        if self._is_streaming:
            self._is_streaming = False
            return ""
        if self._key in _NAMES and self.found_name is None:
            self.found_name = _text(text)
            if not self.found_name or (self._names is not None and self.found_name not in self._names):
                self.is_failed = True
                return ""
            return self._give_early()
        if self._key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            self._early = object_text(text)
            if self._early is None:
                self.is_failed = True
                return ""
            return self._give_early()
        return ""

    def _give_early(self) -> str:
        if self.found_name is None or self._early is None:
            return ""
        self.name = self.found_name
        return self._early

    def _ended(self) -> str:
        """The object is complete."""
        if self.name is not None:
            return ""
        if self.found_name is None or self._needs_arguments:
            self.is_done, self.is_failed = False, True
            return ""
        self.name = self.found_name
        return "{}"


class CheckedScanner:
    """A CallScanner for calls of known tools with arguments. Those of a tool with a check are told once they came as a
    whole and passed it.
    """

    def __init__(self, checks: Mapping[str, Check | None]) -> None:
        self._scanner = CallScanner(checks, needs_arguments=True)
        self._checks = checks
        self._held: list[str] = []  # arguments that may not be told yet
        self._chars: list[str] = []  # what was taken before the name was told
        self.name: str | None = None
        self.found_name: str | None = None  # of a call that needs no check: one that is cut before its check is none
        self.is_done = self.is_failed = False

    @property
    def raw(self) -> str:
        return "".join(self._chars)

    def take(self, char: str) -> str:
        scanner = self._scanner
        if self.name is None:
            self._chars.append(char)
        self._held.append(scanner.take(char))
        self.is_done, self.is_failed = scanner.is_done, scanner.is_failed
        if scanner.found_name is None or self.is_failed:
            return ""
        check = self._checks[scanner.found_name]
        self.found_name = scanner.found_name if check is None else None
        if scanner.name is None:
            return ""
        if check is not None and not self.is_done:
            return ""
        if check is not None and not check("".join(self._held)):
            self.is_done, self.is_failed = False, True
            return ""
        self.name = scanner.name
        out, self._held = "".join(self._held), []
        return out


def _text(literal: str) -> str | None:
    """The string of a JSON literal; None when it is not one, or holds half a surrogate pair, which is no text."""
    try:
        value = json.loads(literal, strict=False)
        if not isinstance(value, str):
            return None
        value.encode()
    except ValueError:
        return None
    return value


def object_text(text: str) -> str | None:
    """Arguments as JSON text of an object: unchanged, unpacked from a string that contains one, or `{}` for null."""
    if text.startswith("{"):
        return text
    if text == "null":
        return "{}"
    inner = (_text(text) or "").strip()
    try:
        return inner if isinstance(json.loads(inner), dict) else None
    except (ValueError, RecursionError):
        return None
