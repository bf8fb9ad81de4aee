"""Reasoning of earlier answers reaches the template under the name that it reads."""

from typing import Any

import pytest

from kvloom.server.chat.history import shapes_of
from kvloom.server.chat.style import form_of
from tests.support.models.templates import TemplateTokenizer
from tests.support.servers import MODEL, FakeServer, fake_server

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
LOOP = "{{%- for m in messages %}}{{{{ m.role }}}}:{}{{{{ m.content }}}};{{% endfor %}}{{# tools #}}"
CALL = (
    "{% for c in m.tool_calls or [] %}[CALL]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
)


def call(name: str, id: str = "", arguments: Any = "{}") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def rendered(template: str, messages: list[dict[str, Any]]) -> str:
    """The prompt of a conversation, over HTTP."""
    with fake_server(tokenizer=TemplateTokenizer(template)) as server:
        body = {"model": MODEL, "messages": messages, "tools": [TOOL], "max_tokens": 1}
        response = server.post("/v1/chat/completions", body)
        assert response.status_code == 200, response.text
    return TemplateTokenizer.rendered[-1]


ASKED = {"role": "user", "content": "hi"}
WHY = {
    "reasoning_content": "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}",
    "reasoning": "{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}",
    "thinking": "{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}",
    "thought": "{% if m.thought %}<think>{{ m.thought }}</think>{% endif %}",
}


@pytest.mark.parametrize("name", WHY)
def test_reasoning_comes_under_the_name_that_the_template_reads(name: str):
    form = form_of(TemplateTokenizer(LOOP.format(WHY[name])))
    assert form.kept == (name,)
    shape, _ = shapes_of(form.kept, [ASKED, {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}])
    assert shape[1] == {"role": "assistant", "content": "So.", name: "Hm."}


def test_reasoning_comes_as_a_part_where_the_template_reads_that():
    part = (
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{% if p.type == 'thinking' %}[THINK]{{ p.thinking }}[/THINK]{% else %}{{ p.text }}{% endif %}"
        "{% endfor %}{% endif %}"
    )
    form = form_of(TemplateTokenizer(LOOP.replace("{{{{ m.content }}}}", "{}").format("", part)))
    assert form.kept == ("parts",)
    shape, _ = shapes_of(form.kept, [{"role": "assistant", "content": "So.", "reasoning_content": "Hm."}])
    assert shape[0]["content"] == [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "So."}]


def test_reasoning_is_left_out_where_the_template_refuses_it_beside_a_text():
    refused = "{% if m.thinking and m.content and m.tool_calls %}{{ raise_exception('not both') }}{% endif %}"
    template = LOOP.format(refused + WHY["thinking"] + CALL)
    one = {"role": "assistant", "content": "So.", "tool_calls": [call("f")], "reasoning": "Hm."}
    assert rendered(template, [ASKED, one]) == "user:hi;assistant:[CALL]f[ARGS]{}So.;"
    assert "<think>Hm.</think>" in rendered(template, [ASKED, {**one, "content": ""}])


def test_what_the_template_says_to_the_best_shape_is_the_error():
    template = LOOP.format(CALL + "{% if m.content == 'no' %}{{ raise_exception('says no') }}{% endif %}")
    with fake_server(tokenizer=TemplateTokenizer(template)) as server:
        one = {"role": "assistant", "content": "no", "tool_calls": [call("f")]}
        response = server.post("/v1/chat/completions", {"model": MODEL, "messages": [ASKED, one]})
    assert response.status_code == 400
    assert response.json()["error"]["message"].endswith("refuses them: says no")


PAST = {
    "/v1/chat/completions": {"messages": [ASKED, {"role": "assistant", "content": "So.", "reasoning": "Hm."}, ASKED]},
    "/v1/responses": {
        "input": [
            ASKED,
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"role": "assistant", "content": "So."},
            ASKED,
        ]
    },
    "/v1/messages": {
        "messages": [
            ASKED,
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "So."}],
            },
            ASKED,
        ],
        "max_tokens": 1,
    },
    "/api/chat": {"messages": [ASKED, {"role": "assistant", "content": "So.", "thinking": "Hm."}, ASKED]},
}


@pytest.fixture(scope="module")
def keeping() -> Any:
    with fake_server(tokenizer=TemplateTokenizer(LOOP.format(WHY["thinking"]))) as server:
        yield server


@pytest.mark.parametrize("route", PAST)
def test_earlier_reasoning_of_every_dialect_reaches_the_template(keeping: FakeServer, route: str):
    response = keeping.post(route, {"model": MODEL, **PAST[route]})
    assert response.status_code == 200, response.text
    assert TemplateTokenizer.rendered[-1] == "user:hi;assistant:<think>Hm.</think>So.;user:hi;"
