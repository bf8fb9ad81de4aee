"""Conversations that protocols allow and a chat template does not: shown by the turns that it has."""

import re
from dataclasses import replace
from typing import Any

import pytest

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.form import HERMES, KNOWN
from kvloom.server.chat.showing import as_shown
from kvloom.server.chat.style import form_of
from kvloom.server.chat.tool_prompt import call_text
from kvloom.server.serving.notes import noting
from tests.support.models.templates import TemplateTokenizer
from tests.support.servers import MODEL, fake_server

CALLS = "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"
TURN = "{{ m.role[0] }}:{{ m.content }}" + CALLS + ";"
SHOWN = "{% for m in messages %}" + TURN + "{% endfor %}{# tools #}"
SILENT = (
    "{% for m in messages if m.role in ('system', 'user', 'assistant', 'tool') %}" + TURN + "{% endfor %}{# tools #}"
)
FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    + TURN
    + "{% endfor %}{# tools #}"
)
FRONT = (
    "{% for m in messages if m.role == 'system' %}"
    + TURN
    + "{% endfor %}"
    + SHOWN.replace("in messages", "in messages if m.role != 'system'")
)
DEVELOPER = FIRST.replace("m.role == 'system' and not loop.first", "m.role == 'system'")
GEMMA = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
)
MISTRAL = (
    "{% set ns = namespace(at=0) %}"
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}{% for m in rest %}"
    "{% if not (m.role == 'tool' or m.tool_calls is defined) %}"
    "{% if (m.role == 'user') != (ns.at % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{% set ns.at = ns.at + 1 %}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{% endfor %}"
    "{% if m.role == 'tool' and m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    "{% if m.role == 'user' %}{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}, {% endif %}"
    "u:{{ m.content }};{% elif m.tool_calls is defined %}a:" + CALLS + ";{% else %}" + TURN + "{% endif %}{% endfor %}"
    "{# tools #}"
)
LLAMA = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one') }}"
    "{% endif %}a:" + CALLS + ";{% else %}" + TURN + "{% endif %}{% endfor %}{# tools #}"
)
ITEMS = SHOWN.replace(
    "{{ c.function.arguments | tojson }}", "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}"
)
TEXTS = SHOWN.replace("{{ c.function.arguments | tojson }}", "{{ c.function.arguments + '' }}")
PRINTED = SHOWN.replace("{{ c.function.arguments | tojson }}", "{{ c.function.arguments }}")
NO_CALLS = SHOWN.replace(CALLS, "")
NO_RESULTS = SHOWN.replace("in messages", "in messages if m.role != 'tool'")
PARTS = SHOWN.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
WITHIN = (
    "{% for m in messages %}{{ m.role }}:"
    + CALLS
    + "{% for r in m.tool_responses or [] %}[{{ r.name }} {{ r.response }}]"
    "{% endfor %}{{ m.content }};{% endfor %}{# tools #}"
)  # shows the role tool as any role

BEGIN, END = "<tool_call>\n<function=f>\n<parameter=", "\n</function>\n</tool_call>"
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
RULE, ASKED, DONE = ("system", "S"), ("user", "Q"), ("assistant", "A")
LATER, AGAIN, MORE, DEV = ("system", "L"), ("user", "R"), ("assistant", "B"), ("developer", "D")


def said(turn: Any) -> dict[str, Any]:
    return turn if isinstance(turn, dict) else {"role": turn[0], "content": turn[1]}


def called(*arguments: Any, text: str = "", **more: Any) -> dict[str, Any]:
    calls = [
        {"id": f"call_{at}", "type": "function", "function": {"name": "f", "arguments": each}}
        for at, each in enumerate(arguments)
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls, **more}


def result(at: int) -> dict[str, Any]:
    return {"role": "tool", "content": f"T{at}", "tool_call_id": f"call_{at}"}


def prompt(template: str, turns: list[Any], tools: list[Any] | None = None) -> str:
    tokenizer = TemplateTokenizer(template)
    shown = tools if tools is not None else [TOOL] if any(isinstance(turn, dict) for turn in turns) else []
    messages, known = as_shown(tokenizer, form_of(tokenizer, bool(shown)), list(map(said, turns)), shown, "messages")
    if template == PARTS:
        messages = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
    return tokenizer.apply_chat_template(messages, tools=known or None)


