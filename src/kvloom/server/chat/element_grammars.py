"""Grammars of calls whose arguments are elements; see elements.py. Rules of Lark, as llguidance takes it."""

import json
from collections.abc import Mapping
from typing import Any

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.elements import options_of, value_text
from kvloom.server.chat.form import KEY, CallForm
from kvloom.server.chat.lark_parts import json_part, literal, literals, text_regex
from kvloom.server.chat.tools import Tool
from kvloom.server.serving.notes import note

_KEY = "/[^ \\t\\n<>\\/][^\\n<>]*/"
_NOT_HELD = (
    "allOf", "not", "if", "patternProperties", "propertyNames", "prefixItems", "contains", "dependentSchemas",
    "minProperties", "maxProperties", "uniqueItems",
)  # fmt: skip


def element_rules(form: CallForm, rule: str, tool: Tool, schema: dict[str, Any]) -> list[str]:
    """Rule `rule`: a call, its arguments in the schema's order; optional ones may be omitted. Raises BadRequest."""
    rules = _Rules(form, rule, tool, schema)
    inner = " | ".join(map(rules.members, options_of(schema, schema)))
    head, tail = literals(form, form.head, tool.name, form.mid), literals(form, form.tail)
    return [*rules.lines, f"{rule}: {head} ({inner}) {tail}"]


class _Rules:
    """Collects the rules of one tool's elements. `root` holds what references lead to."""

    def __init__(self, form: CallForm, rule: str, tool: Tool, root: dict[str, Any]) -> None:
        self.lines: list[str] = []
        self._form, self._rule, self._tool, self._root = form, rule, tool, root
        self._names: dict[tuple[str | None, str], str] = {}  # of the rules, by key and schema

    def members(self, schema: Mapping[str, Any]) -> str:
        """The elements of an object."""
        required = schema.get("required") or ()
        known = [(key, each) for key, each in (schema.get("properties") or {}).items() if each is not False]
        if known:
            names = [(key, self._element(key, each)) for key, each in known]
            return " ".join(name if key in required else f"{name}?" for key, name in names)
        other = schema.get("additionalProperties", True)
        return '""' if other is False else f"{self._element(None, other)}*"

    def _element(self, key: str | None, schema: Any) -> str:
        """The name of the rule for an element; `key`: None = any."""
        at = (key, json.dumps(schema, sort_keys=True))
        if at in self._names:
            return self._names[at]
        name = self._names[at] = f"{self._rule}_{len(self._names)}"
        options = list(options_of(schema, self._root)) or [{}]
        typed = [(type, option) for option in options for type in self._types(option)]
        inner = [found for type, option in typed if (found := self._inner(type, option)) is not None]
        form = self._form
        begin = self._around(key, form.key_begin + KEY + form.key_end)
        ends = [f"({' | '.join(inner)}) {self._around(key, form.value_end)}"] if inner else []
        for index, option in enumerate(option for type, option in typed if type == "text"):
            ends.append(self._text(f"{name}_{index}", key, option, bool(inner)))
        self.lines.append(f"{name}: {begin} ({' | '.join(ends)})")
        return name

    def _types(self, option: dict[str, Any]) -> list[str]:
        """What a value of this schema may be: "text" = a string of any text."""
        for word in _NOT_HELD:
            if word in option:
                self._refuse(word)
        if "const" in option or isinstance(option.get("enum"), list):
            return ["enum"]
        given = option.get("type", ["string", "object", "array"])
        names = [given] if isinstance(given, str) else list(given)
        return ["text" if name == "string" else name for name in names]

    def _refuse(self, word: str) -> None:
        """Raises BadRequest where a tool is strict."""
        if self._tool.is_strict:
            raise BadRequest(self._tool.schema_field, f"has {word}, which calls of this model cannot be held to")
        note(f"{word} of the schema is not held")

    def _inner(self, type: str, option: dict[str, Any]) -> str | None:
        """What stands within an element, but for a text."""
        form = self._form
        if type == "text":
            return None
        if type == "enum":
            values = option["enum"] if "enum" in option else [option["const"]]
            return " | ".join(literal(form, value_text(form, value)) for value in values)
        if type == "null":
            return '""'
        if type == "object" and form.item:
            return self.members(option)
        if type == "array" and form.item:
            low, high = option.get("minItems", 0), option.get("maxItems", "")
            return f"{self._element(form.item, option.get('items', True))}{{{low},{high}}}"
        shared = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return json_part({**shared, **option, "type": type}, self._tool)

    def _text(self, name: str, key: str | None, option: dict[str, Any], may_nest: bool) -> str:
        """A text and the mark that ends it, as in lark_parts.open_text. Where the value `may_nest`, it begins no
        element.
        """
        form, terminal = self._form, name.upper()
        last, _, behind = form.value_end.partition(KEY)
        last = last if key is None else form.value_end.replace(KEY, key)
        rest = f" {_KEY} {literal(form, behind)}" if key is None else ""
        if any(text in last for text, _ in form.special_ids):
            self.lines.append(f"{terminal}: {text_regex(option)}")
            return f"{terminal} {literal(form, last)}{rest}"
        begun = text_regex({"pattern": rf"^\s*{_escaped(form.key_begin.strip())}"})
        self.lines.append(f"{terminal}: {text_regex(option)}" + (f" & ~{begun}" if may_nest else ""))
        self.lines.append(f"{name}[suffix={literal(form, last)}]: {terminal}")
        return f"{name}{rest}"

    def _around(self, key: str | None, mark: str) -> str:
        """A mark with a key."""
        if key is not None:
            return literal(self._form, mark.replace(KEY, key))
        before, _, behind = mark.partition(KEY)
        return f"{literal(self._form, before)} {_KEY} {literal(self._form, behind)}"


def _escaped(text: str) -> str:
    return "".join(f"\\{char}" if char in r"\^$.|?*+()[]{}/" else char for char in text)
