"""Calls whose marks are not all there, as models write them: read as what was meant, however they are cut."""

from typing import Any

import pytest

from kvloom.contract.request import Delta, FinishReason
from kvloom.server.chat.events import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from kvloom.server.chat.form import HERMES, KNOWN, THINK, CallForm
from kvloom.server.chat.output import ChatOutput
from kvloom.server.chat.reasoning import ReasoningSplitter
from kvloom.server.chat.tool_calls import ToolCall, make_parser

CODER = KNOWN["qwen3_coder"]
SCHEMAS: dict[str, Any] = {
    "fetch": {
        "type": "object",
        "properties": {
            "url": {"type": "string"},
            "path": {"type": "string"},
            "flag": {"type": "boolean"},
            "number": {"type": ["integer", "null"]},
            "more": {"type": "object"},
        },
    }
}


def read(text: str, form: CallForm = CODER, *, size: int = 1, thinks: bool = False, is_cut: bool = False) -> Any:
    """The text, the reasoning and the calls of an answer that comes in pieces of `size` characters."""
    reasoning = ReasoningSplitter(True, THINK, (), ToolCall(form, SCHEMAS)) if thinks else None
    output = ChatOutput(reasoning, make_parser(form, SCHEMAS))
    deltas = [Delta("r", text=text[at : at + size], token_ids=(1,)) for at in range(0, len(text), size)]
    last = Delta("r", finish_reason=FinishReason.LENGTH if is_cut else FinishReason.EOS)
    events = [event for delta in (*deltas, last) for event in output.add(delta)]
    said = "".join(event.text for event in events if isinstance(event, TextDelta))
    why = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    calls = [[event.name, ""] for event in events if isinstance(event, ToolCallStart)]
    for event in events:
        if isinstance(event, ToolCallArguments):
            calls[event.index][1] += event.text
    return said, why, [tuple(call) for call in calls]


def reads(text: str, form: CallForm = CODER, **how: Any) -> Any:
    found = read(text, form, **how)
    assert all(read(text, form, size=size, **how) == found for size in (2, 7, len(text)))
    return found


def argument(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def call(arguments: str, end: str = "</function>\n</tool_call>") -> str:
    return f"<tool_call>\n<function=fetch>\n{arguments}{end}"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (
            call(argument("flag", "True") + argument("number", "None") + argument("more", "{'a': None, 'b': [1]}")),
            '{"flag": true, "number": null, "more": {"a": null, "b": [1]}}',
        ),
        (call(argument("url", "return '</parameter>'")), """{"url": "return '</parameter>'"}"""),
        (call(argument("url", "u"), "</tool_call>"), '{"url": "u"}'),
        (call("<parameter=url>\nu\n"), '{"url": "u"}'),
        (call("<parameter=url>\nu\n", "</tool_call>"), '{"url": "u"}'),
        (call(argument("url", "u"), ""), '{"url": "u"}'),
        (call("<parameter=url>\nu", ""), '{"url": "u"}'),
        (call("<parameter=url>\nu\n" + argument("path", "p")), '{"url": "u", "path": "p"}'),
        (call("<parameter=url>\nu\n" + argument("path", "p"), ""), '{"url": "u", "path": "p"}'),
        (call("<parameter=url>\nu\n<parameter=path>\np\n", ""), '{"url": "u", "path": "p"}'),
        (call("<parameter=url>\nu\n" + argument("path", "p"), "</tool_call>"), '{"url": "u", "path": "p"}'),
        (call(argument("url", "a\n<parameter=x>\nb")), '{"url": "a\\n<parameter=x>\\nb"}'),
        (
            call(argument("path", "p") + argument("url", "a\n<parameter=path>\nb")),
            '{"path": "p", "url": "a\\n<parameter=path>\\nb"}',
        ),
        (call("<parameter=ur", ""), "{}"),
    ],
)  # fmt: skip
def test_a_call_is_read_without_its_marks(text: str, arguments: str):
    assert reads(text) == ("", "", [("fetch", arguments)])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{{"name": "fetch", "arguments": {"more": {"a": {}}}}}', [("fetch", '{"more": {"a": {}}}')]),
        ('{ {"arguments": {"url": "u"}, "name": "fetch"} }', [("fetch", '{"url": "u"}')]),
        ('{{"name": "fetch"}}', [("fetch", "{}")]),
        ('{{{"name": "fetch"}}}', []),
        ('{"name": "fetch", {"arguments": {}}}', []),
    ],
)
def test_a_call_may_stand_in_a_second_pair_of_braces(text: str, calls: list[tuple[str, str]]):
    """The chat template of Qwen2.5-Coder-Instruct (September 2024) shows its form so, and the model copies it."""
    said, _, found = reads(f"<tool_call>\n{text}\n</tool_call>", HERMES)
    assert found == calls
    assert bool(said) != bool(calls)


