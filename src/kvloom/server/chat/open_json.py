"""Arguments of a call on their way: JSON text that is given on only as far as it can still be closed. Pure."""

import re

_SPACE = " \t\r\n"
_WHOLE = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?\Z|true\Z|false\Z|null\Z")
_ESCAPE = re.compile(r'["\\/bfnrt]\Z|u[0-9a-fA-F]{4}\Z')
_PLAIN = re.compile(r'[^"\\]+')  # of a string
_HIGH = re.compile(r"u[dD][89abAB]")


class OpenJson:
    """Takes the text of one JSON object in pieces. What would leave a broken text behind if nothing followed (a comma,
    a key without a value, half a word, number or escape) is held back until more comes.
    """

    def __init__(self) -> None:
        self._held = ""
        self._closers = ""  # of what is open, innermost last
        self._is_string = self._is_key = self._wants_key = False
        self._escape: str | None = None  # of the string, behind its backslash
        self._wants_low = False  # half a surrogate pair waits for the other one
        self._word = ""
        self._is_open = False  # what stands last needs more behind it
        self._closing = (False, "}{")  # of what was given: whether it ends in a string, and the closers then

    def add(self, text: str) -> str:
        """The text that can be given now."""
        start = len(self._held)
        self._held += text
        at = num_given = 0
        while at < len(text):
            if self._is_string and self._escape is None and (plain := _PLAIN.match(text, at)):
                at, self._wants_low, may_end = plain.end(), False, not self._is_key
            else:
                may_end = self._take(text[at])
                at += 1
            if may_end:
                num_given, self._closing = start + at, (self._is_string, self._closers)
        given, self._held = self._held[:num_given], self._held[num_given:]
        return given

    def close(self) -> str:
        """The end of the object, where its text was cut off."""
        self._held = ""
        is_string, closers = self._closing
        return ('"' if is_string else "") + closers[::-1]

    def rest(self) -> str:
        """What was held back, where the text has ended by itself."""
        held, self._held = self._held, ""
        return held

    def _take(self, char: str) -> bool:
        """Read a character; whether the text can be closed behind it."""
        if self._is_string:
            return self._take_inside(char)
        if char in _SPACE:
            self._word = ""
            return bool(self._closers) and not self._is_open
        self._is_open = False
        if char == '"':
            self._is_string, self._is_key = True, self._wants_key
            self._is_open = self._is_key
        elif char in "{[":
            self._closers += "}" if char == "{" else "]"
            self._wants_key = char == "{"
        elif char in "}]":
            self._closers = self._closers[:-1]
            self._wants_key = False
        elif char in ",:":
            self._wants_key = char == "," and self._closers.endswith("}")
            self._is_open = True
        else:
            self._word += char
            self._is_open = not _WHOLE.match(self._word)
            return not self._is_open
        self._word = ""
        return not self._is_open

    def _take_inside(self, char: str) -> bool:
        if self._escape is not None:
            self._escape += char
            if _ESCAPE.match(self._escape) or self._escape[0] != "u":
                self._wants_low = not self._wants_low and bool(_HIGH.match(self._escape))
                self._escape = None
        elif char == "\\":
            self._escape = ""
        else:  # the other mark
            self._is_string = self._wants_low = False
            self._is_open = self._is_key
        return not self._is_key and self._escape is None and not self._wants_low
