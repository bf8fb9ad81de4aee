"""Real chat templates, those that llama.cpp is tested with: what each shows of a call is read back as that call.

KVLOOM_LLAMA_CPP names the folder of llama.cpp's source, which holds models/templates; without it these tests are
skipped. `make compat-chats` fetches it.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloom.server.chat.derive import answer_in
from kvloom.server.chat.events import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from kvloom.server.chat.form import ChatForm
from kvloom.server.chat.reasoning import ReasoningSplitter
from kvloom.server.chat.style import form_of
from kvloom.server.chat.tool_calls import make_parser
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
EXTRAS: list[dict[str, Any]] = [
    {"content": "CONTENT here", "reasoning_content": "WHY so", "reasoning": "WHY so", "thinking": "WHY so"},
    {"content": "", "reasoning_content": "WHY so"},
    {"content": ""},
]

NOT_READ = {
    "Apriel-1.6-15b-Thinker-fixed",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "GigaChat3-10B-A1.8B",
    "Kimi-K3",
    "MiniMax-M3",
    "NVIDIA-Nemotron-Nano-v2",
    "google-gemma-4-31B-it",
    "llm-jp-llm-jp-4.1-8b-thinking",
    "meetkai-functionary-medium-v3.2",
    "muse-glimmer",
}
SHOWS_NONE = {
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "HuggingFaceTB-SmolLM3-3B",
    "LFM2-8B-A1B",
    "LFM2.5-Instruct",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "fireworks-ai-llama-3-firefunction-v2",
    "google-gemma-2-2b-it",
    "ibm-granite-granite-3.3-2B-Instruct",
    "llama-cpp-deepseek-r1",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}  # templates that show no call, or refuse it


class RealTemplate(TemplateTokenizer):
    """A real template; its special tokens have names that none of its texts contains."""

    def __init__(self, path: Path) -> None:
        super().__init__("{% set bos_token = '<BOS>' %}{% set eos_token = '<EOS>' %}" + path.read_text())


def shown(tokenizer: RealTemplate) -> Iterator[tuple[str, str, dict[str, Any], int]]:
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
                text = answer_in(render, asked, message, TOOLS)
                if text is None or "fnone" not in text or (is_text and ('\\\\\\"q' in text or "{{" in text)):
                    continue  # refused, not shown, or not as a call of arguments in this shape
                whole = render([asked, message], TOOLS, False)
                yield whole[: len(whole) - len(text)], text.removesuffix("<EOS>"), message, count


def read(form: ChatForm, before: str, text: str) -> tuple[str, str, list[tuple[str, Any]]]:
    """The text, the reasoning and the calls of an answer that comes character by character."""
    thinking, parser = form.thinking, make_parser(form.calls, {name: SCHEMA for name, _ in CALLS}, form.hidden)
    is_open = bool(thinking and thinking.begin and before.rstrip().endswith(thinking.begin))
    splitter = ReasoningSplitter(is_open, thinking) if thinking else None
    events: list[Any] = []
    for char in text:
        events += splitter.add(char) if splitter else [TextDelta(char)]
    events += splitter.finish() if splitter else []
    why = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    found = [more for event in events if isinstance(event, TextDelta) for more in parser.add(event.text)]
    told, calls = "", []
    for event in found + parser.finish():
        if isinstance(event, TextDelta):
            told += event.text
        elif isinstance(event, ToolCallStart):
            calls.append([event.name, ""])
        elif isinstance(event, ToolCallArguments):
            calls[event.index][1] += event.text
    return told.strip(), why, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_what_a_template_shows_is_read_back(path: Path, request: pytest.FixtureRequest):
    if path.stem in NOT_READ:
        request.applymarker(pytest.mark.xfail(reason="a form that is not read yet", strict=True))
    tokenizer = RealTemplate(path)
    form, cases = form_of(tokenizer, True), 0
    for before, text, message, count in shown(tokenizer):
        content = message["content"] if "CONTENT" in text else ""
        why = "WHY so" if "WHY so" in text else ""
        wanted = CALLS[: count if "fntwo" in text else 1]
        assert read(form, before, text) == (content, why, wanted), text
        cases += 1
    assert bool(cases) == (path.stem not in SHOWS_NONE)
