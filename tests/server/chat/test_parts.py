"""Chats of text models whose template reads content as parts alone: the text reaches the prompt."""

import pytest

from kvloom.engine.text.chat_template import ChatTemplates
from kvloom.engine.text.spelling import is_byte_level
from kvloom.engine.text.tokenizer import SpecialTokens, Tokenizer
from kvloom.server.chat.parts import reads_parts_alone
from tests.support.models.vocabularies import fast
from tests.support.servers import MODEL, fake_server

PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %};{% endfor %}"
TEXTS = "{% for m in messages %}{{ m.content }};{% endfor %}"
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %};{% endfor %}"
)


def tokenizer_with(template: str) -> Tokenizer:
    made = fast("byte-level")
    special = SpecialTokens(frozenset({0, 1, 2}), frozenset({1}), 0)
    return Tokenizer(made, special, is_byte_level(made.decoder), ChatTemplates({"default": template}, {}))


@pytest.mark.parametrize(
    ("template", "found"), [(PARTS, True), (TEXTS, False), (EITHER, False), ("{{ raise_exception('no') }}", False)]
)
def test_a_template_is_asked_how_it_reads_content(template: str, found: bool):
    assert reads_parts_alone(tokenizer_with(template)) is found


@pytest.mark.parametrize("template", [PARTS, TEXTS, EITHER])
@pytest.mark.parametrize("content", ["a b", [{"type": "text", "text": "a b"}]])
def test_the_prompt_holds_what_the_user_said(template: str, content: object):
    with fake_server(tokenizer=tokenizer_with(template)) as server:
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
        tokens = server.post("/tokenize", body).json()["tokens"]
        text = server.post("/detokenize", {"model": MODEL, "tokens": tokens}).json()["prompt"]
    assert text == "a b;"
