"""The form of a model's answers, found by asking its chat template."""

import re
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from kvloom.contract.errors import BadRequest
from kvloom.contract.tokenizer import Tokenizer
from kvloom.server.chat.derive import calls_of, hidden_of, thinking_of
from kvloom.server.chat.form import HERMES, KNOWN, LLAMA3, QWEN3_CODER, THINK, CallForm, ChatForm, Thinking

_FALLBACKS = (THINK, Thinking("[THINK]", "[/THINK]"))  # of templates that show no reasoning of earlier answers


def form_of(
    tokenizer: Tokenizer, has_tools: bool = False, tool_parser: str = "auto", reasoning_parser: str = "auto"
) -> ChatForm:
    """A parser other than "auto" overrules the template: a name of form.KNOWN; "think" or "none" for reasoning."""
    return _form_of(cast("Hashable", tokenizer), has_tools, tool_parser, reasoning_parser)


@lru_cache(64)
def _form_of(known: Hashable, has_tools: bool, tool_parser: str, reasoning_parser: str) -> ChatForm:
    tokenizer = cast("Tokenizer", known)
    template = tokenizer.chat_template(has_tools)

    def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], is_open: bool) -> str:
        known = [dict(message) for message in messages]
        tools = [dict(tool) for tool in tools] if has_tools else []
        return tokenizer.apply_chat_template(known, tools=tools or None, add_generation_prompt=is_open)

    thinking = None if reasoning_parser == "none" else thinking_of(render)
    if thinking is None and reasoning_parser != "none":
        shown = (pair for pair in _FALLBACKS if pair.begin in template and pair.end in template)
        thinking = next(shown, THINK if reasoning_parser == "think" else None)
    takes_tools = re.search(r"\btools\b", template) is not None
    if tool_parser != "auto":
        calls, found = KNOWN[tool_parser], "the configuration"
    else:
        calls, found = _calls_of(template, calls_of(render, thinking.end if thinking else ""))
    marks = [*(calls.marks if has_tools else ()), *((thinking.begin, thinking.end) if thinking else ())]
    is_special = any(text in mark for text in tokenizer.special_texts if text for mark in marks)
    return ChatForm(calls, thinking, hidden_of(render, thinking), is_special, takes_tools, found)


def _calls_of(template: str, shown: CallForm | None) -> tuple[CallForm, str]:
    if shown is not None:
        return shown, "the template"
    if QWEN3_CODER.head.strip() in template:
        return QWEN3_CODER, "a mark in the template"
    if HERMES.begin not in template and ("<|python_tag|>" in template or _LLAMA3 in template):
        return LLAMA3, "a mark in the template"
    own = next((form for form in KNOWN.values() if form.begin and form.begin in template), None)
    return (own, "a mark in the template") if own else (HERMES, "a guess")


_LLAMA3 = '{"name": function name, "parameters"'


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
