"""Lark grammars of custom tools: as one expression they have the texts that llguidance gives them, and calls of every
form hold them.
"""

import re
from typing import Any

import pytest

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.form import CallForm
from kvloom.server.chat.lark_regex import NotRegular, regex_of_lark
from kvloom.server.chat.tool_grammars import tool_grammar
from kvloom.server.chat.tool_prompt import call_text
from kvloom.server.chat.tools import Tool, ToolChoice
from kvloom.server.dialects.openai.custom import custom_tool
from tests.server.chat.test_written_calls import WALKED, read
from tests.support.engine.grammars import accepts

PATCH = r"""
start: begin hunk+ end            // the form of patches that Codex asks for
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: add | remove
    | update
add: "*** Add File: " name LF line+
remove: "*** Delete File: " name LF
update: "*** Update File: " name LF move? change?
name: /(.+)/
line: "+" /(.*)/ LF -> written
move: "*** Move to: " name LF
change: (context | (("+" | "-" | " ") /(.*)/ LF))+ eof?
context: ("@@" | "@@ " /(.+)/) LF
eof: "*** End of File" LF
%import common.LF
"""
PATCHED = '*** Begin Patch\n*** Update File: a.py\n@@ def f():\n-    say("it\'s")\n+    <b> \\n </b>\n*** End Patch'
PLAIN = PATCHED.replace("\\", "")  # every form writes it
LINES = 'start: LINE+\nLINE: /[^\\n]*/ "\\n"'


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        (PATCH, [PATCHED, PATCHED + "\n"], [PATCHED[1:], PATCHED.replace("@@ def", "def"), "*** Begin Patch\n"]),
        ('start: "a"i B\nB: "b".."d"', ["ab", "Ad"], ["a", "aB", "ae"]),
        (r'start: "\x41\"\\" /[a\/]+/', ['A"\\a/'], ['A"a', 'A"\\']),
        ("start: /a.b/s X\nX: /c/i", ["a\nbC"], ["a\nb"]),
        ('?start: [x] "-" x~2\n!x: "x"', ["x-xx", "-xx"], ["x-x", "xx-xx"]),
        ('start: x~1..2 ("y" | "z"){2,}\nx: "x"', ["xyz", "xxzzz"], ["x", "xy", "xxxyz"]),
        ('start: "y"{2} "z"{0,1}', ["yy", "yyz"], ["y", "yyzz"]),
        ("start: A | // nothing\nA: /(?P<one>a)/ A2\nA2: /(?P<one>b)/", ["", "ab"], ["a"]),
        ("start: N (S N)*\nS: /, */\n%import common.INT -> N", ["1", "1, 23"], ["", "1,"]),
        ("start: WORD (WORD DIGIT)?\n%ignore WS\n%import common (WORD, WS, DIGIT)", ["a", "a b 1", "ab"], ["a1", "1"]),
        ('start: A+\nA: "a" B\nB: "b"\n%ignore " "', ["ab  ab"], ["a b"]),
    ],
)
def test_an_expression_has_the_texts_of_its_grammar(grammar: str, texts: list[str], others: list[str]):
    held = re.compile(regex_of_lark(grammar))
    for text in [*texts, *others]:
        assert (held.fullmatch(text) is not None, accepts(grammar, text)) == (text in texts, text in texts), text


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "(" start ")" | "a"',
        "start: a\na: b\nb: /x/ a?",
        "start: " + "a " * 40 + "".join(f"\n{x}: {y} {y} {y} {y}" for x, y in ["ab", "bc", "cd"]) + "\nd: /efghijkl/",
        "start: <|x|>",
        "start: %json {}",
        "start: A & B\nA: /a/\nB: /b/",
        "start: ~A\nA: /a/",
        "start: /a b/x",
        "%llguidance {}\nstart: /a/",
        'start: missing',
        'start: ("a"',
        'start: ["a"',
        'start: "a"{1',
        'start: "a")',
        r'start: "\z"',
        "start: X\n%import other.X",
        "start: X\n%import common.X",
        "start[lazy]: /a/",
    ],
)  # fmt: skip
def test_what_is_no_expression_is_none(grammar: str):
    with pytest.raises(NotRegular):
        regex_of_lark(grammar)


def custom(definition: str) -> Tool:
    return custom_tool("f", "", {"syntax": "lark", "definition": definition}, "tools[0]")


def grammar_of_input(form: CallForm, definition: str, mode: Any = "required") -> str:
    return tool_grammar(form, [custom(definition)], ToolChoice(mode), False, "")


@pytest.mark.parametrize("name", WALKED.keys())
def test_calls_of_every_form_hold_the_input_of_a_custom_tool(name: str):
    form = WALKED[name]
    text = call_text(form, [("f", {"input": PLAIN})])
    for mode in ("required", "auto"):
        grammar = grammar_of_input(form, PATCH, mode)
        assert accepts(grammar, text), text
        assert not accepts(grammar, text.replace("Update", "Up-date")), text
    assert read(form, text, custom(PATCH).schema) == ("", [("f", {"input": PLAIN})])
    for mark in (form.value_end, form.tail + form.end, form.quote, "</", "',", "]]>", '"}'):
        given = f"a{mark}\nb\n{mark.strip()}\n"
        text = call_text(form, [("f", {"input": given})])
        if accepts(grammar_of_input(form, LINES), text):
            told, [(_, arguments)] = read(form, text, custom(LINES).schema)
            assert (told, accepts(LINES, arguments["input"])) == ("", True), text


def test_a_grammar_that_cannot_be_compiled_is_the_tools_mistake():
    with pytest.raises(BadRequest, match=r"tools\[0\]\.format"):
        custom_tool("f", "", {"syntax": "lark", "definition": "start: nothing"}, "tools[0]")