def test_a_cut_call_has_the_arguments_that_are_whole():
    assert reads(call(argument("url", "u") + "<parameter=number>\n12", ""), is_cut=True)[2] == [
        ("fetch", '{"url": "u"}')
    ]
    assert reads(call("<parameter=url>\nu\n</tool_call>", ""), is_cut=True)[2] == [("fetch", '{"url": "u"}')]


def test_what_follows_a_call_without_its_end_is_read_too():
    first = call(argument("url", "u"), "</tool_call>")
    assert reads(f"{first}\n{call(argument('path', 'p'))}") == (
        "", "", [("fetch", '{"url": "u"}'), ("fetch", '{"path": "p"}')],
    )  # fmt: skip
    assert reads(f"{first} Done.") == ("Done.", "", [("fetch", '{"url": "u"}')])
    bare = call("<parameter=url>\nu\n", "</tool_call>")
    assert reads(f"{bare} Done.") == ("Done.", "", [("fetch", '{"url": "u"}')])


def test_a_call_without_the_first_mark_is_one_if_a_tool_has_its_name():
    text = f"I look.\n\n{call(argument('url', 'u')).removeprefix('<tool_call>')}"
    assert reads(text) == ("I look.", "", [("fetch", '{"url": "u"}')])
    other = text.replace("fetch", "Fetch")
    assert reads(other) == (other, "", [])


@pytest.mark.parametrize("name", ["glm45", "minimax_m2", "seed_oss"])
def test_other_forms_are_read_without_their_ends(name: str):
    form = KNOWN[name]
    key = f"{form.key_begin}url{form.key_end}u{form.value_end}"
    text = f"{form.begin}{form.head}fetch{form.mid}{key}"
    assert reads(text, form)[2] == [("fetch", '{"url": "u"}')]
    assert reads(text + form.end, form) == ("", "", [("fetch", '{"url": "u"}')])


HERMES_CALL = '<tool_call>\n{"name": "fetch", "arguments": {"url": "u"}}\n</tool_call>'
OTHER_CALL = HERMES_CALL.replace("fetch", "other")


@pytest.mark.parametrize("text", [HERMES_CALL, '<tool_call>\n{"name": "fetch", "arguments": {"url": "u'])
def test_a_call_that_the_answer_ends_with_ends_the_reasoning(text: str):
    assert reads(f"I should look.\n{text}", HERMES, thinks=True) == ("", "I should look.", [("fetch", '{"url": "u"}')])
    musing = "Maybe <tool_call> or <tool_call>{}? "
    found = reads(f"{musing}\n{text}", HERMES, thinks=True)
    assert found == ("", musing.rstrip(), [("fetch", '{"url": "u"}')])
    coder = call(argument("url", "u"))
    assert reads(f"So.\n\n{coder}", thinks=True) == ("", "So.", [("fetch", '{"url": "u"}')])


@pytest.mark.parametrize(
    "why",
    [HERMES_CALL, f"{HERMES_CALL} may work", OTHER_CALL, "x <tool_call> y", "<tool_call>" + "{" * 600],
)
def test_what_the_reasoning_says_of_calls_is_reasoning_if_it_ends_itself(why: str):
    assert reads(f"{why}\n</think>\n\nDone.", HERMES, thinks=True) == ("Done.", why, [])


@pytest.mark.parametrize("why", [OTHER_CALL, "x <tool_call> y", "x <tool_call>"])
def test_what_is_no_call_of_a_tool_ends_no_reasoning(why: str):
    assert reads(why, HERMES, thinks=True) == ("", why, [])


def test_a_call_in_reasoning_that_is_cut_is_reasoning():
    assert reads(HERMES_CALL, HERMES, thinks=True, is_cut=True) == ("", HERMES_CALL, [])


def test_reasoning_that_only_names_the_mark_goes_on_streaming():
    reasoning = ReasoningSplitter(True, THINK, (), ToolCall(HERMES, SCHEMAS))
    events = [event for char in "The mark <tool_call> is, well" for event in reasoning.add(char)]
    assert "".join(event.text for event in events) == "The mark <tool_call> is, well"
