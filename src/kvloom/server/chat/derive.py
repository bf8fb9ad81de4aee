"""Finds how a model writes by rendering conversations that are known, and reading where their parts stand. Pure.

The texts below stand for parts of a conversation; no template contains them.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.form import ID, KEY, KNOWN, MARK, SPACE, CallForm, Thinking

# (messages, tools, whether the answer's beginning is added) -> prompt. Raises BadRequest where the template refuses
Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], bool], str]

_USER, _TEXT, _WHY = "Qkvl", "Zkvltext", "Zkvlwhy"
_NAMES = ("kvlfa", "kvlfb")
_KEYS = ("kvlka", "kvlkb")
_VALUES: tuple[Any, ...] = ("kvlva", 7351)
_IDS = ("kvlidaaa1", "kvlidbbb2")
_ARGUMENTS = dict(zip(_KEYS, _VALUES, strict=True))
_LISTED = {_KEYS[0]: [_VALUES[0]]}
_CHANNEL = r"<\|channel\|>\w+(?=<\|message\|>)"  # gpt-oss: what follows is reasoning, by the channel's name
PARTS = "parts"  # reasoning as a part of the content, of the type "thinking"
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking", "thought", "tool_plan", PARTS)
_LAST = r"<\|[a-z_]+\|>"  # a mark that ends an answer
_SCHEMA = {
    "type": "object",
    "properties": {
        _KEYS[0]: {"type": "string", "description": "a"},
        _KEYS[1]: {"type": "integer", "description": "b"},
    },
    "required": list(_KEYS),
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "does", "parameters": _SCHEMA}} for name in _NAMES
]
_ASKED = {"role": "user", "content": _USER}


def _call(index: int, is_text: bool, arguments: Mapping[str, Any] = _ARGUMENTS) -> dict[str, Any]:
    given: Any = json.dumps(arguments) if is_text else arguments
    return {
        "id": _IDS[index], "type": "function", "function": {"name": _NAMES[index], "arguments": given},
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShownReasoning:
    """Reasoning of earlier answers as a template shows it. `names`: the members of a message that it reads it from."""

    marks: Thinking
    names: tuple[str, ...]


def reasoning_of(render: Render) -> ShownReasoning | None:
    """The marks around reasoning, where the template shows that of earlier answers."""
    called: tuple[Any, ...] = (
        {"content": "", "tool_calls": [_call(0, False)]},
        {"content": "", "tool_calls": [_call(0, True)]},
    )
    marks: Thinking | None = None
    names: list[str] = []
    for messages, tools in ((({"content": _TEXT},), []), (called, TOOLS)):
        is_known = False
        for name in (*names, *REASONING_NAMES):
            for message in messages:
                found = None if is_known else _marks_in(render, with_reasoning(message, name, _WHY), tools)
                if found:
                    marks, is_known = marks or found, True
                    names += [] if name in names else [name]
    if marks is None:
        return None
    try:
        before = render([_ASKED, {"role": "assistant", "content": _TEXT}], [], False).partition(_TEXT)[0]
    except BadRequest:
        before = ""
    is_header = bool(marks.begin) and before.rstrip().endswith(marks.begin)
    return ShownReasoning(replace(marks, is_header=is_header), tuple(names))


def with_reasoning(message: Mapping[str, Any], name: str, reasoning: str) -> dict[str, Any]:
    """The message with its reasoning under a name of REASONING_NAMES."""
    if name != PARTS or not isinstance(message["content"], str):
        return {**message, **({} if name == PARTS else {name: reasoning})}
    text = [{"type": "text", "text": message["content"]}] if message["content"] else []
    return {**message, "content": [{"type": "thinking", "thinking": reasoning}, *text]}


def _marks_in(render: Render, message: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> Thinking | None:
    try:
        text = render([_ASKED, {"role": "assistant", **message}], tools, False)
    except BadRequest:
        return None
    before, is_shown, after = text.partition(_WHY)
    end = re.match(rf"\s*({MARK})", after)
    if not is_shown or not end:
        return None
    begin = re.search(rf"((?:{_CHANNEL})?{MARK}\w*)\s*\Z", before)
    mark = begin[1] if begin else before.rstrip().rpartition("\n")[2]
    return Thinking(mark, end[1], before[len(before.rstrip()) :])


@dataclass(frozen=True, slots=True)
class Around:
    """Marks that are no text. `before`: what stands before the text of an answer, behind its reasoning."""

    before: str
    all: tuple[str, ...]


def around_text(render: Render, shown: ShownReasoning | None, calls: CallForm | None) -> Around:
    """The marks that an answer's text stands between, and that end it."""
    message: dict[str, Any] = {"role": "assistant", "content": _TEXT}
    for name in shown.names if shown else ():
        message = with_reasoning(message, name, _WHY)
    text = _answer(render, message, []) or ""
    before, _, after = text.rpartition(_TEXT)
    if shown:
        _, is_split, rest = before.rpartition(shown.marks.end)
        before = rest if is_split else ""
    last = re.findall(MARK, after) or after.split()[:1]
    answer = _called(render, 1, False) or _called(render, 1, True) or ""
    end = calls.end.strip() if calls else ""
    ends = (
        re.findall(MARK, answer.rpartition(end)[2]) if end and end in answer else re.findall(rf"{_LAST}\s*\Z", answer)
    )
    opening = re.findall(rf"{MARK}\w*", before)
    marks = [*opening, *last, *(one.strip() for one in ends)]
    return Around(before.strip() if opening else "", tuple(dict.fromkeys(marks)))