@pytest.mark.parametrize(
    ("template", "turns", "text"),
    [
        (SHOWN, [DEV, ASKED], "s:D;u:Q;"),
        (SILENT, [DEV, ASKED], "s:D;u:Q;"),
        (FIRST, [DEV, ASKED], "s:D;u:Q;"),
        (FIRST, [RULE, DEV, ASKED], "s:S\n\nD;u:Q;"),
        (GEMMA, [DEV, ASKED], "u:D\n\nQ;"),
        (DEVELOPER, [RULE, ASKED], "u:S\n\nQ;"),
        (DEVELOPER, [DEV, ASKED], "d:D;u:Q;"),
        (SHOWN, [RULE, ASKED, LATER], "s:S;u:Q;s:L;"),
        (FIRST, [RULE, ASKED, LATER], "s:S;u:Q;u:L;"),
        (FIRST, [RULE, ASKED, DONE, LATER, AGAIN], "s:S;u:Q;a:A;u:L\n\nR;"),
        (FIRST, [ASKED, LATER, DONE], "u:Q;u:L;a:A;"),
        (FRONT, [RULE, ASKED, DONE, LATER, AGAIN], "s:S;u:Q;a:A;u:L\n\nR;"),
        (GEMMA, [RULE, ASKED, LATER], "u:S\n\nQ\n\nL;"),
        (GEMMA, [RULE], "u:S;"),
        (GEMMA, [RULE, ("user", "")], "u:S;"),
        (MISTRAL, [RULE, ASKED, LATER], "S, u:Q\n\nL;"),
        (MISTRAL, [RULE, ASKED, DONE, AGAIN], "u:Q;a:A;S, u:R;"),
        (MISTRAL, [RULE, ASKED, DONE], "u:S\n\nQ;a:A;"),
        (SHOWN, [ASKED, AGAIN], "u:Q;u:R;"),
        (GEMMA, [ASKED, AGAIN, DONE, MORE], "u:Q\n\nR;a:A\n\nB;"),
        (SHOWN, [DONE, ASKED], "a:A;u:Q;"),
        (GEMMA, [DONE, ASKED], "u:;a:A;u:Q;"),
        (MISTRAL, [RULE, DONE, ASKED], "u:;a:A;S, u:Q;"),
        (GEMMA, [ASKED, {**said(DONE), "tool_calls": []}, AGAIN], "u:Q;a:A;u:R;"),
        (LLAMA, [ASKED, {**said(DONE), "tool_calls": []}, AGAIN], "u:Q;a:A;u:R;"),
        (MISTRAL, [ASKED, {**said(DONE), "tool_calls": None}, AGAIN], "u:Q;a:A;u:R;"),
    ],
)  # fmt: skip
def test_turns_that_a_template_lacks_are_said_in_those_that_it_has(template: str, turns: list[Any], text: str):
    assert prompt(template, turns, []) == text


TWO = [ASKED, called('{"k": 1}', '{"k": 2}'), result(0), result(1)]


