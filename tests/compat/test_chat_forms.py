"""Real chat templates, those that llama.cpp is tested with: what each shows of a call is read back as that call.

KVLOOM_LLAMA_CPP names the folder of llama.cpp's source, which holds models/templates; without it these tests are
skipped. `make compat-chats` fetches it.
"""

import json
import os
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from kvloom.contract.errors import BadRequest
from kvloom.contract.request import Delta, FinishReason
from kvloom.contract.sampling import SamplingParams
from kvloom.server.chat.derive import answer_in
from kvloom.server.chat.form import ChatForm
from kvloom.server.chat.place import DIRECT, lead_of
from kvloom.server.chat.request import ChatAnswer, PreparedChat
from kvloom.server.chat.style import form_of, led
from kvloom.server.chat.tool_grammars import tool_grammar
from kvloom.server.chat.tools import Tool, ToolChoice
from tests.support.engine.grammars import EOS_ID, make_guide
from tests.support.models.templates import TemplateTokenizer

SOURCE = Path(os.environ.get("KVLOOM_LLAMA_CPP", "/nowhere"))
TEMPLATES = sorted((SOURCE / "models" / "templates").glob("*.jinja"))
pytestmark = pytest.mark.skipif(not TEMPLATES, reason="KVLOOM_LLAMA_CPP names no folder of llama.cpp's source")

SCHEMA = {
    "type": "object",
    "properties": {
        "alpha": {"type": "string", "description": "a"},
        "beta": {"type": "integer", "description": "b"},
        "gamma": {"type": "object", "description": "c"},
    },
    "required": ["alpha"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "does", "parameters": SCHEMA}}
    for name in ("fnone", "fntwo")
]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("fnone", {"alpha": 'x "q" <b>\nz', "beta": 42, "gamma": {"k": [1, True, "s"]}}),
    ("fntwo", {"alpha": "</parameter> two"}),
]
SCHEMAS = {name: SCHEMA for name, _ in CALLS}
EXTRAS: list[dict[str, Any]] = [
    {"content": "CONTENT here", "reasoning_content": "WHY so", "reasoning": "WHY so", "thinking": "WHY so"},
    {"content": "", "reasoning_content": "WHY so"},
    {"content": ""},
]

# their last answer is shown as one that goes on, within the reasoning: an earlier one is looked at
SHOWS_EARLIER = {"NVIDIA-Nemotron-Nano-v2"}
SHOWS_NONE = {
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "HuggingFaceTB-SmolLM3-3B",
    "LFM2-8B-A1B",
    "LFM2.5-Instruct",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "fireworks-ai-llama-3-firefunction-v2",
    "google-gemma-2-2b-it",
    "ibm-granite-granite-3.3-2B-Instruct",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}  # templates that show no call, or refuse it
MAX_END = 60  # characters of the end of a turn


class RealTemplate(TemplateTokenizer):
    """A real template; its special tokens have names that none of its texts contains."""

    def __init__(self, path: Path) -> None:
        super().__init__("{% set bos_token = '<BOS>' %}{% set eos_token = '<EOS>' %}" + path.read_text())