def calls_of(render: Render, end_of_reasoning: str = "") -> CallForm | None:
    """The form of calls; None where the template shows none, or none in a form that is read here."""
    for is_text in (False, True):
        for count in (2, 1):
            text = _called(render, count, is_text)
            if text is None or _NAMES[0] not in text or _KEYS[0] not in text:
                continue
            before, is_there, rest = text.partition(end_of_reasoning) if end_of_reasoning else ("", "", "")
            if is_there and _NAMES[0] not in before:
                text = rest
            return _form(text, _end(render), _called(render, 1, is_text, _LISTED) or "")
    return None


def _called(render: Render, count: int, is_text: bool, arguments: Mapping[str, Any] = _ARGUMENTS) -> str | None:
    """What the template makes of an answer that is calls."""
    calls = [_call(index, is_text, arguments) for index in range(count)]
    return _answer(render, {"role": "assistant", "content": "", "tool_calls": calls}, TOOLS)


def _answer(render: Render, message: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> str | None:
    return answer_in(render, _ASKED, message, tools)


def answer_in(
    render: Render, asked: Mapping[str, Any], message: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> str | None:
    """What the template makes of an answer, without what precedes it; None if it refuses. `asked`: a user's message."""
    try:
        text = render([asked, message], tools, False)
        begin = render([asked], tools, True)
        other = render([asked, {"role": "assistant", "content": "."}], tools, False)
    except BadRequest:
        return None
    if begin == render([asked], tools, False):
        text = text[: len(text) - len(_common_end(text, begin))]  # the template always adds the answer's beginning
    if text.startswith(begin):
        return text[len(begin) :]
    content = asked["content"]
    shared = max(len(_common_begin(text, begin)), len(_common_begin(text, other)), text.find(content) + len(content))
    return text[shared:]


def _end(render: Render) -> str:
    """What ends an answer."""
    text = _answer(render, {"role": "assistant", "content": _TEXT}, TOOLS) or ""
    return text.rpartition(_TEXT)[2] if _TEXT in text else ""


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
    name = _NAMES[index]
    key = text.find(_KEYS[0], start)
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
    if text[mid] in "({" and text[mid + 1 :].startswith(_KEYS[0]):
        end = text.find({"(": ")", "{": "}"}[text[mid]], mid)
        return _Found(at, at, mid, mid, end, end + 1, "python")
    last = text.find(str(_VALUES[1]), key)
    end = last + len(str(_VALUES[1]))
    return _Found(at, at, mid, key, end, end, "tagged") if last >= 0 else None


def _end_of_json(text: str, begin: int) -> int:
    try:
        return json.JSONDecoder(strict=False).raw_decode(text, begin)[1]
    except ValueError:
        return begin


def _form(text: str, end: str, listed: str) -> CallForm | None:
    """The form of the calls in a text, behind which `end` ends an answer. `listed`: a call with a list."""
    for index, id in enumerate(_IDS):
        text = text.replace(id, ID)
        text = text.replace(f'"{index}"', f'"{ID}"').replace(f":{index}<", f":{ID}<")
    text = text.replace('index="2"', f'index="{ID}"').replace('index="1"', f'index="{ID}"')
    first = _find(text, 0, 0)
    if first is None:
        return None
    second = _find(text, 1, first.end) if _NAMES[1] in text[first.end :] else None
    last = second or first
    pre, post = text[: first.begin], text[last.end :]
    post = post.removesuffix(end) if end and post.endswith(end) else re.sub(rf"{_LAST}\s*\Z", "", post)
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
        inner = text[found.mid + 1 + len(_KEYS[0]) : found.rest]
        before = inner.partition(_VALUES[0])[0]
        fields = {"mid": text[found.mid], "tail": text[found.end - 1], "assign": before[:1]}
        return 0, {"kind": kind, **fields, "quote": before[1:] if len(before) > 2 else ""}
    if kind == "json":
        return 0, {"kind": kind, "mid": text[found.mid : found.arguments]}
    inner = text[found.mid : found.end]
    match = re.fullmatch(rf"(.*?){_KEYS[0]}(.*?){_VALUES[0]}(.*?){_KEYS[1]}(.*?){_VALUES[1]}", inner, re.DOTALL)
    if match is None or not match[2].strip():
        return None
    before, key_end, inside, other = match.groups()
    if _KEYS[0] in inside:
        return _elements(before, key_end, inside, after) if other == key_end else None
    key_begin = _common_end(before, inside)
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
    value_end, _, rest = inside.partition(_KEYS[0])
    key_begin = rest.lstrip().removeprefix(key_end.strip())
    value_end += KEY + key_end.strip()
    last = value_end.replace(KEY, _KEYS[1])
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
    found = re.search(rf"{_KEYS[0]}{end}\s*{begin}([^\s<>/]+){end}\s*{_VALUES[0]}", listed)
    return found[1] if found else ""


def _around(pre: str, between: str | None, post: str, fields: dict[str, Any]) -> CallForm | None:
    """The form, from what stands before, between and behind calls."""
    inner = fields.pop("head", "")
    tail = fields.pop("tail", "")
    head = _common_end(pre, between) if between is not None else pre
    if between is None or head.strip() == pre.strip():
        begin, head = _split_json(pre.lstrip()) if fields["kind"] == "object" else _split(pre.lstrip())
        space = pre[: len(pre) - len(pre.lstrip())] if between is None else between[len(post.rstrip()) :]
        space = space[: len(space) - len(space.lstrip())]
        end, is_section = post.rstrip(), False
        if between is not None:
            end = _common_begin(end, between).rstrip() or end
        if fields["kind"] in ("tagged", "elements") and head.strip():
            own, end = _split_end(end)
            tail += own
        sep = space
    else:
        inside = between[: len(between) - len(head)]
        own = _common_begin(inside, post)
        begin, end, sep, is_section = pre[: len(pre) - len(head)].lstrip(), post[len(own) :], inside[len(own) :], True
        tail += own
    form = CallForm(
        "its own", begin=begin, end=end.rstrip(), is_section=is_section, head=head + inner, tail=tail, between=sep,
        **fields,
    )  # fmt: skip
    if ID in begin or (not begin and form.kind != "object"):
        return None
    return next((known for known in KNOWN.values() if _is_alike(known, form)), form)


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
    def squeezed(one: CallForm) -> list[str]:
        return ["".join(mark.split()) for mark in one.marks]

    alike = (known.kind, known.is_section, known.item) == (form.kind, form.is_section, form.item)
    return alike and squeezed(known) == squeezed(form)


def _common_begin(first: str, second: str) -> str:
    """The longest common beginning that cuts no mark."""
    return re.sub(r"(?:</?|\[)[^<>\[\]\s]*\Z", "", _shared(first, second))


def _common_end(first: str, second: str) -> str:
    """The longest common end that cuts no mark."""
    shared = _shared(first[::-1], second[::-1])[::-1]
    return re.sub(r"\A[^<\[\s]*[>\]]", "", shared)


def _shared(first: str, second: str) -> str:
    """The longest common beginning."""
    return "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
