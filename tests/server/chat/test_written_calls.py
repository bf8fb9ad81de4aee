"""Calls that grammars write: those that templates show, whatever a value's type, and none that is read otherwise."""

import json
import random
from dataclasses import replace
from itertools import islice
from typing import Any

import jsonschema
import pytest

from kvloom.server.chat.events import TextDelta, ToolCallArguments, ToolCallStart
from kvloom.server.chat.form import CDATA_BEGIN, CDATA_END, ID, KNOWN, NAME, THINK, TYPE, CallForm, ChatForm
from kvloom.server.chat.style import form_of, led
from kvloom.server.chat.tool_calls import make_parser
from kvloom.server.chat.tool_grammars import tool_grammar
from kvloom.server.chat.tool_prompt import call_text
from kvloom.server.chat.tools import Tool, ToolChoice
from tests.server.chat.test_forms import COMMA, EACH, FRAME, ITEMS, LISTED
from tests.server.chat.test_forms import NAME as CALLED
from tests.support.engine.grammars import EOS_ID, accepts, make_guide
from tests.support.models.templates import TemplateTokenizer

OWN = (
    "{% macro one(v) %}{% if v is string %}<q>{{ v }}<q>{% elif v is boolean %}{{ 'true' if v else 'false' }}"
    "{% elif v is mapping %}{{ '{' }}{% for k, w in v | dictsort %}{{ k }}:{{ one(w) }}{{ ',' if not loop.last }}"
    "{% endfor %}{{ '}' }}{% elif v is sequence %}[{% for w in v %}{{ one(w) }}{{ ',' if not loop.last }}{% endfor %}]"
    "{% else %}{{ v }}{% endif %}{% endmacro %}"
)
CDATA = f"{{{{ '{CDATA_BEGIN}' + v + '{CDATA_END}' if v is string and ('<' in v or '\\n' in v) else v }}}}"
TAGGED = f"<call>{CALLED}{ITEMS.replace('<item>', '<k>{{ k }}</k><v>VALUE</v>')}</call>"
TEMPLATES = {
    "Python's values": EACH.replace("<one>", TAGGED.replace("VALUE", "{{ v if v is string else v | string }}")),
    "CDATA": EACH.replace("<one>", TAGGED.replace("VALUE", CDATA)),
    "JSON beside texts": EACH.replace("<one>", TAGGED.replace("VALUE", "{{ v if v is string else v | tojson }}")),
    "apostrophes": LISTED.replace(
        "<one>",
        CALLED
        + "("
        + ITEMS.replace("<item>", '{{ k }}={{ "\'" + v + "\'" if v is string else v }}' + COMMA)
        + ")"
        + COMMA,
    ),
    "quotes of its own": OWN
    + EACH.replace(
        "<one>",
        "<call>call:"
        + CALLED
        + "{{ '{' }}{% for k, v in c.function.arguments | dictsort %}{{ k }}:{{ one(v) }}{{ ',' if not loop.last }}"
        "{% endfor %}{{ '}' }}<end>",
    ),
}
SCHEMA = {
    "type": "object",
    "properties": {
        "z": {"type": "string"},
        "list": {"type": "array", "items": {"type": ["string", "boolean", "null"]}, "maxItems": 3},
        "object": {"$ref": "#/$defs/node"},
        "flag": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "one": {"enum": ["a b", 2, None]},
        "number": {"type": "number", "minimum": 0},
    },
    "required": ["z", "object"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"$ref": "#/$defs/node"}, "key": {"type": "string"}},
            "required": ["key"],
            "additionalProperties": False,
        }
    },
}
ARGUMENTS: dict[str, Any] = {
    "z": 'x "q" <b>\nit is </v> {',
    "list": ["s, t", True, None],
    "object": {"next": {"key": "it's"}, "key": "v"},
    "flag": False,
    "number": 1.5,
}


def formed(calls: str) -> tuple[TemplateTokenizer, CallForm]:
    tokenizer = TemplateTokenizer(FRAME.format(calls=calls))
    return tokenizer, led(form_of(tokenizer, True), "", False)


