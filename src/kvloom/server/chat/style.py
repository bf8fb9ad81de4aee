"""What a model's chat template reveals about its tool calls and its reasoning."""

import re
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from kvloom.contract.errors import BadRequest
from kvloom.contract.tokenizer import Tokenizer
from kvloom.server.chat.reasoning import END_THINK, THINK
from kvloom.server.chat.tool_calls import FORMS, OPEN, PYTHON_TAG, ToolForm
from kvloom.server.chat.xml_calls import FUNCTION


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """How a model writes tool calls and reasoning."""

    form: ToolForm = "hermes"
    takes_tools: bool = False  # the template shows tools to the model; otherwise a prompt of ours does
    is_thinking: bool = False  # answers may begin with <think>


def style_of(template: str, tool_parser: str = "auto", reasoning_parser: str = "auto") -> ChatStyle:
    """`template`: its own text. A parser other than "auto" is a ToolForm, or "think" or "none" for reasoning."""
    form: ToolForm = "hermes"
    if tool_parser != "auto":
        form = next(known for known in FORMS if known == tool_parser)  # config/keys.py lists the same
    elif FUNCTION in template:
        form = "qwen3_coder"
    elif OPEN not in template and (PYTHON_TAG in template or '{"name": function name, "parameters"' in template):
        form = "llama3"
    is_thinking = THINK in template and END_THINK in template
    if reasoning_parser != "auto":
        is_thinking = reasoning_parser == "think"
    return ChatStyle(form, re.search(r"\btools\b", template) is not None, is_thinking)


_TRACE = "\ue0c1"  # a character that no template contains


def takes_parts(tokenizer: Tokenizer) -> bool:
    """Whether the chat template takes content as a list of parts, and renders an image among them.

    It is found by trying, because templates express this in many ways.
    """
    return _takes_parts(cast("Hashable", tokenizer))


@lru_cache(16)
def _takes_parts(known: Hashable) -> bool:
    tokenizer = cast("Tokenizer", known)
    image, text = {"type": "image"}, {"type": "text", "text": _TRACE}
    try:
        shown = tokenizer.apply_chat_template([{"role": "user", "content": [image, text]}])
        without = tokenizer.apply_chat_template([{"role": "user", "content": [text]}])
    except BadRequest:
        return False
    is_printed = re.search(r"""['"]type['"]""", shown) is not None
    return _TRACE in shown and not is_printed and len(shown) > len(without)
