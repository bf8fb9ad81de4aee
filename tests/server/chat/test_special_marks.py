"""Grammars of calls whose marks are special tokens, with a tokenizer that has them."""

import pytest

from kvloom.contract.sampling import SamplingParams
from kvloom.rank.byte_tokenizer import VOCAB_SIZE
from kvloom.rank.grammar.guides import Guides
from kvloom.server.chat.style import form_of, led
from kvloom.server.chat.tool_grammars import tool_grammar
from kvloom.server.chat.tools import Tool, ToolChoice
from tests.support.models.templates import TemplateTokenizer

MARKS = ("<|call|>", "<|end|>", "<|key|>", "<|channel|>", "<|message|>", "<|start|>")
IDS = {text: VOCAB_SIZE + at for at, text in enumerate(MARKS)}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}


class MarkTokenizer(TemplateTokenizer):
    """A token is a byte, or a mark."""

    vocab_size = VOCAB_SIZE + len(MARKS)
    special_texts = frozenset(MARKS)

    def encode_inside(self, text: str, is_plain: bool = True) -> list[int]:
        return [IDS[text]] if text in IDS and not is_plain else super().encode_inside(text)

    def token_bytes(self, token_id: int) -> bytes:
        return MARKS[token_id - VOCAB_SIZE].encode() if token_id >= VOCAB_SIZE else super().token_bytes(token_id)


CALLS = "{% for c in m.tool_calls or [] %}<|call|>{{ c.function.name }}CALL{% endfor %}"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    + CALLS
    + "<|end|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}{# tools #}"
)
JSON = TEMPLATE.replace("CALL{%", "({{ c.function.arguments | tojson }})<|end|>{%")
KEYS = TEMPLATE.replace(
    "CALL{%", "{% for k, v in c.function.arguments.items() %}<|key|>{{ k }}={{ v }}<|end|>{% endfor %}<|end|>{%"
)
ELEMENTS = TEMPLATE.replace(
    "CALL{%",
    "{% for k, v in c.function.arguments.items() %}<|key|><{{ k }}>{{ v }}<|key|></{{ k }}>{% endfor %}<|end|>{%",
)


def accepts(template: str, pieces: list[str], mode: str = "required", is_thinking: bool = False) -> bool:
    """Whether an answer may be these tokens: marks, and bytes of all other texts."""
    tokenizer = MarkTokenizer(template)
    form = led(form_of(tokenizer, True), "", is_thinking)
    grammar = tool_grammar(form, [Tool("f", "", SCHEMA, is_strict=True)], ToolChoice(mode), True, "")
    guide = Guides(lambda: tokenizer, tokenizer.vocab_size).guide(SamplingParams(grammar=grammar))
    assert guide is not None
    for token in [id for piece in pieces for id in ([IDS[piece]] if piece in IDS else piece.encode())]:
        if not guide.mask()[token]:
            return False
        guide.take(token)
    return bool(guide.mask()[next(iter(tokenizer.eos_ids))])


@pytest.mark.parametrize(
    ("template", "inside"),
    [
        (JSON, ['f({"a": "x"})', "<|end|>"]),
        (KEYS, ["f", "<|key|>", "a=x<|en", "<|end|>", "<|end|>"]),
        (ELEMENTS, ["f", "<|key|>", "<a>x</a><|ke", "<|key|>", "</a>", "<|end|>"]),
    ],
    ids=["JSON", "keys", "elements"],
)
def test_marks_that_are_special_tokens_are_written_as_such(template: str, inside: list[str]):
    assert accepts(template, ["<|call|>", *inside])
    assert not accepts(template, ["<|call|", ">", *inside])
    assert accepts(template, ["Some ", "<|key|>", "text.", "<|call|>", *inside, "<|call|>", *inside, "So."], "auto")
    assert not accepts(template, ["Some text.", "<|call|>", "g"], "auto")


def test_headers_of_channels_are_special_tokens():
    template = "{{ messages[0].content }}<|start|>assistant{# <|channel|> <|message|> tools #}"
    body = [" to=functions.f", "<|channel|>", "commentary json", "<|message|>", '{"a": "x"}']
    assert accepts(template, body)
    assert accepts(template, ["<|start|>", "assistant", *body], is_thinking=True)
    text = ["<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "Yes."]
    assert accepts(template, text, "auto", is_thinking=True)
    assert not accepts(template, text, "required", is_thinking=True)
