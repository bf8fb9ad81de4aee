"""Structural tags: answers of which some parts follow a format, as vLLM and SGLang accept them for XGrammar.

A format becomes a Lark grammar. Adjacent parts that are regular languages are merged into one terminal, because a lexer
that takes the longest match could not find the boundary between them; the others become rules.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.grammars import check_size, checked_grammar, inner_schema, text_grammar
from kvloom.server.chat.regexes import lark_regex

_ANY = r"/(.|\n)*/"


class _Format(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class ConstString(_Format, tag="const_string"):
    value: str


class JsonSchema(_Format, tag="json_schema"):
    json_schema: bool | dict[str, Any]
    style: Literal["json"] = "json"


class Grammar(_Format, tag="grammar"):
    grammar: str


class Regex(_Format, tag="regex"):
    pattern: str


class AnyText(_Format, tag="any_text"):
    excludes: list[str] = []


class Sequence_(_Format, tag="sequence"):
    elements: "list[Format]"


class Or(_Format, tag="or"):
    elements: "list[Format]"


class Optional(_Format, tag="optional"):
    content: "Format"


class Star(_Format, tag="star"):
    content: "Format"


class Plus(_Format, tag="plus"):
    content: "Format"


_MARKS = {Optional: "?", Star: "*", Plus: "+"}


class Tag(_Format, tag="tag"):
    begin: str
    content: "Format"
    end: str | list[str]


class TriggeredTags(_Format, tag="triggered_tags"):
    triggers: list[str]
    tags: list[Tag]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: list[str] = []


class TagsWithSeparator(_Format, tag="tags_with_separator"):
    tags: list[Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = (
    ConstString
    | JsonSchema
    | Grammar
    | Regex
    | AnyText
    | Sequence_
    | Or
    | Optional
    | Star
    | Plus
    | Tag
    | TriggeredTags
    | TagsWithSeparator
)


class Structure(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    begin: str
    schema: bool | dict[str, Any] | str | None = None
    end: str


class StructuralTag(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A format; or, in the older form, structures and the triggers that begin them."""

    type: Literal["structural_tag"] = "structural_tag"
    format: Format | None = None
    structures: list[Structure] | None = None
    triggers: list[str] | None = None
    at_least_one: bool = False


def tag_grammar(tag: str | dict[str, Any], field: str) -> str:
    """From a structural tag, as object or JSON text. Raises BadRequest that names the wrong part."""
    try:
        text = tag if isinstance(tag, str) else json.dumps(tag)
        check_size(text, field)
        known = msgspec.json.decode(text, type=StructuralTag)
        return _Writer(field).grammar(_format_of(known, field))
    except msgspec.MsgspecError as error:
        problem, _, path = str(error).partition(" - at `$")
        raise BadRequest(field + path.rstrip("`"), f"cannot be read: {problem}") from None
    except (RecursionError, ValueError):
        raise BadRequest(field, "is nested too deeply, or is no JSON") from None


def _format_of(tag: StructuralTag, field: str) -> Format:
    if (tag.format is None) == (tag.structures is None):
        raise BadRequest(field, "needs either a format, or structures and triggers")
    if tag.format is not None:
        return tag.format
    tags = [
        Tag(begin=one.begin, content=JsonSchema(json_schema=_schema_of(one, field)), end=one.end)
        for one in tag.structures or ()
    ]
    return TriggeredTags(triggers=tag.triggers or [], tags=tags, at_least_one=tag.at_least_one)


def _schema_of(structure: Structure, field: str) -> bool | dict[str, Any]:
    schema = json.loads(structure.schema) if isinstance(structure.schema, str) else structure.schema
    if schema is None:
        return True
    if not isinstance(schema, bool | dict):
        raise BadRequest(f"{field}.structures", "must have JSON schemas: objects")
    return schema


@dataclass(frozen=True, slots=True)
class _Part:
    """An expression in Lark; part of a terminal when it `is_regular`."""

    text: str
    is_regular: bool


