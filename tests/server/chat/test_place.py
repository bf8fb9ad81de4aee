"""Where an answer begins at once: behind the reasoning, if any, and with the space that the template writes."""

import pytest

from kvloom.server.chat.place import DIRECT, Lead, lead_of
from kvloom.server.chat.style import form_of
from tests.support.models.templates import HERMES, QWEN3, R1, TemplateTokenizer

_TURNS = "{% for m in messages %}<{{ m.role }}>"
_THINKS = "{% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}"
_TEXT = "{{ m.content }}<end>{% endfor %}"
CHANNELS = """{% for m in messages %}<|start|>{{ m.role }}
{%- if m.role == "assistant" %}
{%- if m.reasoning_content is defined %}<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|><|start|>assistant
{%- endif %}<|channel|>final
{%- endif %}<|message|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
LLAMA2 = """{% for m in messages %}{% if m.role == "user" %}[INST] {{ m.content }} [/INST]
{%- else %} {{ m.content }} </s>{% endif %}{% endfor %}"""
ALWAYS = _TURNS + _THINKS + _TEXT + "{% if add_generation_prompt %}<assistant>{% endif %}"
SWITCH = (
    _TURNS
    + _THINKS
    + _TEXT
    + "{% if thinking %}Think first.{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
OLDER = HERMES.replace("assistant: {% endif %}", "assistant:\n<think>\n{% endif %}") + "{# </think> #}"


@pytest.mark.parametrize(
    ("template", "lead"),
    [
        ("", Lead()),  # no template
        (HERMES, Lead()),
        (QWEN3, Lead()),  # the template itself writes an empty reasoning
        (R1, Lead("\n</think>\n\n")),  # it opens one whatever is asked for
        (OLDER, Lead("\n</think>\n\n")),
        (ALWAYS, Lead("<think>\n\n</think>\n\n")),  # it leaves the model to begin one, and cannot be told not to
        (SWITCH, Lead()),  # it can
        (CHANNELS, Lead("<|channel|>final<|message|>")),
        (LLAMA2, Lead("", " ")),
    ],
)
def test_the_place_is_what_the_template_shows_of_an_answer(template: str, lead: Lead):
    tokenizer = TemplateTokenizer(template)
    assert lead_of(tokenizer, form_of(tokenizer).thinking) == lead


def test_a_template_that_refuses_the_question_has_no_place():
    tokenizer = TemplateTokenizer("{{ raise_exception('no') }}")
    assert lead_of(tokenizer, None) == Lead()


def test_a_template_that_refuses_an_answer_shows_no_space():
    refusing = "{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}" + LLAMA2
    assert lead_of(TemplateTokenizer(refusing), None) == Lead()


@pytest.mark.parametrize("name", DIRECT)
def test_reasoning_is_switched_off_by_either_name(name: str):
    shown = ALWAYS + "{% if " + name + " is defined and not " + name + " %}<think></think>{% endif %}"
    tokenizer = TemplateTokenizer(shown)
    assert lead_of(tokenizer, form_of(tokenizer).thinking) == Lead()
