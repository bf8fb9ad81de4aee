"""Answers as llama.cpp's own parser reads them, over real chat templates: whatever call it reads is read here too.

The answers are those that each template shows, and the same with marks left out, white space moved, and a text before
them. KVLOOM_LLAMA_SERVER names llama.cpp's server; the libraries beside it hold the parser, which llama_parser.cpp
calls. See test_chat_forms.py.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloom.server.chat.form import MARK, ChatForm
from kvloom.server.chat.style import form_of
from tests.compat.llama_server import BINARY
from tests.compat.test_chat_forms import (
    CALLS,
    SCHEMA,
    SHOWS_EARLIER,
    SHOWS_NONE,
    SOURCE,
    TEMPLATES,
    RealTemplate,
    read,
    shown,
)

pytestmark = pytest.mark.skipif(
    not TEMPLATES or not BINARY.is_file(), reason="KVLOOM_LLAMA_CPP and KVLOOM_LLAMA_SERVER name no llama.cpp"
)
PROGRAM = Path(__file__).parent / "llama_parser.cpp"
END = re.compile(rf"\s*(?:{MARK}|<\|[a-z_]+\|>)\s*\Z")  # of a turn, or of calls
NUM_ENDS = 2  # marks at the end of an answer that the server may not give to its parser
TOOLS = [{"name": name, "description": "does", "parameters": SCHEMA} for name, _ in CALLS]
Calls = list[tuple[str, Any]]


@pytest.fixture(scope="module")
def parser(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled program."""
    program, libraries = tmp_path_factory.mktemp("llama") / "parser", BINARY.parent
    headers = [f"-I{SOURCE / folder}" for folder in ("common", "vendor", "include", "ggml/include")]
    linked = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lllama-common", "-lllama", "-lggml", "-lggml-base"]
    subprocess.run(["g++", "-std=c++17", *headers, PROGRAM, "-o", program, *linked], check=True)
    return program


def ends(text: str) -> Iterator[str]:
    """An answer with and without the marks at its end."""
    yield text
    for _ in range(NUM_ENDS):
        found = END.search(text)
        if not found:
            return
        text = text[: found.start()]
        yield text


def varied(text: str) -> Iterator[str]:
    """An answer as models write it who keep less to their template."""
    for whole in ends(text):
        yield whole
        yield f"\n{whole}"
        yield f"Sure.\n{whole}"
        yield whole.replace("\n", "")
        yield whole.replace('": ', '":').replace('", "', '","')
        for mark in re.finditer(MARK, whole):
            yield whole[: mark.start()] + whole[mark.end() :]
            yield f"{whole[: mark.start()]}\n{whole[mark.start() :]}"
            yield f"{whole[: mark.end()]}\n{whole[mark.end() :]}"


def answers(path: Path, tokenizer: RealTemplate) -> dict[str, tuple[str, Calls]]:
    """What precedes an answer, and its calls, by the answer."""
    found: dict[str, tuple[str, Calls]] = {}
    for before, text, _, count in shown(tokenizer, path.stem in SHOWS_EARLIER):
        calls = CALLS[: count if "fntwo" in text else 1]
        for each in varied(text):
            found.setdefault(each, (before, calls))
    return found


def read_there(parser: Path, path: Path, texts: list[str]) -> list[list[Calls]]:
    """The calls of each answer, in the ways in which llama.cpp's parser reads it."""
    asked = json.dumps({"template": path.read_text(), "tools": TOOLS, "answers": texts})
    told = subprocess.run([parser], input=asked + "\n", capture_output=True, text=True, check=True).stdout
    return [[called(one) for one in ways if one] for ways in json.loads(told)]


def called(answer: dict[str, Any]) -> Calls:
    try:
        return [(name, json.loads(arguments)) for name, arguments in answer["calls"]]
    except ValueError:  # arguments that are cut
        return []


def read_here(form: ChatForm, before: str, text: str) -> list[Calls]:
    """The same here; the prompt may have begun the reasoning."""
    begun = ("", before, form.thinking.begin if form.thinking else "")
    found = []
    for each in dict.fromkeys(begun):
        found.append(read(form, each, text)[2])
    return found


@pytest.mark.parametrize(
    "path", [path for path in TEMPLATES if path.stem not in SHOWS_NONE], ids=lambda path: path.stem
)
def test_calls_that_llama_cpp_reads_are_read_here(path: Path, parser: Path):
    tokenizer = RealTemplate(path)
    form, given = form_of(tokenizer, True), answers(path, tokenizer)
    there = read_there(parser, path, list(given))
    missed = [
        text
        for (text, (before, calls)), ways in zip(given.items(), there, strict=True)
        if calls in ways and calls not in read_here(form, before, text)
    ]
    assert missed == []
