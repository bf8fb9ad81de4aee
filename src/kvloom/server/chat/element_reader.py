"""Reads a call whose arguments are elements; see elements.py."""

from collections.abc import Collection, Generator, Mapping
from typing import Any

from kvloom.server.chat.call_readers import MarkedReader, NoCallError, Steps
from kvloom.server.chat.elements import Next, element_json, end_of, is_whole, last_of, member_schema, next_in
from kvloom.server.chat.form import CallForm


class ElementReader(MarkedReader):
    """Arguments are told one by one, each when what follows its end shows that it has ended."""

    def __init__(
        self, form: CallForm, schemas: Mapping[str, Mapping[str, Any]], names: Collection[str] | None = None
    ) -> None:
        self._key: str | None = None  # of the argument that is being read
        self._behind: list[str] = []  # what was taken behind its beginning
        super().__init__(form, schemas, names)

    def take(self, char: str) -> str:
        self._behind.append(char)
        return super().take(char)

    def close(self, is_cut: bool) -> tuple[str, str]:
        self._out = ""
        if self._key is None:
            return "", ""
        last = last_of(self._form, self._key, "".join(self._behind), self._schema)
        if not (is_cut and last.is_open):
            self._give_element(self._key, last.value)
        return self._out, last.rest

    def _read_tagged(self) -> Steps:
        self.name = self.found_name
        _, following = yield from self._next()
        while following.kind == "element":
            self._key = following.key
            self._behind.clear()
            yield
            following = yield from self._element(following.key)
            self._key = None
        if following.kind == "text":
            raise NoCallError
        self._out += "}" if self._given else "{}"

    def _next(self) -> Generator[None, str, tuple[str, Next]]:
        """What stands next, and its text; the current character is its last one."""
        seen = self._char
        while (following := next_in(self._form, seen)).kind == "open":
            yield
            seen += self._char
        return seen, following

    def _element(self, key: str) -> Generator[None, str, Next]:
        """An argument, and what follows it."""
        end, value = end_of(self._form, key), ""
        while True:
            value += self._char
            if not value.endswith(end):
                yield
                continue
            inner = value.removesuffix(end)
            yield
            seen, following = yield from self._next()
            if following.kind != "text" and is_whole(self._form, key, inner, self._schema):
                self._give_element(key, inner)
                return following
            value += seen[:-1]

    def _give_element(self, key: str, value: str) -> None:
        schema = self._schema
        self._put(key, element_json(self._form, member_schema(schema, schema, key), schema, value))

    @property
    def _schema(self) -> Mapping[str, Any]:
        return self._schemas.get(self.name or "", {})
