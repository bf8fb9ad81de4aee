"""Reads the form of calls from a text in which a template shows calls that are known. Pure.

The texts below stand for parts of calls; no template contains them.
"""

import json
import re
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from kvloom.server.chat.form import ID, KEY, KNOWN, SPACE, CallForm

NAMES = ("kvlfa", "kvlfb")
KEYS = ("kvlka", "kvlkb")
VALUES: tuple[Any, ...] = ("kvlva", 7351)
IDS = ("kvlidaaa1", "kvlidbbb2")
LAST = r"<\|[a-z_]+\|>"  # a mark that ends an answer


@dataclass(frozen=True, slots=True)
class _Found:
    """Where a call stands in a text: all of it, its name, its arguments."""

    begin: int
    name: int
    mid: int
    arguments: int
    rest: int
    end: int
    kind: str


def _find(text: str, index: int, start: int) -> _Found | None:
    """Call number `index`, from `start` on."""
    name = NAMES[index]
    key = text.find(KEYS[0], start)
    at = text.rfind(name, start, key)
    if key < 0 or at < 0:
        return None
    mid = at + len(name)
    brace = text.rfind("{", mid, key)
    if brace >= 0 and re.fullmatch(r'\{\s*"', text[brace:key]):
        rest = _end_of_json(text, brace)
        outer = text.rfind("{", start, at)
        if text[at - 1] == text[mid] == '"' and outer >= 0:
            kind = "keyed" if re.fullmatch(r'\{\s*"', text[outer:at]) else "object"
            return _Found(outer, at, mid, brace, rest, _end_of_json(text, outer), kind)
        return _Found(at, at, mid, brace, rest, rest, "json")
    if text[mid] in "({" and text[mid + 1 :].startswith(KEYS[0]):
        end = text.find({"(": ")", "{": "}"}[text[mid]], mid)
        return _Found(at, at, mid, mid, end, end + 1, "python")
    last = text.find(str(VALUES[1]), key)
    end = last + len(str(VALUES[1]))
    return _Found(at, at, mid, key, end, end, "tagged") if last >= 0 else None


def _end_of_json(text: str, begin: int) -> int:
    try:
        return json.JSONDecoder(strict=False).raw_decode(text, begin)[1]
    except ValueError:
        return begin


def form_in(text: str, end: str, listed: str) -> CallForm | None:
    """The form of the calls in a text, behind which `end` ends an answer. `listed`: a call with a list."""
    for index, id in enumerate(IDS):
        text = text.replace(id, ID)
        text = text.replace(f'"{index}"', f'"{ID}"').replace(f":{index}<", f":{ID}<")
    text = text.replace('index="2"', f'index="{ID}"').replace('index="1"', f'index="{ID}"')
    first = _find(text, 0, 0)
    if first is None:
        return None
    second = _find(text, 1, first.end) if NAMES[1] in text[first.end :] else None
    last = second or first
    pre, post = text[: first.begin], text[last.end :]
    last_mark = common_end(post.rstrip(), end.rstrip())
    post = post.rstrip().removesuffix(last_mark) if last_mark.strip() else re.sub(rf"{LAST}\s*\Z", "", post)
    between = text[first.end : second.begin] if second else None
    parts = _tagged(text, first, between if between is not None else post)
    if parts is None:
        return None
    taken, fields = parts
    if fields["kind"] == "elements":
        fields["item"] = _item(listed, fields["key_begin"], fields["key_end"])
    return _around(pre, None if between is None else between[taken:], post[taken:], fields)


def _tagged(text: str, found: _Found, after: str) -> tuple[int, dict[str, Any]] | None:
    """The number of characters behind the call that belong to its last argument, and the fields of the form so far."""
    kind = found.kind
    if kind in ("object", "keyed"):
        fields = {"mid": text[found.mid : found.arguments], "tail": text[found.rest : found.end]}
        return 0, {"kind": kind, "head": text[found.begin : found.name], **fields}
    if kind == "python":
        inner = text[found.mid + 1 + len(KEYS[0]) : found.rest]
        before = inner.partition(VALUES[0])[0]
        fields = {"mid": text[found.mid], "tail": text[found.end - 1], "assign": before[:1]}
        return 0, {"kind": kind, **fields, "quote": before[1:].removeprefix('"')}
    if kind == "json":
        return 0, {"kind": kind, "mid": text[found.mid : found.arguments]}
    inner = text[found.mid : found.end]
    match = re.fullmatch(rf"(.*?){KEYS[0]}(.*?){VALUES[0]}(.*?){KEYS[1]}(.*?){VALUES[1]}", inner, re.DOTALL)
    if match is None or not match[2].strip():
        return None
    before, key_end, inside, other = match.groups()
    if KEYS[0] in inside:
        return _elements(before, key_end, inside, after) if other == key_end else None
    key_begin = common_end(before, inside)
    value_end = inside[: len(inside) - len(key_begin)]
    if not key_begin.strip() or not value_end.strip() or not after.startswith(value_end):
        return None
    fields = {"key_begin": key_begin, "key_end": key_end, "other_end": other if other != key_end else ""}
    mid = before[: len(before) - len(key_begin)]
    return len(value_end), {"kind": kind, "mid": mid, "value_end": value_end, **fields}


