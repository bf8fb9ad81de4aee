"""Prompts of real chat templates beside those of llama.cpp's server, over a tiny random model with each template.

KVLOOM_LLAMA_SERVER names the program; without it these tests are skipped. docs/chats.md says which prompts differ, and
why. llama.cpp turns reasoning on and keeps that of earlier answers, where a template has the variables for it.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.style import form_of
from tests.compat.llama_server import BINARY, make_model, prompt_of, serving
from tests.compat.test_chat_appends import ASKED, CALLED, DOCUMENTED, MORE, RESULT, TEXT, WHY, prompt
from tests.compat.test_chat_forms import TEMPLATES, TOOLS, RealTemplate

pytestmark = pytest.mark.skipif(
    not TEMPLATES or not BINARY.is_file(), reason="KVLOOM_LLAMA_CPP and KVLOOM_LLAMA_SERVER name no llama.cpp"
)
RULE = {"role": "system", "content": "RULE"}
CONVERSATIONS: dict[str, tuple[list[Any], list[Any]]] = {
    "system": ([RULE, ASKED], []),
    "tools": ([RULE, ASKED], TOOLS),
    "call": ([ASKED, CALLED, RESULT], TOOLS),
    "reasoning": ([ASKED, {**TEXT, **WHY}, MORE], []),
    "reasoning and call": ([ASKED, {**CALLED, **WHY}, RESULT], TOOLS),
}
THEIR_DEFAULTS = {"enable_thinking": True, "preserve_reasoning": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama") / "tiny.gguf")


def differing(path: Path, model: Path) -> Iterator[str]:
    """The conversations whose prompts differ. llama.cpp leaves out a token that begins every text."""
    tokenizer = RealTemplate(path)
    with serving(model, path) as address:
        for name, (messages, tools) in CONVERSATIONS.items():
            try:
                ours = prompt(tokenizer, form_of(tokenizer, bool(tools)), messages, tools, True, **THEIR_DEFAULTS)
            except BadRequest:
                ours = None
            theirs = prompt_of(address, messages, tools)
            if (ours or "").removeprefix("<BOS>") != (theirs or "").removeprefix("<BOS>"):
                yield name


def documented() -> dict[str, set[str]]:
    rows = re.findall(r"^\| (\S+) \| ([a-z, ]+) \|", DOCUMENTED.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: set(kinds.split(", ")) for name, kinds in rows}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_prompts_are_those_of_llama_cpp_or_the_page_says_why_not(path: Path, model: Path):
    assert set(differing(path, model)) == documented().get(path.stem, set())
