"""Arguments as elements: a key is the name of its element; objects and lists are elements within it. Pure.

An element is key_begin KEY key_end VALUE value_end, where value_end holds the key again. A list has an element of the
form's name `item` for each of its values.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from kvloom.engine.text.stop import overlap
from kvloom.server.chat.form import KEY, CallForm
from kvloom.server.chat.values import MAX_DEPTH, at_reference, types_of, value_json

_KEY = r"[^\s<>/][^<>\n]*?"
_MAX_KEY = 256  # characters
_MAX_OPTIONS = 500  # schemas that are looked at for one: references may make many of a short text
_MAX_NESTED = 64  # elements within each other; what is deeper stays a text
_EMPTY = (("array", "[]"), ("object", "{}"), ("null", "null"))  # what an element without a text means, if it is no text


class Next(NamedTuple):
    """What a text begins with: an element, the end of the call, neither of them, or what more text decides."""

    kind: Literal["element", "end", "text", "open"]
    key: str = ""


def next_in(form: CallForm, text: str) -> Next:
    """What a text is, with white space before it and within marks."""
    held = _squeezed(text)
    ends = ends_of(form)
    if held in ends:
        return Next("end")
    found = _opening(form).fullmatch(text)
    if found:
        return Next("element", found[1])
    begin = _squeezed(form.key_begin)
    may_be_key = held.startswith(begin) and re.fullmatch(f"(?:{_KEY})?", held[len(begin) :]) and len(held) < _MAX_KEY
    if may_be_key or begin.startswith(held) or any(end.startswith(held) for end in ends):
        return Next("open")
    return Next("text")


def ends_of(form: CallForm) -> tuple[str, ...]:
    """What ends a call, without white space; models leave out the first of both."""
    return tuple(mark for mark in (_squeezed(form.tail), _squeezed(form.end)) if mark)


def end_of(form: CallForm, key: str) -> str:
    """The mark that ends an element."""
    return form.value_end.replace(KEY, key).strip()


def is_whole(form: CallForm, key: str, value: str, schema: Mapping[str, Any]) -> bool:
    """Whether no element within the value of an argument, which has the same key, is still to end."""
    begin, end = _begin_of(form, key), end_of(form, key)
    return _is_flat(form, value, member_schema(schema, schema, key), schema) or value.count(begin) == value.count(end)


class Last(NamedTuple):
    """The value of a call's last argument, and what follows the call. `is_open`: no mark ends the value."""

    value: str
    rest: str
    is_open: bool


def last_of(form: CallForm, key: str, text: str, schema: Mapping[str, Any]) -> Last:
    """What stands in the text behind the beginning of an argument, where the call did not end as it should."""
    value, is_ended, rest = text.rpartition(end_of(form, key))
    if is_ended and next_in(form, rest).kind == "open" and is_whole(form, key, value, schema):
        return Last(value, "", False)
    ends = [_loosely(mark) for mark in (form.tail, form.end) if mark.strip()]
    found = re.search(rf"\s*(?:{'|'.join(ends)})(?:\s*{ends[-1]})?", text)
    if found:
        return Last(text[: found.start()], text[found.end() :], False)
    marks = (end_of(form, key), *(mark.strip() for mark in (form.tail, form.end)))
    held = max(overlap(text, mark) for mark in marks)
    return Last(text[: len(text) - held], "", True)


def element_json(form: CallForm, known: object, root: Mapping[str, Any], text: str, depth: int = _MAX_NESTED) -> str:
    """The value of an element as JSON text of a type that its schema allows; `root` holds what references lead to."""
    text = text.removeprefix("\n") if form.key_end.endswith("\n") else text
    text = text.removesuffix("\n") if form.value_end.startswith("\n") else text
    types = types_of(known, root)
    children = _children(form, known, root, text) if depth and _may_nest(form, types) else []
    if not children:
        if types is not None and "string" not in types and not text.strip():
            return next((empty for name, empty in _EMPTY if name in types), value_json(known, root, text))
        return value_json(known, root, text)
    is_list = all(key == form.item for key, _ in children)
    if types is not None and ("array" in types) != ("object" in types):
        is_list = "array" in types
    if is_list:
        schema = item_schema(known, root)
        return f"[{', '.join(element_json(form, schema, root, value, depth - 1) for _, value in children)}]"
    members = {
        key: element_json(form, member_schema(known, root, key), root, value, depth - 1) for key, value in children
    }
    return f"{{{', '.join(f'{json.dumps(key, ensure_ascii=False)}: {value}' for key, value in members.items())}}}"


def arguments_text(form: CallForm, arguments: Mapping[str, Any]) -> str:
    """Arguments as elements. What is null has none, as in templates of this form."""
    return "".join(_element_text(form, key, value) for key, value in arguments.items() if value is not None)


