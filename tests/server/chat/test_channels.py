"""Answers that are messages with headers (gpt-oss's channels and others like them): reasoning, text, calls."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.server.chat.channels import Begun, ChannelReader
from kvloom.server.chat.events import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from kvloom.server.chat.form import CHANNELS
from kvloom.server.chat.style import form_of, led
from kvloom.server.chat.tool_grammars import tool_grammar
from kvloom.server.chat.tools import Tool, ToolChoice
from tests.support.engine.grammars import accepts
from tests.support.models.templates import TemplateTokenizer

ROWS = {row.name: row for row in CHANNELS}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
SCHEMAS = {"f": SCHEMA, "g": {"type": "object"}}
WHY = "<|channel|>analysis<|message|> Hm. <|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
F_CALL = '{"a": "<|end|> x"}'
ATEM = (
    '<atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="a">x</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>"
)


def read(name: str, text: str, size: int, begun: Begun = "header", is_cut: bool = False) -> tuple[str, str, list[Any]]:
    """Reasoning, text and calls of an answer that comes in pieces of `size` characters."""
    reader = ChannelReader(ROWS[name], SCHEMAS, begun)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    events = [event for piece in pieces for event in reader.add(piece)] + reader.finish(is_cut)
    calls: list[Any] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            calls.append((event.name, ""))
        elif isinstance(event, ToolCallArguments):
            calls[event.index] = (calls[event.index][0], calls[event.index][1] + event.text)
    why = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    return why, "".join(event.text for event in events if isinstance(event, TextDelta)), calls


ANSWERS: dict[str, tuple[str, str, Begun, tuple[str, str, list[Any]]]] = {
    "final": ("harmony", f"{WHY}{NEXT}{FINAL}Yes.<|return|>", "header", ("Hm.", "Yes.", [])),
    "reasoning opened by the prompt": ("harmony", f"Hm.<|end|>{NEXT}{FINAL}Yes.", "reasoning", ("Hm.", "Yes.", [])),
    "recipient behind the role": (
        "harmony",
        f"{WHY}{NEXT} to=functions.f<|channel|>commentary json<|message|>{F_CALL}<|call|>",
        "header",
        ("Hm.", "", [("f", F_CALL)]),
    ),
    "recipient behind the channel": (
        "harmony",
        f"{WHY}{NEXT}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{F_CALL}<|call|>",
        "header",
        ("Hm.", "", [("f", F_CALL)]),
    ),
    "a call in the analysis channel": (
        "harmony",
        f"<|channel|>analysis to=functions.f code<|message|>{F_CALL}<|call|>",
        "header",
        ("", "", [("f", F_CALL)]),
    ),
    "a recipient that is a tool": (
        "harmony",
        "<|channel|>commentary to=g<|message|>{}<|call|>",
        "header",
        ("", "", [("g", "{}")]),
    ),
    "a recipient that is no tool": (
        "harmony",
        '<|channel|>commentary to=browser.search code<|message|>{"q": 1}<|call|>',
        "header",
        ("", '{"q": 1}', []),
    ),
    "a preamble, then a call": (
        "harmony",
        f"{WHY}{NEXT}<|channel|>commentary<|message|>I look.<|end|>"
        f"{NEXT} to=functions.g<|channel|>commentary json<|message|>{{}}",
        "header",
        ("Hm.", "I look.", [("g", "{}")]),
    ),
    "two calls": (
        "llm_jp",
        f" to=functions.g<|channel|>commentary <|constrain|> json<|message|>{{}}<|end|>{NEXT} to=functions.f"
        f"<|channel|>commentary <|constrain|> json<|message|>{F_CALL}<|call|>",
        "header",
        ("", "", [("g", "{}"), ("f", F_CALL)]),
    ),
    "no JSON": (
        "harmony",
        "<|channel|>commentary to=functions.f code<|message|>print(1)<|call|>",
        "header",
        ("", "<|channel|>commentary to=functions.f code<|message|>print(1)", []),
    ),
    "no header": ("harmony", "Yes, to=you.", "header", ("", "Yes, to=you.", [])),
    "text that goes on": ("harmony", "to=you<|return|>", "text", ("", "to=you", [])),
    "to itself, then XML": (
        "atem",
        f" to=self<|message|>Hm.<|eom|>{NEXT} to=f<|message|>{ATEM}<|eom|>{NEXT} to=user<|message|>So.<|eot|>",
        "header",
        ("Hm.", "So.", [("f", '{"a": "x"}')]),
    ),
    "text and calls by name": (
        "functionary_v3.2",
        'all\nSee >>> here.>>>f\n{"a": ">>>g"}>>>g\n{}',
        "header",
        ("", "See >>> here.", [("f", '{"a": ">>>g"}'), ("g", "{}")]),
    ),
    "a name that is no tool": ("functionary_v3.2", "h\n{}", "header", ("", "h\n{}", [])),
}


@pytest.mark.parametrize(("name", "text", "begun", "found"), ANSWERS.values(), ids=ANSWERS)
def test_messages_are_reasoning_text_or_calls(
    name: str, text: str, begun: Begun, found: tuple[str, str, list[tuple[str, str]]]
):
    for size in (1, 2, 5, 1000):
        assert read(name, text, size, begun) == found, size


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<|channel|>anal", ("", "", [])),
        (f"{WHY}{NEXT} to=functions.f<|channel|>commen", ("Hm.", "", [])),
        ("to=functions.f<|channel|>commentary json<|message|>", ("", "", [("f", "{}")])),
        ('to=functions.f<|channel|>commentary json<|message|>{"a": "x', ("", "", [("f", '{"a": "x"}')])),
        ("<|channel|>analysis<|message|>Hm", ("Hm", "", [])),
        ("<|channel|>analysis<|message|>Hm<|en", ("Hm", "", [])),
        ("<|channel|>final<|message|>a <|sta", ("", "a ", [])),
    ],
)
def test_an_answer_that_is_cut_leaks_no_header(text: str, found: tuple[str, str, list[Any]]):
    assert read("harmony", text, 3, is_cut=True) == found


def test_without_tools_nothing_is_a_call():
    reader = ChannelReader(ROWS["harmony"], {})
    events = reader.add('<|channel|>commentary to=functions.f json<|message|>{"a": 1}<|call|>') + reader.finish()
    assert events == [TextDelta('{"a": 1}')]


_PIECES = (
    "<|start|>assistant", "<|channel|>", "analysis", "final", "commentary", " to=functions.f", "<|message|>", "<|end|>",
    '{"a": ', '"x"}', "text", "\n", " ", "<|", ">>>", "all\n", "f\n", " to=self",
)  # fmt: skip


def test_spaces_behind_special_tokens_of_llm_jp_are_no_text():
    call = '<|start|> assistant to=functions.f<|channel|> commentary <|constrain|>  json<|message|> {"a": 1}'
    text = f"<|channel|> analysis<|message|> Hm.<|end|>{call}<|end|>{call}<|call|>"
    for size in (1, 3, 1000):
        assert read("llm_jp", text, size) == ("Hm.", "", [("f", '{"a": 1}')] * 2)


@pytest.mark.parametrize("name", ["harmony", "llm_jp"])
@pytest.mark.parametrize("text", ["<|<|message|>Hi", "to<|message|>Hi"])
def test_a_part_of_a_header_is_none(name: str, text: str):
    assert read(name, text, 1) == read(name, text, 1000) == ("", text, [])


@pytest.mark.parametrize("name", ROWS)
@given(pieces=st.lists(st.sampled_from(_PIECES), max_size=12), size=st.integers(1, 7))
def test_pieces_make_no_difference(name: str, pieces: list[str], size: int):
    text = "".join(pieces)
    assert read(name, text, size) == read(name, text, 1000)


TEMPLATES = {
    "harmony": "{# <|channel|> #}",
    "llm_jp": "{# <|constrain|> json #}",
    "atem": "{# to=self<|message|> #}",
    "functionary_v3.2": r"{# >>>all\n #}",
}
PROMPT = "{% if tools %}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}<|start|>assistant"


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_row_is_chosen_by_a_mark_of_the_template(name: str):
    template = TEMPLATES[name] + PROMPT + ("{# <|message|> #}" if name == "harmony" else "")
    form = form_of(TemplateTokenizer(template), True)
    assert form.channels is ROWS[name]
    assert (form.calls.name, form.found) == (name, "a mark in the template")


CALLED = {
    "harmony": " to=functions.f<|channel|>commentary json<|message|>{}",
    "llm_jp": " to=functions.f<|channel|>commentary <|constrain|> json<|message|>{}",
    "atem": ' to=f<|message|><atem:function_calls>\n<atem:invoke name="f">{}\n</atem:invoke>\n</atem:function_calls>',
    "functionary_v3.2": "f\n{}",
}
ARGUMENTS = {"atem": '\n<atem:parameter name="a">x</atem:parameter>'}
BETWEEN = {"llm_jp": "<|end|><|start|>assistant", "atem": "<|eom|><|start|>assistant", "functionary_v3.2": ">>>"}


@pytest.mark.parametrize("name", CALLED)
def test_grammars_write_headers(name: str):
    template = TEMPLATES[name] + PROMPT + ("{# <|message|> #}" if name == "harmony" else "")
    form, tools = form_of(TemplateTokenizer(template), True), [Tool("f", "", SCHEMA)]
    one = CALLED[name].format(ARGUMENTS.get(name, '{"a": "x"}'))
    for is_thinking in (False, True):
        calls = led(form, "<|start|>assistant", is_thinking)
        grammar = tool_grammar(calls, tools, ToolChoice("required"), True, "")
        lead = ROWS[name].start if is_thinking else ""
        assert accepts(grammar, lead + one)
        assert not accepts(grammar, lead + CALLED[name].format("{}" if name != "atem" else ""))
        assert accepts(grammar, lead + one + BETWEEN.get(name, "") + one) == (name != "harmony")
        free = tool_grammar(calls, [Tool("f", "", SCHEMA, is_strict=True)], ToolChoice("auto"), True, "")
        assert accepts(free, f"{lead}{ROWS[name].plain}{ROWS[name].body}Some text.")
        assert accepts(free, lead + one)
        assert not accepts(free, "Some text.")
