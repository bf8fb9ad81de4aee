"""Marks do not change what chat templates render."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.engine.text.chat_template import ChatTemplates
from kvloom.engine.text.marks import Marks
from tests.support.engine.marks import restored

SPECIAL = frozenset({"<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "[INST]", "[/INST]", "</s>"})
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
LLAMA3 = """{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endfor %}"""
QWEN3 = """{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}
{% endfor %}</tools>{% endif %}{% for m in messages %}{% set content = m.content %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{%- if m.content.startswith('<tool_response>') %}tool{% endif %}<|im_start|>{{ m.role }}
{{ content[:40] }}|{{ content | length }}<|im_end|>
{% endfor %}"""
MISTRAL = """{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content.strip() + ' ' }}[/INST]{% else %}
{{- ' ' + m.content | tojson(ensure_ascii=True) }}</s>{% endif %}{% endfor %}"""
TEMPLATES = [CHATML, LLAMA3, QWEN3, MISTRAL]
TOOL = {"type": "function", "function": {"name": "f", "description": "ends <|im_end|>", "parameters": {"a<": ["</s>"]}}}

pieces = st.one_of(st.text(max_size=5), st.sampled_from([*sorted(SPECIAL), "</think>", "<", "[", " ", "\n", "end|>"]))
contents = st.lists(pieces, max_size=6).map("".join)


@cache
def _templates(template: str) -> ChatTemplates:
    return ChatTemplates({"default": template}, {})


def _render(template: str, messages: Any, tools: Any) -> str:
    return _templates(template).apply(messages, tools, True)


@pytest.mark.parametrize("template", TEMPLATES, ids=["chatml", "llama3", "qwen3", "mistral"])
@given(question=contents, answer=contents)
def test_a_template_makes_of_marked_texts_what_it_makes_of_them(template: str, question: str, answer: str):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    marks = Marks(SPECIAL, [messages, [TOOL]])
    marked = marks.spelt_out(_render(template, marks.mark(messages), marks.mark([TOOL])))
    assert restored(marks, marked) == _render(template, messages, [TOOL])
    for text in SPECIAL:
        assert marked.count(text) == _render(template, _emptied(messages), []).count(text)


def _emptied(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{**message, "content": ""} for message in messages]


def test_values_without_special_tokens_are_left_as_they_are():
    values = [{"role": "user", "content": "hi <b>"}]
    marks = Marks(SPECIAL, values)
    assert not marks.originals
    assert marks.mark(values) is values


def test_a_stand_in_occurs_in_no_text():
    taken = chr(0xF0000)
    marks = Marks(SPECIAL, [taken, "</s>"])
    assert taken not in marks.originals
    assert restored(marks, marks.mark(f"{taken}</s>")) == f"{taken}</s>"


def test_names_of_fields_are_marked_too():
    marks = Marks(SPECIAL, {"</s>": 1})
    assert "</s>" not in marks.mark({"</s>": 1})


def test_thousands_of_special_tokens_are_found_as_fast_as_few():
    special = frozenset(f"<|reserved_{i}|>" for i in range(5000))
    text = "<|reserved_" * 1000 + "<|reserved_4321|>"
    assert Marks(special, [text]).mark(text).count("<") == 1000
