"""Answers that llama.cpp's own tests read: their calls are read here as there.

tests/test-chat.cpp of its source holds texts and what they mean, by template; they are taken from it when this runs.
What C++ puts together from variables is left out. See test_chat_forms.py for KVLOOM_LLAMA_CPP.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvloom.server.chat.form import ChatForm
from kvloom.server.chat.style import form_of
from tests.compat.test_chat_forms import SOURCE, RealTemplate, read

FILE = SOURCE / "tests" / "test-chat.cpp"
pytestmark = pytest.mark.skipif(not FILE.exists(), reason="KVLOOM_LLAMA_CPP names no folder of llama.cpp's source")
RAW, PLAIN = r'R"(?P<mark>\w*)\((?P<raw>.*?)\)(?P=mark)"', r'"(?P<plain>(?:\\.|[^"\\])*)"'
STRING = re.compile(f"{RAW}|{PLAIN}", re.DOTALL)
LITERALS = r'((?:R"\(.*?\)"|"(?:\\.|[^"\\])*")(?:\s*(?:R"\(.*?\)"|"(?:\\.|[^"\\])*"))*)'  # one behind the other are one
CALL = re.compile(r'\{\s*"(\w+)",\s*' + LITERALS, re.DOTALL)
TOOL = re.compile(
    r'common_chat_tool (\w+)\s*\{\s*/\* \.name = \*/\s*"(\w+)",.*?/\* \.parameters = \*/\s*' + LITERALS, re.DOTALL
)
Calls = list[tuple[str, Any]]


class Case(NamedTuple):
    template: Path
    text: str
    schemas: dict[str, Any]  # of its tools, by name
    calls: Calls


def value(text: str) -> str:
    """What C++ makes of literals that follow each other."""
    parts = []
    for found in STRING.finditer(text):
        plain = found["plain"]
        parts.append(found["raw"] if plain is None else json.loads('"' + plain.replace("\\'", "'") + '"'))
    return "".join(parts)


def argument(source: str, begin: int) -> tuple[str, int]:
    """The argument that begins there, and where it ends."""
    depth, at = 0, begin
    while depth or source[at] not in ")}]":
        if string := STRING.match(source, at):
            at = string.end()
            continue
        depth += (source[at] in "({[") - (source[at] in ")}]")
        at += 1
    return source[begin:at], at


def cases() -> Iterator[Case]:
    source = FILE.read_text()
    tools = {tool[1]: (tool[2], json.loads(value(tool[3]))) for tool in TOOL.finditer(source)}
    template = ""
    for begun in re.finditer(r'peg_tester\("([^"]+)"|\btst\.test\(', source):
        if begun[1]:
            template = begun[1]
            continue
        text, end = argument(source, begun.end())
        asked = source[end : source.index(".run()", end)]
        named = re.search(r"\.tools\(\{(.*?)\}\)", asked, re.DOTALL)
        wanted = re.search(r"\.expect_tool_calls\(\{(.*)\}\)", asked, re.DOTALL)
        is_whole = not re.search(r"\w", STRING.sub("", text)) and ".is_partial(true)" not in asked
        if not (is_whole and named and wanted and (SOURCE / template).is_file()):
            continue
        schemas = dict(tools[name] for name in re.findall(r"\w+", named[1]) if name in tools)
        calls = [(call[1], json.loads(value(call[2]))) for call in CALL.finditer(wanted[1])]
        if schemas and calls:
            yield Case(SOURCE / template, value(text), schemas, calls)


@cache
def form(template: Path) -> ChatForm:
    return form_of(RealTemplate(template), True)


def is_read(case: Case) -> bool:
    """Whether it is read as there: the prompt may have begun the reasoning."""
    own = form(case.template)
    begun = ("", own.thinking.begin if own.thinking else "")
    return any(read(own, before, case.text, case.schemas)[2] == case.calls for before in begun)


OTHERWISE = {
    "Kimi-K2-Thinking": 1,
    "MiniMax-M3": 1,
}  # template -> answers that are read otherwise; docs/chats.md says why


def test_calls_are_read_as_in_llama_cpp():
    found = Counter(case.template.stem for case in cases() if not is_read(case))
    assert found == OTHERWISE


def test_there_are_answers_of_most_forms():
    assert len(list(cases())) > 100
    assert len({case.template for case in cases()}) >= 20
