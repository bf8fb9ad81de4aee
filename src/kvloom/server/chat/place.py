"""The place of the answer: where its text begins at once, without reasoning; found by asking the chat template."""

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

from kvloom.contract.errors import BadRequest
from kvloom.contract.tokenizer import Tokenizer
from kvloom.server.chat.form import Thinking

# template values of answers without reasoning, by either name that templates have for it
DIRECT: Mapping[str, Any] = {"enable_thinking": False, "thinking": False}
_REASONING: Mapping[str, Any] = dict.fromkeys(DIRECT, True)
_TEXT = "Zkvltext"  # stands for an answer; no template contains it
_ASKED = {"role": "user", "content": "Qkvl"}


class Lead(NamedTuple):
    """What comes between the prompt, as the template ends it with DIRECT, and the answer's text.

    `marks` belong to the prompt: an empty reasoning, or the marks of a channel. `space` is white space with which the
    answer's first token begins.
    """

    marks: str = ""
    space: str = ""


def lead_of(tokenizer: Tokenizer, thinking: Thinking | None) -> Lead:
    """`thinking`: the marks around the model's reasoning; None = it has none."""
    return _lead_of(cast("Hashable", tokenizer), thinking)


@lru_cache(64)
def _lead_of(known: Hashable, thinking: Thinking | None) -> Lead:
    tokenizer = cast("Tokenizer", known)
    try:
        prompt = _rendered(tokenizer, [_ASKED], DIRECT)
    except BadRequest:
        return Lead()
    shown = _between(tokenizer, prompt)
    if shown is not None and shown.strip():
        return Lead(shown)
    has_switch = prompt != _rendered(tokenizer, [_ASKED], _REASONING)
    if thinking is None or (shown is not None and has_switch):
        return Lead("", shown or "")
    end = prompt.rstrip()
    if end.endswith(thinking.begin):
        return Lead(f"\n{thinking.end}\n\n")
    is_off = end.endswith(thinking.end) or has_switch
    return Lead("", shown or "") if is_off else Lead(f"{thinking.begin}\n\n{thinking.end}\n\n")


def _between(tokenizer: Tokenizer, prompt: str) -> str | None:
    """What the template writes between a prompt and the text of its answer; None where it does not show that."""
    messages = [_ASKED, {"role": "assistant", "content": _TEXT}]
    try:
        whole = _rendered(tokenizer, messages, {**DIRECT, "add_generation_prompt": False})
    except BadRequest:
        return None
    if not whole.startswith(prompt):
        return None
    before, is_shown, _ = whole[len(prompt) :].partition(_TEXT)
    return before if is_shown else None


def _rendered(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
    """Raises BadRequest."""
    given = {"add_generation_prompt": True, **values}
    return tokenizer.apply_chat_template([dict(message) for message in messages], **given)
