"""Grammars of calls that write arguments one after the other, as keys and values between marks or in Python's way.

Rules of Lark, as llguidance takes it. A rule stands for an argument and what follows it, up to the end of the call: a
text has no escapes, so it ends only where its mark is followed by another argument or by the end of the call.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvloom.server.chat.elements import options_of
from kvloom.server.chat.form import CDATA_BEGIN, CDATA_END, TYPE, CallForm
from kvloom.server.chat.lark_parts import (
    Ended,
    ended_text,
    escaped,
    json_part,
    literal,
    literals,
    loosely,
    text_regex,
)
from kvloom.server.chat.schema_rules import values_of
from kvloom.server.chat.spelling import sorting
from kvloom.server.chat.tools import Tool
from kvloom.server.chat.value_grammars import ANY, ValueRules
from kvloom.server.chat.values import json_type

_WORD = "/[A-Za-z_][A-Za-z0-9_]*/"
_KEY = r"/[^<>=\"\s][^<>=\"\n]*/"
_ESCAPED = r"""/([^\\]|\\['"\\nrt])*/"""  # a text in which Python's escapes are read
_UNESCAPED = r"/[^\\]*/"
_PLAIN = r"/[^<&\n]*/"  # a text that needs no CDATA
_NO_CDATA = r"~/\s*<!\[CDATA\[(.|\n)*/"
_BOUNDS = frozenset({"pattern", "minLength", "maxLength"})
_SAYS_NOTHING = frozenset({"type", "title", "description", "default", "examples", "deprecated", "$comment"})


def argument_rules(form: CallForm, rule: str, tool: Tool, schema: dict[str, Any]) -> list[str]:
    """Rule `rule`: a call, its arguments in the schema's order; optional ones may be omitted. Raises BadRequest."""
    return _Rules(form, rule, tool, schema).all(schema)


class _Way(NamedTuple):
    """One of the ways to write a value: what stands before it, a part of a rule that is it, or else a terminal for its
    texts, and the mark that ends it.
    """

    begin: str
    closed: str = ""
    texts: str = ""
    mark: str = ""


class _Rules(ValueRules):
    """Rules of one tool's calls."""

    _keys: tuple[str, ...] = ()

    def all(self, schema: dict[str, Any]) -> list[str]:
        """Every rule; the last one is the call."""
        form = self.form
        known = [(key, each) for key, each in (schema.get("properties") or {}).items() if each is not False]
        self._keys = tuple(key for key, _ in known)
        required, rest, may_end = schema.get("required") or (), "", True
        for key, each in reversed(sorted(known, key=sorting(form))):
            rest = self._argument(key, each, rest, may_end, key not in required)
            may_end = may_end and key not in required
        if not known and schema.get("additionalProperties", True) is not False:
            rest = f"{self.rule}_any"
            self._argument(None, schema.get("additionalProperties", {}), rest, True, False)
        options = [f"{literal(form, form.key_begin)} {rest}"] if rest else []
        options += [literals(form, form.tail)] if may_end else []
        if form.json_begin:
            whole = json_part(schema, self.tool)
            options.append(f"{literal(form, form.json_begin)} {whole} {literals(form, form.json_end, form.tail)}")
        head = literals(form, form.head, self.tool.name, form.mid)
        return [*self.lines, f"{self.rule}: {head} ({' | '.join(options)})"]

    def _argument(self, key: str | None, schema: Any, rest: str, may_end: bool, may_lack: bool) -> str:
        """The name of the rule for an argument, and what follows. `key`: None = any, `rest`: the rule for the arguments
        that may follow, if any. `may_end`: the call may end; `may_lack`: the argument may be missing.
        """
        form = self.form
        name = f"{self.rule}_any" if key is None else self.named("argument", key)[0]
        more = form.comma if form.kind == "python" else form.key_begin
        follows = [(more, rest)] if rest else []
        follows += [(form.tail, "")] if may_end else []
        options = []
        for at, way in enumerate(self._ways(schema)):
            begin = self._any_key(way.begin) if key is None else literal(form, key + way.begin)
            behind = [f"{literal(form, follow)} {then}" for follow, then in follows]
            mark = "" if way.texts else literal(form, way.mark)
            if way.texts:
                behind = [f"{name}_{at}_{to} {then}" for to, (_, then) in enumerate(follows)]
                for to, (follow, _) in enumerate(follows):
                    ended = Ended(way.texts, way.mark, self._ends(way.mark))
                    self.lines += ended_text(form, f"{name}_{at}_{to}", ended, follow)
            options.append(f"{begin} {way.closed} {mark} ({' | '.join(behind)})")
        options += [rest] if may_lack and rest else []
        self.lines.append(f"{name}: {' | '.join(options)}")
        return name

    def _any_key(self, begin: str) -> str:
        return f"{_WORD if self.form.kind == 'python' else _KEY} {literal(self.form, begin)}"

    def _ends(self, mark: str) -> str:
        """A regular expression for what ends a text for a reader: its mark, and what follows."""
        form = self.form
        if form.kind == "python":
            return rf"{escaped(mark)}\s*[,:)\]}}]"
        behind = (form.key_begin, form.tail, form.end)
        ends = rf"{escaped(mark.strip())}\s*({'|'.join(loosely(each) for each in behind if each.strip())})"
        if form.other_end or not self._keys:
            return ends
        keys = "|".join(map(escaped, self._keys))  # a missing mark is understood, see open_tagged.split
        return rf"{ends}|\n\s*{loosely(form.key_begin)}({keys}){loosely(form.key_end)}"

    def _ways(self, schema: Any) -> Iterator[_Way]:
        """The ways to write a value of a schema."""
        if self.form.kind == "python":
            yield from self._python_ways(schema)
        elif self.form.other_end:
            yield from self._typed_ways(schema)
        elif (texts := self._texts(schema)) is not None:
            yield from self._text_ways(texts)
        else:
            value = self._words(schema) or self.value(schema)
            yield _Way(self.form.key_end, value, mark=self.form.value_end)

    def _texts(self, schema: Any) -> dict[str, Any] | None:
        """The schema of texts, if values may be written as such: those of the type string, and of schemas that hold no
        text to anything, if what else they allow can be told from a text.
        """
        options = list(options_of(schema, self.root)) or [{}]
        if options == [schema] and schema.get("type") == "string":
            return None if "enum" in schema or "const" in schema else schema
        types = {type for option in options for type in self.types(option, ("any",))}
        is_open = all(option.keys() <= _SAYS_NOTHING for option in options)
        is_any = any("type" not in option for option in options)
        return {} if is_open and (is_any or ("string" in types and types <= {"string", "null", "boolean"})) else None

    def _words(self, schema: Any) -> str:
        """The texts that a schema lists, if it is one of texts."""
        if not isinstance(schema, dict) or schema.get("type") != "string":
            return ""
        return f"({' | '.join(literal(self.form, str(each)) for each in values_of(schema))})"

    def _text_ways(self, schema: Mapping[str, Any]) -> Iterator[_Way]:
        form, texts = self.form, text_regex(dict(schema))
        if not form.has_cdata:
            yield _Way(form.key_end, texts=f"{texts} & {_NO_CDATA}", mark=form.value_end)
            return
        yield _Way(form.key_end, texts=f"{texts} & {_PLAIN}", mark=form.value_end)
        yield _Way(form.key_end + CDATA_BEGIN, texts=texts, mark=CDATA_END + form.value_end)

    def _typed_ways(self, schema: Any) -> Iterator[_Way]:
        """Of a form that says with each value whether it is a text."""
        form = self.form
        for option in list(options_of(schema, self.root)) or [{}]:
            for type in self.types(option, ANY):
                if type == "string":
                    yield _Way(form.key_end, texts=text_regex(option), mark=form.value_end)
                    continue
                given = values_of(option) if type == "enum" else []
                words = [literal(form, each) for each in given if isinstance(each, str)]
                if words:
                    yield _Way(form.key_end, f"({' | '.join(words)})", mark=form.value_end)
                for each in given:
                    if not isinstance(each, str):
                        yield self._json_way(json_type(each), {"const": each})
                if not given:
                    yield self._json_way(type, {**self.shared, **option, "type": type})

    def _json_way(self, type: str, schema: dict[str, Any]) -> _Way:
        said = self.form.other_end.replace(TYPE, "number" if type == "integer" else type)
        return _Way(said, json_part(schema, self.tool), mark=self.form.value_end)

    def _python_ways(self, schema: Any) -> Iterator[_Way]:
        form = self.form
        if form.own_quote or not form.quote:
            yield _Way(form.assign, self.value(schema))
            return
        for option in list(options_of(schema, self.root)) or [{}]:
            for type in self.types(option, ANY):
                if type == "string":
                    plain = f"{text_regex(option)} & {_UNESCAPED}"
                    texts = plain if _BOUNDS & option.keys() else _ESCAPED
                    yield _Way(form.assign + form.quote, texts=texts, mark=form.quote)
                else:
                    yield _Way(form.assign, self.value(option if type == "enum" else {**option, "type": type}))