@pytest.mark.parametrize(
    ("template", "turns", "text"),
    [
        (SHOWN, TWO, 'u:Q;a:<f {"k": 1}><f {"k": 2}>;t:T0;t:T1;'),
        (LLAMA, TWO, 'u:Q;a:<f {"k": 1}>;t:T0;a:<f {"k": 2}>;t:T1;'),
        (LLAMA, [ASKED, called('{"k": 1}', "{}"), result(1), AGAIN], 'u:Q;a:<f {"k": 1}>;t:T1;a:<f {}>;u:R;'),
        (LLAMA, [*TWO, result(1)], 'u:Q;a:<f {"k": 1}>;t:T0;a:<f {"k": 2}>;t:T1;t:T1;'),
        (LLAMA, [ASKED, called("{}", text="X"), result(0)], "u:Q;a:X;a:<f {}>;t:T0;"),
        (SHOWN, [ASKED, called("{}", text="X"), result(0)], "u:Q;a:X<f {}>;t:T0;"),
        (MISTRAL, [RULE, ASKED, called("{}"), result(0), AGAIN], "u:S\n\nQ;a:<f {}>;t:T0\n\nR;"),
        (MISTRAL, [ASKED, called("{}"), result(0), DONE, AGAIN], "u:Q;a:<f {}>;t:T0;a:A;u:R;"),
        (MISTRAL, [ASKED, called("{}"), called('{"k": 1}'), result(0)], 'u:Q;a:<f {}><f {"k": 1}>;t:T0;'),
        (ITEMS, [ASKED, called('{"k": 1}'), result(0)], "u:Q;a:<f k=1>;t:T0;"),
        (ITEMS, [ASKED, called('{"k": "cu'), result(0)], 'u:Q;a:<f arguments={"k": "cu>;t:T0;'),
        (ITEMS, [ASKED, called(None), result(0)], "u:Q;a:<f >;t:T0;"),
        (TEXTS, [ASKED, called({"k": "é"}), result(0)], 'u:Q;a:<f {"k": "é"}>;t:T0;'),
        (TEXTS, [ASKED, called('{"k":1}'), result(0)], 'u:Q;a:<f {"k":1}>;t:T0;'),
        (TEXTS, [ASKED, called('{"k": "cu'), result(0)], 'u:Q;a:<f {"k": "cu>;t:T0;'),
        (PRINTED, [ASKED, called('{"k": true}'), result(0)], 'u:Q;a:<f {"k": true}>;t:T0;'),
        (NO_RESULTS, [ASKED, called("{}"), result(0)], "u:Q;a:<f {}>;u:<tool_response>\nT0\n</tool_response>;"),
        (
            NO_CALLS, [ASKED, called('{"k": 1}'), result(0), result(1)],
            'u:Q;a:<tool_call>\n{"name": "f", "arguments": {"k": 1}}\n</tool_call>;'
            "u:<tool_response>\nT0\n</tool_response>\n<tool_response>\nT1\n</tool_response>;",
        ),
        (WITHIN, [ASKED, called("{}"), result(0)], "user:Q;assistant:<f {}>[f T0];"),
        (WITHIN, [ASKED, called("{}"), result(0), DONE, AGAIN], "user:Q;assistant:<f {}>[f T0]A;user:R;"),
        (WITHIN, [*TWO[:2], result(1), result(0)], 'user:Q;assistant:<f {"k": 1}><f {"k": 2}>[f T1][f T0];'),
        (WITHIN, [ASKED, called("{}", text="X"), result(0)], "user:Q;assistant:X;assistant:<f {}>[f T0];"),
        (
            WITHIN, [ASKED, called("{}"), result(0), called("{}"), result(0), DONE, MORE],
            "user:Q;assistant:<f {}>[f T0];assistant:<f {}>[f T0]A;assistant:B;",
        ),
        (WITHIN.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}"), [ASKED, called("{}"), result(0)],
         "user:Q;assistant:<f {}>[f T0];"),
        (PARTS, [RULE, ASKED, called('{"k": 1}'), result(0)], 's:S;u:Q;a:<f {"k": 1}>;t:T0;'),
    ],
)  # fmt: skip
def test_calls_that_a_template_does_not_take_are_shown_as_it_takes_them(template: str, turns: list[Any], text: str):
    assert prompt(template, turns) == text


def test_results_in_the_message_that_calls_have_the_name_of_their_call():
    calls = called("{}", "{}")
    calls["tool_calls"][1]["function"]["name"] = "g"
    no_id = {"role": "tool", "content": "T"}
    assert prompt(WITHIN, [ASKED, calls, result(1), result(0)]).endswith("[g T1][f T0];")
    assert prompt(WITHIN, [ASKED, calls, no_id, no_id]).endswith("[f T][g T];")
    assert prompt(WITHIN, [ASKED, calls, result(0), result(1), {**no_id, "name": "h"}]).endswith("[f T0][g T1][h T];")


def test_a_template_that_takes_ids_of_nine_letters_alone_gets_such():
    own = MISTRAL.replace(TURN, "{{ m.tool_call_id }}" + TURN).replace("<{{ c.function.name }}", "<{{ c.id }}")
    text = prompt(own, [ASKED, called("{}", "{}"), result(0), result(1)])
    first, second, *results = re.findall(r"[0-9a-f]{9}", text)
    assert results == [first, second]
    assert first != second
    without = [ASKED, called("{}", "{}"), result(0), result(1)]
    for message in without[1:]:
        message.pop("tool_call_id", None)
        for call in message.get("tool_calls", ()):
            del call["id"]
    first, second, *results = re.findall(r"[0-9a-f]{9}", prompt(own, without))
    assert results == [first, second]
    kept = [ASKED, called("{}"), {**result(0), "tool_call_id": "abcdefghi"}, {"role": "tool", "content": "T"}]
    kept[1]["tool_calls"][0]["id"] = "abcdefghi"
    assert prompt(own, kept).count("abcdefghi") == 2


def test_a_text_that_the_template_leaves_out_beside_calls_is_told():
    with noting() as notes:
        assert prompt(MISTRAL, [ASKED, called("{}", text="X"), result(0)]) == "u:Q;a:<f {}>;t:T0;"
    assert notes == ["messages[1].content is beside tool calls, where the model's chat template leaves it out"]


def test_reasoning_of_neighbours_is_joined():
    kept = "{% for m in messages %}{{ m.reasoning }}" + TURN + "{% endfor %}"
    turns = [ASKED, *({**said(turn), "reasoning": f"W{turn[1]}"} for turn in (DONE, MORE))]
    alternating = GEMMA.replace("{{ m.role[0] }}", "{{ m.reasoning }}{{ m.role[0] }}")
    assert prompt(alternating, turns, []) == "u:Q;WA\n\nWBa:A\n\nB;"
    assert prompt(kept, turns, []) == "u:Q;WAa:A;WBa:B;"


