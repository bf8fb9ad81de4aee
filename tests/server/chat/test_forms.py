"""How a model writes is found by asking its template: minimal templates, one for each form."""

import json
from typing import Any

import pytest

from kvloom.server.chat.events import TextDelta, ToolCallArguments, ToolCallStart
from kvloom.server.chat.form import KNOWN, ChatForm
from kvloom.server.chat.style import form_of
from kvloom.server.chat.tool_calls import make_parser
from kvloom.server.chat.tool_grammars import tool_grammar
from kvloom.server.chat.tool_prompt import call_text
from kvloom.server.chat.tools import Tool, ToolChoice
from tests.support.engine.grammars import accepts
from tests.support.models.templates import TemplateTokenizer

FRAME = (
    "{{% for m in messages %}}<r>{{{{ m.role }}}}</r>{{{{ m.content }}}}"
    "{{% if m.tool_calls %}}{calls}{{% endif %}}<e>{{% endfor %}}"
    "{{% if add_generation_prompt %}}<r>assistant</r>{{% endif %}}{{# tools #}}"
)
EACH = "{% for c in m.tool_calls %}<one>{% endfor %}"
NAME, JSON = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
LISTED = "<calls>[" + EACH + "]</calls>"
ITEMS = "{% for k, v in c.function.arguments.items() %}<item>{% endfor %}"
VALUE = "{{ v if v is string else v | tojson }}"
COMMA = "{{ ', ' if not loop.last }}"
TYPED = """<p n="{{ k }}" text="{{ 'yes' if v is string else 'no' }}">""" + VALUE + "</p>\n"
LINES = ITEMS.replace("<item>", "<p={{ k }}>\n" + VALUE + "\n</p>\n")
WORDS = ITEMS.replace("<item>", "{{ k }}={{ v | tojson }}" + COMMA)
FORMS: dict[str, str] = {
    "object": EACH.replace("<one>", f'\n<c>{{"name": "{NAME}", "arguments": {JSON}}}</c>'),
    "list": LISTED.replace("<one>", f'{{"name": "{NAME}", "arguments": {JSON}}}' + COMMA),
    "ids": LISTED.replace("<one>", f'{{"id": "{{{{ c.id }}}}", "name": "{NAME}", "parameters": {JSON}}}' + COMMA),
    "keyed": LISTED.replace("<one>", f'{{"{NAME}": {JSON}}}' + COMMA),
    "named": EACH.replace("<one>", f"[CALLS]{NAME}[ARGS]{JSON}"),
    "named with an id": EACH.replace("<one>", f"[CALLS]{NAME}[ID]{{{{ c.id }}}}[ARGS]{JSON}"),
    "section": f"<calls>{EACH}</calls>".replace("<one>", f"<call>f.{NAME}:{{{{ loop.index0 }}}}<args>{JSON}</call>"),
    "tagged": EACH.replace("<one>", f'\n<call>\n<f="{NAME}">\n{LINES}</f>\n</call>'),
    "tagged with types": f"<calls>\n{EACH}</calls>".replace(
        "<one>", f'<f n="{NAME}">\n' + ITEMS.replace("<item>", TYPED) + "</f>\n"
    ),
    "python": LISTED.replace("<one>", f"{NAME}({WORDS}){COMMA}"),
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
HARD = {"a": 'x "q" <b>\n</p> z', "n": 7}
PLAIN = {"a": "x", "n": 7}


def formed(calls: str) -> tuple[TemplateTokenizer, ChatForm]:
    tokenizer = TemplateTokenizer(FRAME.format(calls=calls))
    return tokenizer, form_of(tokenizer, True)


def written(tokenizer: TemplateTokenizer, *arguments: dict[str, Any], content: str = "") -> str:
    """An answer with calls of f, as the template shows it."""
    calls = [
        {"id": f"abcdefgh{index}", "type": "function", "function": {"name": "f", "arguments": one}}
        for index, one in enumerate(arguments)
    ]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content, "tool_calls": calls}]
    text = tokenizer.apply_chat_template(messages, tools=[{}], add_generation_prompt=False)
    return text.rpartition("<r>assistant</r>")[2].removesuffix("<e>")