def shown(tokenizer: TemplateTokenizer, *arguments: dict[str, Any]) -> str:
    """Calls of f, as the template shows them."""
    calls = [{"id": f"abcdefgh{at}", "function": {"name": "f", "arguments": one}} for at, one in enumerate(arguments)]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    text = tokenizer.apply_chat_template(messages, tools=[{}], add_generation_prompt=False)
    return text.rpartition("<r>assistant</r>")[2].removesuffix("<e>")


def read(form: CallForm, text: str, schema: dict[str, Any], size: int = 3) -> tuple[str, list[tuple[str, Any]]]:
    """The text and the calls of an answer that comes in pieces of `size` characters."""
    parser = make_parser(form, {"f": schema}, ("<answer>", "</answer>"))
    events = [event for at in range(0, len(text), size) for event in parser.add(text[at : at + size])]
    told, calls = "", list[list[str]]()
    for event in [*events, *parser.finish()]:
        if isinstance(event, TextDelta):
            told += event.text
        elif isinstance(event, ToolCallStart):
            calls.append([event.name, ""])
        elif isinstance(event, ToolCallArguments):
            calls[event.index][1] += event.text
    return told, [(name, json.loads(arguments)) for name, arguments in calls]


def grammar_of(form: CallForm, schema: dict[str, Any], is_parallel: bool = False) -> str:
    return tool_grammar(form, [Tool("f", "", schema)], ToolChoice("required"), is_parallel, "")


@pytest.mark.parametrize("calls", TEMPLATES.values(), ids=TEMPLATES)
def test_values_of_each_type_are_written_as_the_template_shows_them(calls: str):
    tokenizer, form = formed(calls)
    both = shown(tokenizer, ARGUMENTS, {"z": "y", "object": {"key": ""}})
    assert accepts(grammar_of(form, SCHEMA, is_parallel=True), both)
    assert not accepts(grammar_of(form, SCHEMA), both)
    assert read(form, both, SCHEMA) == ("", [("f", ARGUMENTS), ("f", {"z": "y", "object": {"key": ""}})])
    wrong = {"list": [1], "number": -1, "flag": "x", "object": {}, "one": "c"}
    for arguments in ({"z": "y"}, {**ARGUMENTS, "list": ["a"] * 4}, *({**ARGUMENTS, key: wrong[key]} for key in wrong)):
        assert not accepts(grammar_of(form, SCHEMA), shown(tokenizer, arguments)), arguments


@pytest.mark.parametrize(("prompt", "lead"), [("hi", "<a></a>"), ("hi<a>", "</a>"), ("hi<a></a>", ""), ("<a", "></a>")])
def test_what_a_template_shows_before_calls_is_written_unless_the_prompt_has_it(prompt: str, lead: str):
    calls = replace(KNOWN["kimi_k3"], lead="<a></a>")
    style, text = ChatForm(calls), call_text(calls, [("f", ARGUMENTS)])
    grammar = grammar_of(led(style, prompt, False), SCHEMA)
    assert accepts(grammar, lead + text)
    assert not lead or not accepts(grammar, text)
    assert accepts(grammar_of(led(style, prompt, True), SCHEMA), "<a></a>" + text)


def test_white_space_between_marks_is_the_templates():
    line = EACH.replace("<one>", TAGGED.replace("VALUE", "{{ v }}").replace("call>", "tool_call>"))
    line = line.replace("k>", "arg_key>").replace("v>", "arg_value>")
    for calls in (line, line.replace("<arg_key>", "\n<arg_key>").replace("</tool_call>", "\n</tool_call>\n")):
        tokenizer, form = formed(calls)
        assert form.name == "glm45"
        assert accepts(grammar_of(form, SCHEMA), shown(tokenizer, {"z": "y", "object": {"key": ""}}).rstrip())


def test_a_string_of_json_in_a_call_of_pythons_has_the_escapes_of_json():
    text = r'<|tool_call_start|>[f(z="a\/\ud83d\ude00", object={"key": "\/"})]<|tool_call_end|>'
    assert read(KNOWN["pythonic"], text, SCHEMA) == ("", [("f", {"z": "a/\U0001f600", "object": {"key": "/"}})])