def value_text(form: CallForm, value: Any) -> str:
    """What stands within the element of a value."""
    if value is None:
        return ""
    if form.item and isinstance(value, Mapping):
        return arguments_text(form, value)
    if form.item and isinstance(value, list | tuple):
        return "".join(_element_text(form, form.item, each) for each in value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _element_text(form: CallForm, key: str, value: Any) -> str:
    return f"{form.key_begin}{key}{form.key_end}{value_text(form, value)}{form.value_end.replace(KEY, key)}"


def options_of(schema: object, root: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas one of which a value follows: where references, `anyOf`, `oneOf`, and an `allOf` of one schema lead
    to, each with what stands beside these. Of a schema with many, the first ones.
    """
    yield from _options_of(schema, root, MAX_DEPTH, iter(range(_MAX_OPTIONS)))


def _options_of(schema: object, root: Mapping[str, Any], depth: int, steps: Iterator[int]) -> Iterator[dict[str, Any]]:
    if not isinstance(schema, dict) or not depth or next(steps, None) is None:
        return
    reference, every = schema.get("$ref"), schema.get("allOf")
    lists = {"anyOf": schema.get("anyOf"), "oneOf": schema.get("oneOf")}
    if isinstance(reference, str) and reference.startswith("#/"):
        lists["$ref"] = [at_reference(root, reference)]
    if isinstance(every, list) and len(every) == 1:
        lists["allOf"] = every
    name = next((key for key, options in lists.items() if isinstance(options, list)), None)
    if name is None:
        yield schema
        return
    outer = {key: value for key, value in schema.items() if key != name}
    for option in lists[name] or ():
        yield from _options_of(_both(outer, option if isinstance(option, dict) else {}), root, depth - 1, steps)


def _both(outer: dict[str, Any], inner: dict[str, Any]) -> dict[str, Any]:
    """A schema with what stands beside it."""
    found = {**outer, **inner}
    if "properties" in outer and "properties" in inner:
        found["properties"] = {**outer["properties"], **inner["properties"]}
    if "required" in outer and "required" in inner:
        found["required"] = [*outer["required"], *inner["required"]]
    return found


def member_schema(known: object, root: Mapping[str, Any], key: str) -> object:
    """The schema of an object's member; None where there is none."""
    for option in options_of(known, root):
        properties = option.get("properties")
        if isinstance(properties, dict) and key in properties:
            return properties[key]
    return next((option.get("additionalProperties") for option in options_of(known, root)), None)


def item_schema(known: object, root: Mapping[str, Any]) -> object:
    """The schema of a list's items; None where there is none."""
    return next((option["items"] for option in options_of(known, root) if "items" in option), None)


def _may_nest(form: CallForm, types: frozenset[str] | None) -> bool:
    return bool(form.item) and (types is None or "array" in types or "object" in types)


def _is_flat(form: CallForm, text: str, known: object, root: Mapping[str, Any]) -> bool:
    """Whether a value is no elements."""
    return not _may_nest(form, types_of(known, root)) or _opening(form).match(text) is None


def _children(form: CallForm, known: object, root: Mapping[str, Any], text: str) -> list[tuple[str, str]]:
    """The elements that a value consists of: their keys and values; none where it is a text."""
    opening, found, at = _opening(form), [], 0
    items = item_schema(known, root)
    while match := opening.match(text, at):
        key = match[1]
        schema = items if key == form.item and items is not None else member_schema(known, root, key)
        is_flat = _is_flat(form, text[match.end() : match.end() + _MAX_KEY], schema, root)
        end = _end_in(form, key, text, match.end(), is_flat)
        if end < 0:
            return []
        found.append((key, text[match.end() : end]))
        at = min(end + len(end_of(form, key)), len(text))
    return [] if text[at:].strip() else found


def _end_in(form: CallForm, key: str, text: str, start: int, is_flat: bool) -> int:
    """Where the mark stands that ends an element: the text's end if there is none, -1 if a text follows them all."""
    opening, begin, end = _opening(form), _begin_of(form, key), end_of(form, key)
    depth, last = 0, len(text)
    for mark in re.compile(f"{re.escape(begin)}|{re.escape(end)}").finditer(text, start):
        if mark[0] == begin:
            depth += 1
        elif is_flat or not depth:
            if not text[mark.end() :].strip() or opening.match(text, mark.end()):
                return mark.start()
            last = -1
        else:
            depth -= 1
    return last


@lru_cache(64)
def _opening(form: CallForm) -> re.Pattern[str]:
    """The beginning of an element."""
    return re.compile(rf"\s*{_loosely(form.key_begin)}({_KEY}){_loosely(form.key_end)}")


def _begin_of(form: CallForm, key: str) -> str:
    return f"{form.key_begin}{key}{form.key_end}".strip()


def _loosely(mark: str) -> str:
    return r"\s*".join(map(re.escape, mark.split()))


def _squeezed(text: str) -> str:
    return "".join(text.split())