def test_a_role_that_a_template_shows_nowhere_is_a_400():
    with pytest.raises(BadRequest) as error:
        prompt(SILENT, [ASKED, ("critic", "C")])
    assert str(error.value) == (
        "messages: hold one of the role 'critic', which the model's chat template does not show"
    )
    assert prompt(SHOWN, [ASKED, ("critic", "C")]) == "u:Q;c:C;"


def test_what_a_template_refuses_altogether_is_its_own_error():
    with pytest.raises(BadRequest, match="refuses them: no"):
        prompt("{{ raise_exception('no') }}{# tools #}", [RULE, ASKED, called("{}"), result(0)])


def test_tools_of_a_template_without_them_and_without_a_system_are_told_by_the_first_user():
    text = prompt(GEMMA, [ASKED, called("{}"), result(0), DONE, AGAIN])
    assert text.startswith("u:You can call functions.")
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert text.endswith(f"\n\nQ;a:{call};u:<tool_response>\nT0\n</tool_response>;a:A;u:R;")


@pytest.mark.parametrize(
    ("form", "arguments", "text"),
    [
        (HERMES, {"k": "v"}, '<tool_call>\n{"name": "f", "arguments": {"k": "v"}}\n</tool_call>'),
        (HERMES, '{"k', '<tool_call>\n{"name": "f", "arguments": "{\\"k"}\n</tool_call>'),
        (KNOWN["qwen3_coder"], {"k": "v", "n": 2}, f"{BEGIN}k>\nv\n</parameter>\n<parameter=n>\n2\n</parameter>{END}"),
        (KNOWN["qwen3_coder"], '{"k', BEGIN + 'arguments>\n{"k\n</parameter>' + END),
        (KNOWN["pythonic"], {"k": "v", "n": 2}, '<|tool_call_start|>[f(k="v", n=2)]<|tool_call_end|>'),
        (
            KNOWN["kimi_k2"], {},
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>",
        ),
    ],
)  # fmt: skip
def test_a_call_is_written_as_the_model_writes_it(form: Any, arguments: Any, text: str):
    assert call_text(form, [("f", arguments)]) == text


def test_quotes_and_kinds_of_values_have_the_marks_of_their_form():
    tagged = replace(KNOWN["qwen3_coder"], other_end="|json>\n")
    assert "<parameter=n|json>\n2" in call_text(tagged, [("f", {"n": 2, "k": "v"})])
    quoted = replace(KNOWN["pythonic"], quote="<q>")
    assert "(k=<q>v<q>, n=2)" in call_text(quoted, [("f", {"k": "v", "n": 2})])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [said(DEV), said(ASKED), said(AGAIN)]}),
        ("/v1/messages", {"system": "D", "messages": [said(ASKED), said(AGAIN)], "max_tokens": 4}),
        ("/v1/responses", {"input": [said(DEV), said(ASKED), said(AGAIN)]}),
        ("/api/chat", {"messages": [said(DEV), said(ASKED), said(AGAIN)], "stream": False}),
        ("/v1/messages/count_tokens", {"messages": [said(ASKED), said(("system", "D")), said(AGAIN)]}),
        ("/v1/responses/input_tokens", {"instructions": "D", "input": [said(ASKED), said(AGAIN)]}),
        ("/tokenize", {"messages": [said(DEV), said(ASKED), said(AGAIN)]}),
        ("/v1/chat/completions/render", {"messages": [said(DEV), said(ASKED), said(AGAIN)]}),
    ],
)
def test_every_dialect_folds(path: str, body: dict[str, Any]):
    with fake_server(tokenizer=TemplateTokenizer(GEMMA), max_seq_len=8192) as server:
        response = server.post(path, {"model": MODEL, **body})
    assert response.status_code == 200, response.text
    assert TemplateTokenizer.rendered[-1] in ("u:D\n\nQ\n\nR;", "u:Q\n\nD\n\nR;")


def test_tools_that_a_template_prints_say_nothing_about_arguments():
    style = form_of(TemplateTokenizer("{{ tools }}" + SHOWN), True)
    turns = [said(ASKED), called('{"k": 1}')]
    known, _ = as_shown(TemplateTokenizer("{{ tools }}" + SHOWN), style, turns, [TOOL], "messages")
    assert known[1]["tool_calls"][0]["function"]["arguments"] == {"k": 1}
