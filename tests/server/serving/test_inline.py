"""Bodies that may take long to parse are not parsed on the event loop, however short they are."""

from collections.abc import Callable
from typing import Any

import pytest

from kvloom.server.chat import grammars
from kvloom.server.chat.grammars import choice_grammar, json_grammar, regex_grammar, text_grammar
from kvloom.server.chat.structural_tags import tag_grammar
from kvloom.server.serving.inline import NotInline, inline
from tests.support.servers import fake_server

LONG = "a" * 2001
RULES = "root ::= [a-c] [a-c]"

Make = Callable[[], Any]
LONG_ONES: list[Make] = [
    lambda: text_grammar("start: /a/", "f"),
    lambda: text_grammar(RULES, "f"),
    lambda: regex_grammar(LONG, "f"),
    lambda: choice_grammar([LONG], "f"),
    lambda: json_grammar({"const": LONG}, "f"),
    lambda: json_grammar({"allOf": [{"type": "object"}]}, "f"),
    lambda: tag_grammar({"format": {"type": "const_string", "value": LONG}}, "f"),
    lambda: tag_grammar({"format": {"type": "grammar", "grammar": "start: /a/"}}, "f"),
]
SHORT_ONES: list[Make] = [
    lambda: regex_grammar("[a-c]+", "f"),
    lambda: choice_grammar(["a", "b"], "f"),
    lambda: json_grammar({"type": "object", "properties": {"a": {"type": "integer"}}}, "f"),
    lambda: tag_grammar({"format": {"type": "const_string", "value": "a"}}, "f"),
]


@pytest.mark.parametrize("make", LONG_ONES)
def test_a_grammar_that_may_take_long_is_read_elsewhere(make: Make):
    with inline(), pytest.raises(NotInline):
        make()
    assert make(), "elsewhere it is read"


@pytest.mark.parametrize("make", SHORT_ONES)
def test_a_short_one_is_read_in_place(make: Make):
    with inline():
        assert make()


@pytest.mark.parametrize(
    "fields",
    [
        {"ebnf": RULES},
        {"grammar": RULES},
        {"guided_grammar": RULES},
        {"structured_outputs": {"grammar": RULES}},
        {"response_format": {"type": "ebnf", "ebnf": RULES}},
        {"structural_tag": {"format": {"type": "grammar", "grammar": RULES}}},
    ],
)
def test_a_small_body_with_a_grammar_is_parsed_in_another_process(fields: dict[str, Any], monkeypatch):
    def stop(_: str) -> str:
        raise AssertionError("it is read in the server's own process")

    with fake_server() as server:
        monkeypatch.setattr(grammars, "any_to_lark", stop)
        reply = server.chat(max_tokens=8, **fields)
        assert (reply.status_code, len(reply.json()["choices"][0]["message"]["content"])) == (200, 2)
        wrong = server.chat(ebnf="root ::= (")
        assert (wrong.status_code, "ebnf" in wrong.text) == (400, True)
