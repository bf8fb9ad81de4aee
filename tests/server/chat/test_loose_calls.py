"""Calls where no grammar writes any, as in fenced blocks: those of strict tools are calls if they follow the schema."""

import json
import pickle
from typing import Any

import pytest

from kvloom.contract.request import Delta, FinishReason
from kvloom.contract.sampling import SamplingParams
from kvloom.server.chat.events import ToolCallArguments, ToolCallStart
from kvloom.server.chat.form import HERMES, LLAMA3, CallForm, ChatForm
from kvloom.server.chat.output import ChatOutput
from kvloom.server.chat.request import ChatAnswer, PreparedChat
from kvloom.server.chat.tools import Tool, ToolChoice

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 9},
        "n": {"type": "integer"},
        "o": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]},
        "l": {"type": "array", "items": {"$ref": "#/$defs/point"}},
    },
    "required": ["a", "n"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
            "required": ["x", "y"],
            "additionalProperties": False,
        }
    },
}
STRICT, LOOSE = Tool("f", "", SCHEMA, is_strict=True), Tool("g", "", SCHEMA)
POINT = {"y": 2, "x": 1.5}  # in another order than the schema's


def fenced(arguments: Any, name: str = "f", indent: int | None = None) -> str:
    return f"```json\n{json.dumps({'name': name, 'arguments': arguments}, indent=indent)}\n```"


def answer(
    text: str, size: int = 1000, end: FinishReason = FinishReason.EOS, form: CallForm = HERMES, **chat: Any
) -> ChatAnswer:
    output = PreparedChat(
        (), SamplingParams(), ChatForm(form), (STRICT, LOOSE), ToolChoice("auto"), True, False, **chat
    ).output()
    found = ChatAnswer()
    for at in range(0, len(text), size):
        for event in output.add(Delta("r", text[at : at + size], (1,))):
            found.add(event)
    for event in output.add(Delta("r", finish_reason=end)):
        found.add(event)
    return found


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    "arguments",
    [
        {"a": "x", "n": 1},
        {"n": 1, "a": 'é "\n\u2028'},
        {"n": 1, "a": "x", "o": POINT, "l": [POINT, {"x": -1, "y": 1e9}]},
        {"a": "", "n": 0, "o": None, "l": []},
    ],
)
def test_arguments_that_follow_the_schema_make_a_call(arguments: Any, indent: int | None, size: int):
    found = answer(f"So.\n{fenced(arguments, indent=indent)}\nDone.", size)
    assert [(name, json.loads(text)) for name, text in found.calls] == [("f", arguments)]
    assert found.text == "So.Done."


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    "arguments",
    [
        {"a": "x"},
        {"a": "x", "n": "1"},
        {"a": "x", "n": 1.5},
        {"a": "x" * 10, "n": 1},
        {"a": "x", "n": 1, "b": 1},
        {"a": "x", "n": 1, "o": {"x": 1}},
        {"a": "x", "n": 1, "l": [{**POINT, "z": 0}]},
        {"a": "\ud83d", "n": 1},
        {"a": "x", "n": float("inf")},
    ],
)
def test_others_stay_text(arguments: Any, size: int):
    text = f"So.\n{fenced(arguments)}\nDone."
    found = answer(text, size)
    assert (found.text, found.calls) == (text, [])


def test_only_tools_that_are_strict_are_held_to_their_schemas():
    found = answer(f"{fenced({'a': 'x'}, 'g')}\n{fenced({'a': 'x', 'n': 1})}")
    assert [name for name, _ in found.calls] == ["g", "f"]
    assert answer(fenced({"a": "x", "n": 1}), is_free=False).calls == []


def test_several_calls_in_one_block():
    call = {"name": "f", "arguments": {"a": "x", "n": 1}}
    for text in (json.dumps([call, call]), f"{json.dumps(call)}\n{json.dumps(call)}"):
        assert len(answer(f"```json\n{text}\n```").calls) == 2


def test_a_call_that_is_strict_is_told_when_it_is_whole_and_another_as_it_comes():
    told: dict[str, list[str]] = {}
    for name in ("f", "g"):
        output = PreparedChat(
            (), SamplingParams(), ChatForm(HERMES), (STRICT, LOOSE), ToolChoice("auto"), True, False
        ).output()
        events = output.add(Delta("r", f'```json\n{{"name": "{name}", "arguments": {{"a": "x", "n": ', (1,)))
        told[name] = [type(event).__name__ for event in events]
        whole = output.add(Delta("r", "1}}\n```", (1,)))
        assert isinstance(whole[-1], ToolCallArguments)
    assert told == {"f": [], "g": [ToolCallStart.__name__, ToolCallArguments.__name__]}


def test_a_strict_call_that_is_cut_is_neither_a_call_nor_text():
    text = fenced({"a": "x", "n": 1})
    for end in range(len("```json"), len(text) - len("\n```") - 1):
        found = answer(f"So.\n{text[:end]}", end=FinishReason.LENGTH)
        assert (found.text.rstrip(), found.calls) == ("So.", []), text[:end]
        assert answer(text[:end]).text == text[:end]  # the model ended it so


def test_a_reader_goes_to_another_process():
    output = PreparedChat(
        (), SamplingParams(), ChatForm(HERMES), (STRICT, LOOSE), ToolChoice("auto"), True, False
    ).output()
    sent: ChatOutput = pickle.loads(pickle.dumps(output))
    text = fenced({"a": "x", "n": 1})
    assert sent.add(Delta("r", text, (1,), finish_reason=FinishReason.EOS))[0] == ToolCallStart(0, "f")


def test_deep_arguments_stay_text():
    text = '```json\n{"name": "f", "arguments": ' + '{"o": ' * 3000 + "1" + "}" * 3000 + "}\n```"
    assert answer(text) == ChatAnswer(text)


def test_calls_behind_a_text_are_held_to_schemas_too_where_they_have_no_mark():
    for arguments, is_call in (({"n": 1, "a": "x"}, True), ({"a": "x"}, False)):
        text = json.dumps({"name": "f", "parameters": arguments})
        found = answer(f"So.\n{text}", form=LLAMA3)
        assert (len(found.calls), found.text) == ((1, "So.") if is_call else (0, f"So.\n{text}"))
