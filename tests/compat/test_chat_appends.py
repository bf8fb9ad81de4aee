"""Real chat templates: the prompt of a turn begins with the prompt and the answer of the turn before, so that it finds
them cached, wherever the template allows it. See test_chat_forms.py; docs/chats.md says where it does not.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.form import ChatForm
from kvloom.server.chat.history import shapes_of
from kvloom.server.chat.showing import as_shown
from kvloom.server.chat.style import form_of
from tests.compat.test_chat_forms import TEMPLATES, TOOLS, RealTemplate

pytestmark = pytest.mark.skipif(not TEMPLATES, reason="KVLOOM_LLAMA_CPP names no folder of llama.cpp's source")
DOCUMENTED = Path(__file__).parents[2] / "docs" / "chats.md"
ASKED, MORE = {"role": "user", "content": "USER"}, {"role": "user", "content": "MORE"}
CALL = {"id": "abcdefgh0", "type": "function", "function": {"name": "fnone", "arguments": json.dumps({"alpha": "END"})}}
RESULT = {"role": "tool", "content": "RESULT", "tool_call_id": "abcdefgh0", "name": "fnone"}
TEXT = {"role": "assistant", "content": "END"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
WHY = {"reasoning_content": "WHY"}
TURNS: dict[str, tuple[list[Any], dict[str, Any], dict[str, Any]]] = {
    "text": ([], TEXT, MORE),
    "call": (TOOLS, CALLED, RESULT),
    "reasoning and text": ([], {**TEXT, **WHY}, MORE),
    "reasoning and call": (TOOLS, {**CALLED, **WHY}, RESULT),
}


def prompt(
    tokenizer: RealTemplate, form: ChatForm, messages: list[Any], tools: list[Any], is_open: bool, **values: Any
) -> str:
    """As the server makes it. Raises BadRequest. `values`: further variables of the template."""
    known, shown = as_shown(tokenizer, form, messages, tools, "messages")
    problem: BadRequest | None = None
    for shape in shapes_of(form.kept, known):
        try:
            given = {"tools": list(shown) or None, "add_generation_prompt": is_open, **values}
            return tokenizer.apply_chat_template(shape, **given)
        except BadRequest as error:
            problem = problem or error
    assert problem is not None
    raise problem


def may_be(kind: str, form: ChatForm, first: str) -> bool:
    """Whether a model may answer so behind this prompt: with reasoning where that is open, without where it is shut."""
    thinking = form.thinking
    has_reasoning = kind.startswith("reasoning")
    if thinking is None or first.rstrip().endswith(thinking.end):
        return not has_reasoning
    return has_reasoning or not first.rstrip().endswith(thinking.begin)


def appends(tokenizer: RealTemplate, kind: str) -> bool | None:
    """Whether the next turn's prompt begins with this one's and the answer; None where there is no such turn."""
    tools, answer, more = TURNS[kind]
    form = form_of(tokenizer, bool(tools))
    try:
        first = prompt(tokenizer, form, [ASKED], tools, True)
        shown = prompt(tokenizer, form, [ASKED, answer], tools, False)
        second = prompt(tokenizer, form, [ASKED, answer, more], tools, True)
    except BadRequest:
        return None
    if not may_be(kind, form, first):
        return None
    whole = shown[: shown.rindex("END") + 3]
    if not whole.startswith(first):  # the template does not show the answer as it was asked for
        return False
    return second.startswith(whole) and ("WHY" in whole or "WHY" not in json.dumps(answer))


def documented() -> dict[str, set[str]]:
    """The turns that are not appended, by template, as the page says."""
    rows = re.findall(r"^\| `(\S+)` \| ([a-z, ]+) \|", DOCUMENTED.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: set(kinds.split(", ")) for name, kinds in rows}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_the_next_prompt_goes_on_where_the_answer_ended(path: Path):
    tokenizer = RealTemplate(path)
    found = {kind for kind in TURNS if appends(tokenizer, kind) is False}
    assert found == documented().get(path.stem, set())
