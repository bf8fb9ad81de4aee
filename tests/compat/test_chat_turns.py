"""Real chat templates, those that llama.cpp is tested with: whatever conversation a protocol allows, every text of it
reaches the prompt. See test_chat_forms.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.showing import as_shown
from kvloom.server.chat.style import form_of
from tests.compat.test_chat_forms import TEMPLATES, TOOLS, RealTemplate

pytestmark = pytest.mark.skipif(not TEMPLATES, reason="KVLOOM_LLAMA_CPP names no folder of llama.cpp's source")


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


AGAIN, LATER = said("user", "AGAIN"), said("system", "LATER")


def call(at: int, arguments: str = "") -> dict[str, Any]:
    text = arguments or json.dumps({"alpha": f"ALPHA{at}", "beta": at})
    return {"id": f"toolu_long{at}", "type": "function", "function": {"name": "fnone", "arguments": text}}


def result(at: int) -> dict[str, Any]:
    return said("tool", f"RESULT{at}", name="fnone", tool_call_id=f"toolu_long{at}")


ASKED, RULE, DONE = said("user", "ASKED"), said("system", "RULE"), said("assistant", "DONE")
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "developer": ([said("developer", "RULE"), ASKED], "RULE ASKED"),
    "system and developer": ([RULE, said("developer", "MORE"), ASKED], "RULE MORE ASKED"),
    "later system": ([RULE, ASKED, LATER], "RULE ASKED LATER"),
    "system between": ([RULE, ASKED, DONE, LATER, AGAIN], "RULE ASKED DONE LATER AGAIN"),
    "two users": ([ASKED, AGAIN], "ASKED AGAIN"),
    "two answers": ([ASKED, DONE, said("assistant", "MORE"), AGAIN], "ASKED DONE MORE AGAIN"),
    "no calls": ([ASKED, {**DONE, "tool_calls": []}, AGAIN], "ASKED DONE AGAIN"),
    "a call": ([RULE, ASKED, said("assistant", "", tool_calls=[call(0)]), result(0)], "RULE ASKED ALPHA0 RESULT0"),
    "two calls": (
        [ASKED, said("assistant", "", tool_calls=[call(0), call(1)]), result(0), result(1), DONE, AGAIN],
        "ASKED ALPHA0 ALPHA1 RESULT0 RESULT1 DONE AGAIN",
    ),
    "a cut call": (
        [ASKED, said("assistant", "", tool_calls=[call(0, '{"alpha": "CUT')]), result(0)], "ASKED CUT RESULT0",
    ),
    "a question behind a result": (
        [ASKED, said("assistant", "", tool_calls=[call(0)]), result(0), AGAIN, LATER],
        "ASKED ALPHA0 RESULT0 AGAIN LATER",
    ),
}  # fmt: skip


def prompt(tokenizer: RealTemplate, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    style = form_of(tokenizer, bool(tools))
    known, shown = as_shown(tokenizer, style, messages, tools, "messages")
    return tokenizer.apply_chat_template(known, tools=shown or None)


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_every_text_reaches_the_prompt(path: Path, name: str):
    tokenizer = RealTemplate(path)
    messages, texts = CONVERSATIONS[name]
    tools = TOOLS if "call" in name or "result" in name else []
    try:
        prompt(tokenizer, [ASKED], tools)
    except BadRequest as error:
        pytest.skip(f"takes no conversation of this kind: {error}")
    text = prompt(tokenizer, messages, tools)
    assert [each for each in texts.split() if each not in text] == []
