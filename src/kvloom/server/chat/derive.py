"""Finds how a model writes by rendering conversations that are known, and reading where their parts stand. Pure.

The texts below stand for parts of a conversation; no template contains them.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.call_marks import IDS, KEYS, LAST, NAMES, VALUES, common_begin, common_end, form_in
from kvloom.server.chat.form import CDATA_BEGIN, MARK, CallForm, Thinking

# (messages, tools, whether the answer's beginning is added) -> prompt. Raises BadRequest where the template refuses
Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], bool], str]

_USER, _TEXT, _WHY = "Qkvl", "Zkvltext", "Zkvlwhy"
_ARGUMENTS = dict(zip(KEYS, VALUES, strict=True))
_LISTED = {KEYS[0]: [VALUES[0]]}
# a value of each type, under keys that are not in their order
_TYPED: Mapping[str, Any] = {
    "kvlkz": {"k": True},
    "kvlky": [True],
    "kvlkx": True,
    "kvlkw": None,
    "kvlkv": f"{VALUES[0]}<",
}
_TYPES = {"kvlkz": "object", "kvlky": "array", "kvlkx": "boolean", "kvlkw": "null"}
_CHANNEL = r"<\|channel\|>\w+(?=<\|message\|>)"  # gpt-oss: what follows is reasoning, by the channel's name
PARTS = "parts"  # reasoning as a part of the content, of the type "thinking"
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking", "thought", "tool_plan", PARTS)
_SCHEMA = {
    "type": "object",
    "properties": {
        KEYS[0]: {"type": "string", "description": "a"},
        KEYS[1]: {"type": "integer", "description": "b"},
    },
    "required": list(KEYS),
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "does", "parameters": _SCHEMA}} for name in NAMES
]
_ASKED = {"role": "user", "content": _USER}


def _call(index: int, is_text: bool, arguments: Mapping[str, Any] = _ARGUMENTS) -> dict[str, Any]:
    given: Any = json.dumps(arguments) if is_text else arguments
    return {
        "id": IDS[index], "type": "function", "function": {"name": NAMES[index], "arguments": given},
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
    ends = re.findall(MARK, answer.rpartition(end)[2]) if end and end in answer else re.findall(rf"{LAST}\s*\Z", answer)
    opening = re.findall(rf"{MARK}\w*", before)
    marks = [*opening, *last, *(one.strip() for one in ends)]
    return Around(before.strip() if opening else "", tuple(dict.fromkeys(marks)))


def calls_of(render: Render, end_of_reasoning: str = "") -> CallForm | None:
    """The form of calls; None where the template shows none, or none in a form that is read here."""
    for is_text in (False, True):
        for count in (2, 1):
            text = _called(render, count, is_text)
            if text is None or NAMES[0] not in text or KEYS[0] not in text:
                continue
            before, is_there, rest = text.partition(end_of_reasoning) if end_of_reasoning else ("", "", "")
            if is_there and NAMES[0] not in before:
                text = rest
            form = form_in(text, _end(render), _called(render, 1, is_text, _LISTED) or "")
            if form is not None and form.kind in ("tagged", "python") and not is_text:
                return _spelt(form, _called(render, 1, False, _TYPED) or "")
            return form
    return None


def _spelt(form: CallForm, text: str) -> CallForm:
    """The form with how it writes values and in which order. `text`: a call with arguments of all types."""
    places = sorted((at, key) for key in _TYPED if (at := text.find(key)) >= 0)
    ends = [*(at for at, _ in places[1:]), len(text)]
    values = {key: text[at:end] for (at, key), end in zip(places, ends, strict=True)}
    return replace(
        form,
        literals=tuple(type for key, type in _TYPES.items() if re.search("True|None", values.get(key, ""))),
        is_sorted=[key for _, key in places] == sorted(_TYPED),
        has_cdata=any(f"{CDATA_BEGIN}{VALUES[0]}<" in value for value in values.values()),
    )


def lead_of_calls(render: Render, calls: CallForm, end_of_reasoning: str = "") -> str:
    """What stands before the first call of an answer that is nothing else, behind its reasoning."""
    text = _called(render, 1, False) or _called(render, 1, True) or ""
    begin = calls.begin or calls.head
    at = text.find(begin.strip()) if begin.strip() else -1
    before = text[: max(at, 0)]
    return before.rpartition(end_of_reasoning)[2] if end_of_reasoning else before


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
        text = text[: len(text) - len(common_end(text, begin))]  # the template always adds the answer's beginning
    if text.startswith(begin):
        return text[len(begin) :]
    content = asked["content"]
    shared = max(len(common_begin(text, begin)), len(common_begin(text, other)), text.find(content) + len(content))
    return text[shared:]


def _end(render: Render) -> str:
    """What ends an answer."""
    text = _answer(render, {"role": "assistant", "content": _TEXT}, TOOLS) or ""
    return text.rpartition(_TEXT)[2] if _TEXT in text else ""
