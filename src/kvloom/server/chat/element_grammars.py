"""Grammars of calls whose arguments are elements; see elements.py. Rules of Lark, as llguidance takes it."""

import json
from collections.abc import Mapping
from typing import Any

from kvloom.server.chat.elements import options_of, value_text
from kvloom.server.chat.form import KEY, CallForm
from kvloom.server.chat.lark_parts import escaped, json_part, literal, literals, text_regex
from kvloom.server.chat.schema_rules import SchemaRules, values_of
from kvloom.server.chat.tools import Tool

_KEY = "/[^ \\t\\n<>\\/][^\\n<>]*/"
_ANY = ("string", "object", "array")  # what a value may be whose schema says nothing


def element_rules(form: CallForm, rule: str, tool: Tool, schema: dict[str, Any]) -> list[str]:
    """Rule `rule`: a call, its arguments in the schema's order; optional ones may be omitted. Raises BadRequest."""
    rules = _Rules(form, rule, tool, schema)
    inner = " | ".join(map(rules.members, options_of(schema, schema)))
    head, tail = literals(form, form.head, tool.name, form.mid), literals(form, form.tail)
    return [*rules.lines, f"{rule}: {head} ({inner}) {tail}"]


class _Rules(SchemaRules):
    """Rules of one tool's elements."""

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
        name, is_new = self.named(key, json.dumps(schema, sort_keys=True))
        if not is_new:
            return name
        options = list(options_of(schema, self.root)) or [{}]
        typed = [(type, option) for option in options for type in self.types(option, _ANY)]
        inner = [found for type, option in typed if (found := self._inner(type, option)) is not None]
        form = self.form
        begin = self._around(key, form.key_begin + KEY + form.key_end)
        ends = [f"({' | '.join(inner)}) {self._around(key, form.value_end)}"] if inner else []
        for index, option in enumerate(option for type, option in typed if type == "string"):
            ends.append(self._text(f"{name}_{index}", key, option, bool(inner)))
        self.lines.append(f"{name}: {begin} ({' | '.join(ends)})")
        return name

    def _inner(self, type: str, option: dict[str, Any]) -> str | None:
        """What stands within an element, but for a text."""
        form = self.form
        if type == "string":
            return None
        if type == "enum":
            return " | ".join(literal(form, value_text(form, value)) for value in values_of(option))
        if type == "null":
            return '""'
        if type == "object" and form.item:
            return self.members(option)
        if type == "array" and form.item:
            low, high = option.get("minItems", 0), option.get("maxItems", "")
            return f"{self._element(form.item, option.get('items', True))}{{{low},{high}}}"
        return json_part({**self.shared, **option, "type": type}, self.tool)

    def _text(self, name: str, key: str | None, option: dict[str, Any], may_nest: bool) -> str:
        """A text and the mark that ends it, as in lark_parts.open_text. Where the value `may_nest`, it begins no
        element.
        """
        form, terminal = self.form, name.upper()
        last, _, behind = form.value_end.partition(KEY)
        last = last if key is None else form.value_end.replace(KEY, key)
        rest = f" {_KEY} {literal(form, behind)}" if key is None else ""
        if any(text in last for text, _ in form.special_ids):
            self.lines.append(f"{terminal}: {text_regex(option)}")
            return f"{terminal} {literal(form, last)}{rest}"
        begun = text_regex({"pattern": rf"^\s*{escaped(form.key_begin.strip())}"})
        self.lines.append(f"{terminal}: {text_regex(option)}" + (f" & ~{begun}" if may_nest else ""))
        self.lines.append(f"{name}[suffix={literal(form, last)}]: {terminal}")
        return f"{name}{rest}"

    def _around(self, key: str | None, mark: str) -> str:
        """A mark with a key."""
        if key is not None:
            return literal(self.form, mark.replace(KEY, key))
        before, _, behind = mark.partition(KEY)
        return f"{literal(self.form, before)} {_KEY} {literal(self.form, behind)}"