class _Writer:
    """Collects the rules of one grammar. `field`: the caller's field, for errors."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._terminals: list[str] = []
        self._inner: list[dict[str, Any]] = []

    def grammar(self, format: Format) -> str:
        """Raises BadRequest."""
        start = f"start: {self._rule(self._part(format))}"
        lines = [start, *(f"T{number}: {text}" for number, text in enumerate(self._terminals))]
        grammars = [{"lark_grammar": "\n".join(lines)}, *self._inner]
        return checked_grammar(json.dumps({"grammars": grammars}), self._field)

    def _rule(self, part: _Part) -> str:
        """The part as rules use it: a regular one becomes a terminal."""
        if not part.is_regular:
            return part.text
        self._terminals.append(part.text)
        return f"T{len(self._terminals) - 1}"

    def _part(self, format: Format, ends: Sequence[str] = ()) -> _Part:
        """`ends`: texts one of which follows, so that free text stops before them."""
        match format:
            case ConstString(value=value):
                return _literal(value)
            case Regex(pattern=pattern):
                return _Part(lark_regex(pattern), True)
            case AnyText(excludes=excludes):
                return _text_without([*excludes, *ends])
            case JsonSchema(json_schema=schema):
                return _Part(f"%json {json.dumps(inner_schema(schema, self._field))}", False)
            case Grammar(grammar=grammar):
                return self._nested(grammar)
            case Sequence_(elements=elements):
                last = len(elements) - 1
                return self._all([self._part(one, ends if i == last else ()) for i, one in enumerate(elements)])
            case Or(elements=elements):
                return self._any([self._part(one, ends) for one in elements])
            case Optional(content=content) | Star(content=content) | Plus(content=content):
                return self._times(self._part(content, ends), _MARKS[type(format)])
            case Tag():
                return self._all([_literal(format.begin), self._inside(format)])
            case TriggeredTags():
                return self._triggered(format, ends)
            case TagsWithSeparator():
                return self._separated(format)

    def _nested(self, grammar: str) -> _Part:
        name = f"g{len(self._inner)}"
        self._inner.append({"name": name, "lark_grammar": text_grammar(grammar, self._field)})
        return _Part(f"@{name}", False)

    def _inside(self, tag: Tag) -> _Part:
        """What follows a tag's begin text."""
        ends = [tag.end] if isinstance(tag.end, str) else tag.end
        if not ends:
            raise BadRequest(self._field, f"the tag {tag.begin!r} has no end; give a text, also an empty one")
        content = self._part(tag.content, [end for end in ends if end])
        return self._all([content, self._any([_literal(end) for end in ends])])

    def _triggered(self, format: TriggeredTags, ends: Sequence[str]) -> _Part:
        """Free text, until a trigger begins one of its tags; then free text again."""
        triggers = format.triggers
        if not triggers or not all(triggers) or not format.tags:
            raise BadRequest(self._field, "needs tags, and triggers that are not empty")
        owners = [[trigger for trigger in triggers if tag.begin.startswith(trigger)] for tag in format.tags]
        for tag, found in zip(format.tags, owners, strict=True):
            if len(found) != 1:
                raise BadRequest(self._field, f"the tag {tag.begin!r} must begin with exactly one of the triggers")
        free = _text_without([*triggers, *format.excludes, *ends])
        called = []
        for trigger in dict.fromkeys(found[0] for found in owners):
            rests = [
                self._all([_literal(tag.begin.removeprefix(trigger)), self._inside(tag)])
                for tag, found in zip(format.tags, owners, strict=True)
                if found[0] == trigger
            ]
            called.append(
                _Part(f"{self._rule(self._all([free, _literal(trigger)]))} {self._rule(self._any(rests))}", False)
            )
        call = self._any(called)
        more = self._all([self._times(call, "?" if format.stop_after_first else "*")])
        if not format.at_least_one:
            if format.stop_after_first:
                return self._any([free, call])
            return self._all([more, free])
        first = self._any([self._part(tag) for tag in format.tags])
        return first if format.stop_after_first else self._all([first, more, free])

    def _separated(self, format: TagsWithSeparator) -> _Part:
        """Tags and nothing else."""
        tag = self._any([self._part(tag) for tag in format.tags])
        tags = tag
        if not format.stop_after_first:
            tags = self._all([tag, self._times(self._all([_literal(format.separator), tag]), "*")])
        return tags if format.at_least_one else self._times(tags, "?")

    def _all(self, parts: Sequence[_Part]) -> _Part:
        """Concatenation; adjacent regular parts become one terminal."""
        return self._joined(parts, " ", self._run)

    def _run(self, parts: Sequence[_Part]) -> list[str]:
        texts: list[str] = []
        run: list[_Part] = []
        for part in [*parts, None]:
            if part is not None and part.is_regular:
                run.append(part)
                continue
            if run:
                texts.append(self._rule(_Part(" ".join(one.text for one in run), True)))
                run = []
            if part is not None:
                texts.append(part.text)
        return texts

    def _any(self, parts: Sequence[_Part]) -> _Part:
        return self._joined(parts, " | ", lambda all: [self._rule(part) for part in all])

    def _joined(self, parts: Sequence[_Part], mark: str, rules: Callable[[Sequence[_Part]], list[str]]) -> _Part:
        if not parts:
            raise BadRequest(self._field, "has a list of elements or tags that is empty")
        is_regular = all(part.is_regular for part in parts)
        texts = [part.text for part in parts] if is_regular else rules(parts)
        return _Part(f"({mark.join(texts)})", is_regular)

    def _times(self, part: _Part, mark: str) -> _Part:
        return _Part(f"({part.text}){mark}", part.is_regular)


def _literal(text: str) -> _Part:
    return _Part(json.dumps(text, ensure_ascii=False), True)


def _text_without(texts: Sequence[str]) -> _Part:
    """Any text that contains none of these."""
    found = "|".join(_escaped(text) for text in texts if text)
    return _Part(rf"({_ANY} & ~/(.|\n)*({found})(.|\n)*/)" if found else _ANY, True)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")