def read(form: ChatForm, text: str, size: int) -> tuple[str, list[tuple[str, Any]]]:
    """The text and the calls of an answer that comes in pieces of `size` characters."""
    parser = make_parser(form.calls, {"f": SCHEMA}, form.hidden)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    events = [event for piece in pieces for event in parser.add(piece)] + parser.finish()
    told, calls = "", []
    for event in events:
        if isinstance(event, TextDelta):
            told += event.text
        elif isinstance(event, ToolCallStart):
            calls.append([event.name, ""])
        elif isinstance(event, ToolCallArguments):
            calls[event.index][1] += event.text
    return told, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("calls", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_what_a_template_shows_is_read_back(calls: str, size: int):
    tokenizer, form = formed(calls)
    assert form.found == "the template"
    assert read(form, written(tokenizer, HARD, PLAIN, content="So."), size) == ("So.", [("f", HARD), ("f", PLAIN)])
    assert read(form, written(tokenizer, HARD), size) == ("", [("f", HARD)])


@pytest.mark.parametrize("calls", FORMS.values(), ids=FORMS)
def test_the_grammar_accepts_what_the_template_shows(calls: str):
    tokenizer, form = formed(calls)
    grammar = tool_grammar(form.calls, [Tool("f", "", SCHEMA)], ToolChoice("required"), True, "")
    assert accepts(grammar, written(tokenizer, PLAIN).lstrip())
    assert accepts(grammar, written(tokenizer, PLAIN, {"a": "y"}).lstrip())
    assert not accepts(grammar, written(tokenizer, {"n": 7}).lstrip())


@pytest.mark.parametrize("calls", FORMS.values(), ids=FORMS)
def test_the_grammar_accepts_any_arguments_where_the_schema_names_none(calls: str):
    tokenizer, form = formed(calls)
    grammar = tool_grammar(form.calls, [Tool("f", "", {"type": "object"})], ToolChoice("required"), True, "")
    for arguments in (PLAIN, {}, {"o": {"k": [1]}}, {"n": 7, "b": "x y"}):
        assert accepts(grammar, written(tokenizer, arguments).lstrip()), arguments
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    grammar = tool_grammar(form.calls, [Tool("f", "", none)], ToolChoice("required"), True, "")
    assert accepts(grammar, written(tokenizer, {}).lstrip())
    assert not accepts(grammar, written(tokenizer, PLAIN).lstrip())


@pytest.mark.parametrize("name", KNOWN)
def test_a_tool_that_is_not_strict_has_any_arguments_beside_a_strict_one(name: str):
    tools = [Tool("f", "", SCHEMA, is_strict=True), Tool("g", "", SCHEMA)]
    grammar = tool_grammar(KNOWN[name], tools, ToolChoice("auto"), True, "")
    for call in ("g", {"a": "y", "n": 7, "o": {"k": [1]}}), ("g", {}), ("f", PLAIN):
        assert accepts(grammar, call_text(KNOWN[name], [call]))
    assert not accepts(grammar, call_text(KNOWN[name], [("f", {"n": 7})]))


def test_a_template_that_shows_no_call_is_known_by_a_mark_or_guessed():
    _, form = formed("")
    assert (form.calls.name, form.found) == ("hermes", "a guess")
    _, form = formed("{# <minimax:tool_call> #}")
    assert (form.calls.name, form.found) == ("minimax_m2", "a mark in the template")
    _, form = formed("{# <tool_call> <function=NAME> #}")
    assert (form.calls.name, form.found) == ("qwen3_coder", "a mark in the template")


@pytest.mark.parametrize(
    ("mark", "name"),
    [
        ("{# List of tools: [ #}", "pythonic"),
        ("{# <|tool_list_start|> #}", "pythonic"),
        ("{# write '<|tool_call|>' followed by a JSON list #}", "granite"),
        ("{# <|open|> open_tag('tools') #}", "kimi_k3"),
    ],
)
def test_calls_that_cannot_be_asked_for_are_known_by_a_mark(mark: str, name: str):
    _, form = formed(mark)
    assert (form.calls.name, form.found) == (name, "a mark in the template")


K3 = (
    '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>7<|close|>'
    'argument<|sep|><|open|>argument key="n" type="number"<|sep|>7<|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="f" index="2"<|sep|><|open|>json type="object"<|sep|>{"a": "y"}<|close|>json<|sep|><|close|>'
    "call<|sep|><|close|>tools<|sep|>"
)


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_tags_of_kimi_k3_are_read_and_written(size: int):
    _, form = formed("{# <|open|> open_tag('tools') #}")
    assert read(form, K3, size) == ("", [("f", {"a": "7", "n": 7}), ("f", {"a": "y"})])
    grammar = tool_grammar(form.calls, [Tool("f", "", SCHEMA)], ToolChoice("required"), True, "")
    one = K3.partition('<|open|>call tool="f" index="2"')[0]
    assert accepts(grammar, one + "<|close|>tools<|sep|>")
    assert not accepts(grammar, one.replace('key="a"', 'key="b"') + "<|close|>tools<|sep|>")


def test_the_marks_of_reasoning_are_those_that_the_template_shows():
    shown = FORMS["named"] + "{% endif %}{% if m.reasoning_content %}[WHY]{{ m.reasoning_content }}[/WHY]"
    _, form = formed(shown)
    assert form.thinking is not None
    assert (form.thinking.begin, form.thinking.end) == ("[WHY]", "[/WHY]")
    assert formed(FORMS["named"])[1].thinking is None


def test_reasoning_in_a_channel_begins_with_the_name_of_the_channel():
    shown = "{% endif %}{% if m.reasoning_content %}<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>"
    _, form = formed(FORMS["named"] + shown)
    assert form.thinking is not None
    assert (form.thinking.begin, form.thinking.end) == ("<|channel|>analysis<|message|>", "<|end|>")