def test_the_mark_of_a_call_ends_reasoning_where_the_section_has_none():
    style = ChatForm(KNOWN["kimi_k2"], THINK, specials=("<|tool_call_begin|>",))
    assert style.breaks == ("<|tool_call_begin|>functions.",)


# -- what grammars accept is read back

OPEN = {"type": "object"}
NUMBERS = {"type": "object", "additionalProperties": {"type": "integer"}}
LISTED_FORM = replace(KNOWN["pythonic"], name="apostrophes", quote="'", literals=("array", "boolean", "null"))
WORDS = ("array", "object", "boolean", "null")
WALKED = {
    **KNOWN,
    "apostrophes": LISTED_FORM,
    "Python's values": replace(KNOWN["seed_oss"], literals=WORDS),
    "CDATA": replace(KNOWN["glm45"], has_cdata=True, literals=WORDS),
    "sorted": replace(KNOWN["gemma4"], is_sorted=True, literals=("null",)),
}
PIECES = ("'", '"', "',", "']", '",', "}", "]", "{", "[", "\n", " ", "\\", "<", "None", "true", "12", "it's", 'say "x"')


def walked(form: CallForm, grammar: str, dice: random.Random, num_wild: int = 150) -> str:
    """An answer that the grammar accepts, with marks of the form and other hard texts; "" = it does not end soon."""
    guide, text = make_guide(grammar), bytearray()
    marks = [form.begin, form.head, form.tail + form.end, form.value_end + form.key_begin, form.value_end + form.tail]
    marks += [form.quote, CDATA_BEGIN, CDATA_END, f"{form.value_end} {form.tail}", f"{form.key_begin}z{form.key_end}"]
    wild = [mark.replace(ID, "0").replace(TYPE, "number").replace(NAME, "f") for mark in marks if mark]
    tame = [
        form.value_end + form.tail,
        form.quote + form.tail,
        CDATA_END + form.value_end + form.tail,
        '"',
        "'",
        "}",
        "]",
    ]
    while (len(text) < 6 * num_wild and not guide.mask()[EOS_ID]) or (len(text) < num_wild and dice.random() < 0.7):
        is_wild = len(text) < num_wild
        piece = dice.choice([*wild, *PIECES] if is_wild else [one for one in tame if one]).encode()
        if not guide.mask()[piece[0]]:
            allowed = [byte for byte in range(128) if guide.mask()[byte]]
            printed = [byte for byte in allowed if byte >= 32] or allowed or [int(guide.mask().argmax())]
            if printed == [EOS_ID]:
                break
            piece = bytes([dice.choice(printed)])
        for byte in piece:
            if not guide.mask()[byte]:
                break
            guide.take(byte)
            text.append(byte)
    return text.decode() if guide.mask()[EOS_ID] else ""


@pytest.mark.parametrize("name", WALKED.keys() - {"minimax_m3"})
@pytest.mark.parametrize("schema", [SCHEMA, OPEN, NUMBERS], ids=["typed", "open", "numbers"])
def test_every_text_that_a_grammar_accepts_is_read_as_one_call_of_its_schema(name: str, schema: dict[str, Any]):
    form, dice = WALKED[name], random.Random(7)
    grammar = grammar_of(form, schema)
    texts = list(islice(filter(None, (walked(form, grammar, dice) for _ in range(60))), 3))
    assert len(texts) == 3
    for text in texts:
        told, calls = read(form, text, schema)
        assert (told, [name for name, _ in calls]) == ("", ["f"]), text
        jsonschema.validate(calls[0][1], schema)


@pytest.mark.parametrize("name", WALKED.keys() - {"minimax_m3"})
def test_calls_in_texts_are_written_and_read_as_they_were(name: str):
    form = WALKED[name]
    text = call_text(form, [("f", ARGUMENTS)])
    assert accepts(grammar_of(form, SCHEMA), text), text
    assert read(form, text, SCHEMA) == ("", [("f", ARGUMENTS)])
