"""The form of a model's answers, found by asking its chat template."""

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

from kvloom.contract.errors import BadRequest
from kvloom.contract.tokenizer import Tokenizer
from kvloom.engine.text.stop import overlap
from kvloom.server.chat.derive import Around, around_text, calls_of, lead_of_calls, reasoning_of
from kvloom.server.chat.form import (
    CHANNELS,
    HERMES,
    ID,
    KNOWN,
    LLAMA3,
    QWEN3_CODER,
    REASONING,
    SHOWN_BY,
    CallForm,
    Channels,
    ChatForm,
)
from kvloom.server.serving.parsers import REASONING_PARSERS, TOOL_PARSERS

_FALLBACKS = (REASONING["think"], REASONING["mistral"])  # of templates that show no reasoning of earlier answers


def form_of(
    tokenizer: Tokenizer, has_tools: bool = False, tool_parser: str = "auto", reasoning_parser: str = "auto"
) -> ChatForm:
    """A parser other than "auto" overrules the template: a name of TOOL_PARSERS, of REASONING_PARSERS."""
    return _form_of(cast("Hashable", tokenizer), has_tools, tool_parser, reasoning_parser)


@lru_cache(64)
def _form_of(known: Hashable, has_tools: bool, tool_parser: str, reasoning_parser: str) -> ChatForm:
    tokenizer = cast("Tokenizer", known)
    template = tokenizer.chat_template(has_tools)

    def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], is_open: bool) -> str:
        known = [dict(message) for message in messages]
        tools = [dict(tool) for tool in tools] if has_tools else []
        return tokenizer.apply_chat_template(known, tools=tools or None, add_generation_prompt=is_open)

    calls_name = TOOL_PARSERS.get(tool_parser, "")
    reasoning_name = REASONING_PARSERS.get(reasoning_parser, "")
    channels = _channels_of(template, calls_name, reasoning_name)
    shown = reasoning_of(render)
    thinking = shown.marks if shown else None
    if channels is not None:
        thinking = channels.thinking
    elif thinking is None:
        thinking = next((pair for pair in _FALLBACKS if pair.begin in template and pair.end in template), None)
    if reasoning_name:
        thinking = REASONING.get(reasoning_name)
    if channels is not None and (not calls_name or channels.calls.name == calls_name):
        calls, found, around = channels.calls, "a mark in the template", Around("", ())
    elif calls_name:
        calls, found = KNOWN[calls_name], "the configuration"
        around = around_text(render, shown, calls)
    else:
        by_mark = next((KNOWN[name] for mark, name in SHOWN_BY.items() if re.search(mark, template)), None)
        own = calls_of(render, thinking.end if thinking else "")
        own = by_mark if by_mark and (own is None or own.name not in KNOWN) else own
        calls, found = _calls_of(template, own, own is by_mark)
        around = around_text(render, shown, own)
    if calls_name:
        found = "the configuration"
    lead = lead_of_calls(render, calls, thinking.end if thinking else "") if has_tools and channels is None else ""
    marks = [
        *((*calls.marks, calls.quote, lead) if has_tools else ()),
        *((thinking.begin, thinking.end) if thinking else ()),
    ]
    marks += [channels.start, channels.body, *channels.ends] if channels else around.all
    specials = sorted(text for text in tokenizer.special_texts if text and any(text in mark for mark in marks))
    ids = ((text, tokenizer.encode_inside(text, is_plain=False)) for text in specials)
    return ChatForm(
        calls=replace(calls, lead=lead, special_ids=tuple((text, one[0]) for text, one in ids if len(one) == 1)),
        thinking=thinking,
        channels=channels,
        hidden=around.all,
        before_text=around.before,
        specials=tuple(specials),
        takes_tools=re.search(r"\btools\b", template) is not None,
        kept=shown.names if shown else (),
        found=found,
    )


def led(style: ChatForm, prompt: str, is_thinking: bool) -> CallForm:
    """The form of calls with what a grammar writes before the first one, or before a text: what the prompt lacks."""
    channels = style.channels
    if channels is None:
        head = style.before_text if is_thinking or not prompt.rstrip().endswith(style.before_text) else ""
        lead = style.calls.lead
        num_begun = 0 if is_thinking or lead.isspace() else overlap(prompt.rstrip(), f"{lead}{ID}")
        return replace(style.calls, lead=lead[num_begun:], text_lead=head)
    start = channels.start if is_thinking else ""
    return replace(style.calls, lead=start, text_lead=f"{start}{channels.plain}{channels.body}")


def _channels_of(template: str, calls_name: str, reasoning_name: str) -> Channels | None:
    """The channels that the configuration names, or else those of a mark in the template."""
    for name in (calls_name, reasoning_name):
        named = next((row for row in CHANNELS if name == row.name), None)
        if named is not None:
            return named
    if calls_name:
        return None
    return next((row for row in CHANNELS if re.search(row.mark, template)), None)


def _calls_of(template: str, shown: CallForm | None, is_by_mark: bool) -> tuple[CallForm, str]:
    if shown is not None:
        return shown, "a mark in the template" if is_by_mark else "the template"
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
