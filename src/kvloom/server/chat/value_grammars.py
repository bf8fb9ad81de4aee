"""Grammars of values that are no JSON: with Python's words and quotes, or with quotes of a form's own.

Rules of Lark, as llguidance takes it.
"""

import json
from collections.abc import Sequence
from typing import Any

from kvloom.server.chat.elements import options_of
from kvloom.server.chat.lark_parts import json_part, literal, open_text, text_regex
from kvloom.server.chat.schema_rules import SchemaRules, values_of
from kvloom.server.chat.spelling import PYTHON, Writing, inner_text, key_text, own_writing, sorting, spelt

ANY = ("string", "number", "boolean", "null", "array", "object")
_PLAIN = r"/[^'\\\x00-\x1f]*/"  # what stands between quotation marks as it is
_QUOTED = r"""/'([^'\\\x00-\x1f]|\\['"\\nrt])*'/ | /"([^"\\\x00-\x1f]|\\["\\nrt])*"/"""
_KEY = r"/'[^'\\\x00-\x1f]+'/"
_BARE_KEY = r"/[A-Za-z_][A-Za-z0-9_]*/"


class ValueRules(SchemaRules):
    """Rules of one tool's values."""

    def value(self, schema: Any) -> str:
        """The value of an argument that is no text without escapes. Raises BadRequest."""
        form = self.form
        options = list(options_of(schema, self.root)) or [{}]
        typed = [(type, option) for option in options for type in self.types(option, ANY)]
        if not form.own_quote and not any(type == "enum" or type in form.literals for type, _ in typed):
            return json_part({**self.shared, **schema} if isinstance(schema, dict) else schema, self.tool)
        return self._one_of([self._outer(type, option) for type, option in typed])

    def _outer(self, type: str, option: dict[str, Any]) -> str:
        form = self.form
        if type == "enum":
            texts = [
                json.dumps(each, ensure_ascii=False) if isinstance(each, str) and not form.own_quote
                else spelt(form, each) for each in values_of(option)
            ]  # fmt: skip
            return self._one_of([literal(form, text) for text in texts])
        if form.own_quote:
            return self._inner(own_writing(form), type, option)
        if type not in form.literals:
            return json_part({**self.shared, **option, "type": type}, self.tool)
        found = self._inner(PYTHON, type, option)
        return self._one_of([found, json_part({"type": type}, self.tool)]) if type in ("boolean", "null") else found

    def _one_of(self, texts: Sequence[str]) -> str:
        return texts[0] if len(texts) == 1 else f"({' | '.join(texts)})"

    def _any(self, writing: Writing, schema: Any) -> str:
        """The name of the rule for a value within another one."""
        name, is_new = self.named(writing is PYTHON, json.dumps(schema, sort_keys=True))
        if is_new:
            options = list(options_of(schema, self.root)) or [{}]
            found = [self._inner(writing, type, option) for option in options for type in self.types(option, ANY)]
            self.lines.append(f"{name}: {' | '.join(found)}")
        return name

    def _inner(self, writing: Writing, type: str, option: dict[str, Any]) -> str:
        """A value of a type, within another one or of its own."""
        form = self.form
        match type:
            case "enum":
                return self._one_of([literal(form, inner_text(form, writing, each)) for each in values_of(option)])
            case "string":
                return self._text(writing, option)
            case "null":
                return literal(form, writing.words[None])
            case "boolean":
                return self._one_of([literal(form, writing.words[each]) for each in (True, False)])
            case "array":
                return self._list(writing, option)
            case "object":
                return self._object(writing, option)
        return json_part({**option, "type": type}, self.tool)

    def _text(self, writing: Writing, option: dict[str, Any]) -> str:
        is_free = not any(word in option for word in ("pattern", "minLength", "maxLength"))
        bounds = () if is_free else tuple(option.get(word) for word in ("pattern", "minLength", "maxLength"))
        name, is_new = self.named(writing is PYTHON, "text", bounds)
        if not is_new:
            return name
        if writing is not PYTHON:
            self.lines += open_text(self.form, name, self.form.quote, self.form.quote, option)
        elif is_free:
            self.lines += [f"{name}: {name.upper()}", f"{name.upper()}: {_QUOTED}"]
        else:
            self.lines += [f'{name}: "\'" {name.upper()} "\'"', f"{name.upper()}: {text_regex(option)} & {_PLAIN}"]
        return name

    def _list(self, writing: Writing, option: dict[str, Any]) -> str:
        low, high = option.get("minItems", 0), option.get("maxItems")
        if high == 0:
            return literal(self.form, "[]")
        item, comma = self._any(writing, option.get("items", True)), literal(self.form, writing.comma)
        more = f"({comma} {item}){{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
        return f'"[" ({item} {more}){"" if low else "?"} "]"'

    def _object(self, writing: Writing, option: dict[str, Any]) -> str:
        required = option.get("required") or ()
        known = [(key, each) for key, each in (option.get("properties") or {}).items() if each is not False]
        comma, colon = literal(self.form, writing.comma), literal(self.form, writing.colon)
        if not known:
            other = option.get("additionalProperties", True)
            if other is False:
                return literal(self.form, "{}")
            member = f"{_KEY if writing is PYTHON else _BARE_KEY} {colon} {self._any(writing, other)}"
            return f'"{{" ({member} ({comma} {member})*)? "}}"'
        rest, may_end = "", True  # what follows a member, and whether none need follow
        for key, each in reversed(sorted(known, key=sorting(self.form))):
            member = f"{literal(self.form, key_text(writing, key))} {colon} {self._any(writing, each)}"
            more = f"({comma} {rest}){'?' if may_end else ''}" if rest else ""
            body = f"{member} {more}" + (f" | {rest}" if rest and key not in required else "")
            name, is_new = self.named(body)
            self.lines += [f"{name}: {body}"] if is_new else []
            rest, may_end = name, may_end and key not in required
        return f'"{{" {rest}{"?" if may_end else ""} "}}"'