def num_shared(first: str, second: str) -> int:
    """Characters with which both texts begin."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))


def shown_earlier(render: Any, message: dict[str, Any]) -> tuple[str, str]:
    """What precedes an answer that the conversation has left behind, and the answer."""
    asked, more = {"role": "user", "content": "USER"}, {"role": "user", "content": "MORE"}
    whole, other = (
        render([asked, one, more], TOOLS, False) for one in (message, {"role": "assistant", "content": "."})
    )
    num_before, num_after = num_shared(whole, other), num_shared(whole[::-1], other[::-1])
    return whole[:num_before], whole[num_before : len(whole) - num_after]


def shown(tokenizer: RealTemplate, is_earlier: bool = False) -> Iterator[tuple[str, str, dict[str, Any], int]]:
    """What the template makes of answers with calls: what precedes an answer, the answer, its message, its calls."""
    asked = {"role": "user", "content": "USER"}

    def render(messages: Any, tools: Any, is_open: bool) -> str:
        known = [dict(message) for message in messages]
        return tokenizer.apply_chat_template(known, tools=tools, add_generation_prompt=is_open)

    for count in (2, 1):
        for is_text in (False, True):
            calls = [
                {"id": f"abcdefgh{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for at, (name, arguments) in enumerate(
                    (name, json.dumps(one) if is_text else one) for name, one in CALLS[:count]
                )
            ]
            for extra in EXTRAS:
                message = {"role": "assistant", **extra, "tool_calls": calls}
                before, text = (
                    shown_earlier(render, message) if is_earlier else ("", answer_in(render, asked, message, TOOLS))
                )
                if text is None or "fnone" not in text or (is_text and ('\\\\\\"q' in text or "{{" in text)):
                    continue  # refused, not shown, or not as a call of arguments in this shape
                whole = render([asked, message], TOOLS, False)
                yield before or whole[: whole.rindex(text)], text.removesuffix("<EOS>"), message, count


def read(
    form: ChatForm, before: str, text: str, schemas: Mapping[str, Any] = SCHEMAS
) -> tuple[str, str, list[tuple[str, Any]]]:
    """The text, the reasoning and the calls of an answer that comes a character at a time, as the server reads it."""
    thinking = form.thinking
    is_open = bool(thinking and thinking.begin and before.rstrip().endswith(thinking.begin))
    tools = tuple(Tool(name, "does", schema) for name, schema in schemas.items())
    output = PreparedChat((), SamplingParams(), form, tools, ToolChoice("auto"), True, is_open).output()
    answer = ChatAnswer()
    for delta in (*(Delta("r", char, (1,)) for char in text), Delta("r", finish_reason=FinishReason.EOS)):
        for event in output.add(delta):
            answer.add(event)
    return (
        answer.text.strip(),
        answer.reasoning,
        [(name, json.loads(arguments)) for name, arguments in answer.calls],
    )


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_what_a_template_shows_is_read_back(path: Path):
    tokenizer = RealTemplate(path)
    form, cases = form_of(tokenizer, True), 0
    for before, text, message, count in shown(tokenizer, path.stem in SHOWS_EARLIER):
        content = message["content"] if "CONTENT" in text else ""
        why = "WHY so" if "WHY so" in text else ""
        wanted = CALLS[: count if "fntwo" in text else 1]
        assert read(form, before, text) == (content, why, wanted), text
        cases += 1
    assert bool(cases) == (path.stem not in SHOWS_NONE)


def rest_of(grammar: str, text: str) -> str | None:
    """What follows in a text behind the last place where an answer of the grammar may end; None = there is none."""
    guide = make_guide(grammar)
    data, end = text.encode(), None
    for index, byte in enumerate(data):
        end = index if guide.mask()[EOS_ID] else end
        if not guide.mask()[byte]:
            break
        guide.take(byte)
    else:
        end = len(data) if guide.mask()[EOS_ID] else end
    return None if end is None else data[end:].decode(errors="replace")


def is_written(form: ChatForm, before: str, text: str) -> bool:
    """Whether answers that must be calls may be this one, but for reasoning and the end of a turn."""
    if form.thinking is not None:
        before_call, is_reasoned, _ = text[: text.index("fnone")].rpartition(form.thinking.end)
        text = text[len(before_call) + len(is_reasoned) :]
    tools = [Tool(name, "does", SCHEMA) for name, _ in CALLS]
    grammar = tool_grammar(led(form, before, False), tools, ToolChoice("required"), True, "")
    rest = rest_of(grammar, text)
    return rest is not None and "alpha" not in rest and len(rest) < MAX_END


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_grammars_accept_what_a_template_shows(path: Path):
    tokenizer = RealTemplate(path)
    form = form_of(tokenizer, True)
    num_written = 0
    for before, text, _, _ in shown(tokenizer, path.stem in SHOWS_EARLIER):
        if not any(said in text for said in ("CONTENT", "WHY so")):
            num_written += 1
            assert is_written(form, before, text), text
            assert not is_written(form, before, text.replace("alpha", "other")), "a required argument is missing"
    assert bool(num_written) == (path.stem not in SHOWS_NONE)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_the_place_of_an_answer_is_behind_the_reasoning(path: Path):
    tokenizer = RealTemplate(path)
    thinking = form_of(tokenizer).thinking
    try:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": "USER"}], **DIRECT)
    except BadRequest:
        pytest.skip("the template wants tools")
    if thinking is None:
        return
    answer = prompt.partition("USER")[2] + lead_of(tokenizer, thinking).marks
    assert answer.rfind(thinking.begin) <= answer.rfind(thinking.end)