def _elements(before: str, key_end: str, inside: str, after: str) -> tuple[int, dict[str, Any]] | None:
    """The same of arguments whose keys end them too. `before`: what stands before the first key; `inside`: what stands
    between its value and the next key; `after`: what follows the last value.
    """
    value_end, _, rest = inside.partition(KEYS[0])
    key_begin = rest.lstrip().removeprefix(key_end.strip())
    value_end += KEY + key_end.strip()
    last = value_end.replace(KEY, KEYS[1])
    if not re.fullmatch(r"[>\]]", key_end.strip()) or not after.startswith(last):
        return None
    if not key_begin.strip() or not before.endswith(key_begin):
        return None
    mid = before[: len(before) - len(key_begin)]
    fields = {"key_begin": key_begin, "key_end": key_end, "value_end": value_end}
    return len(last), {"kind": "elements", "mid": mid, **fields}


def _item(listed: str, key_begin: str, key_end: str) -> str:
    """The name of a list's elements; "" where a list is none. `listed`: an argument that is a list of a text."""
    begin, end = re.escape(key_begin.strip()), re.escape(key_end.strip())
    found = re.search(rf"{KEYS[0]}{end}\s*{begin}([^\s<>/]+){end}\s*{VALUES[0]}", listed)
    return found[1] if found else ""


def _around(pre: str, between: str | None, post: str, fields: dict[str, Any]) -> CallForm | None:
    """The form, from what stands before, between and behind calls."""
    inner = fields.pop("head", "")
    tail = fields.pop("tail", "")
    head = common_end(pre, between) if between is not None else pre
    if between is None or head.strip() == pre.strip():
        begin, head = _split_json(pre.lstrip()) if fields["kind"] == "object" else _split(pre.lstrip())
        space = pre[: len(pre) - len(pre.lstrip())] if between is None else between[len(post.rstrip()) :]
        space = space[: len(space) - len(space.lstrip())]
        end, is_section = post.rstrip(), False
        if between is not None:
            end = common_begin(end, between).rstrip() or end
        if fields["kind"] in ("tagged", "elements") and head.strip():
            own, end = _split_end(end)
            tail += own
        sep = space
    else:
        inside = between[: len(between) - len(head)]
        own = common_begin(inside, post)
        begin, end, sep, is_section = pre[: len(pre) - len(head)].lstrip(), post[len(own) :], inside[len(own) :], True
        tail += own
    form = CallForm(
        "its own", begin=begin, end=end.rstrip(), is_section=is_section, head=head + inner, tail=tail, between=sep,
        **fields,
    )  # fmt: skip
    if ID in begin or (not begin and form.kind != "object"):
        return None
    return next((_named(form, known, between) for known in KNOWN.values() if _is_alike(known, form)), form)


def _split(pre: str) -> tuple[str, str]:
    """The mark that begins a call, and what stands between it and the name."""
    found = re.match(rf"(?:{SPACE})?[^\s\x00]*?[>\]]", pre) or re.match(r"[^\x00]*", pre)
    mark = found[0] if found else ""
    return mark, pre[len(mark) :]


def _split_json(pre: str) -> tuple[str, str]:
    """The same before a JSON object: the mark is all of it."""
    found = re.match(r"(?:[^\x00{]*\S)?", pre)
    at = found.end() if found else 0
    return pre[:at], pre[at:]


def _split_end(post: str) -> tuple[str, str]:
    """The same behind the arguments: what ends the call itself, and what ends its mark."""
    found = re.search(r"\s*\S+\Z", post)
    at = found.start() if found else len(post)
    return post[:at], post[at:]


def _is_alike(known: CallForm, form: CallForm) -> bool:
    """Whether both have the same marks, but for white space and for a quotation mark of the other kind."""

    def squeezed(one: CallForm) -> list[str]:
        return ["".join(mark.split()) for mark in (*one.marks, one.quote.strip("'"))]

    alike = (known.kind, known.is_section, known.item) == (form.kind, form.is_section, form.item)
    return alike and squeezed(known) == squeezed(form)


def _named(form: CallForm, known: CallForm, between: str | None) -> CallForm:
    """The form as the template shows it, with the name of a known one, and what no template shows. `between`: None =
    no two calls are shown.
    """
    separator = known.between if between is None else form.between
    return replace(form, name=known.name, between=separator, json_begin=known.json_begin, json_end=known.json_end)


def common_begin(first: str, second: str) -> str:
    """The longest common beginning that cuts no mark."""
    return re.sub(r"(?:</?|\[)[^<>\[\]\s]*\Z", "", _shared(first, second))


def common_end(first: str, second: str) -> str:
    """The longest common end that cuts no mark."""
    shared = _shared(first[::-1], second[::-1])[::-1]
    return re.sub(r"\A[^<\[\s]*[>\]]", "", shared)


def _shared(first: str, second: str) -> str:
    """The longest common beginning."""
    return "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
