"""Reasoning of earlier answers, under the names that the model's template reads. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvloom.server.chat.derive import REASONING_NAMES, with_reasoning

_USUAL = ("reasoning_content", "reasoning")  # names for a template that shows no reasoning when it is asked


def shapes_of(names: Sequence[str], messages: Sequence[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The conversation with its reasoning, and without it, for templates that refuse it beside a call or a text.
    `names`: ChatForm.kept.
    """
    shown, bare = ([_with_reasoning(names, message, is_kept) for message in messages] for is_kept in (True, False))
    yield shown
    if bare != shown:
        yield bare


def _with_reasoning(names: Sequence[str], message: Mapping[str, Any], is_kept: bool) -> dict[str, Any]:
    why = message.get("reasoning_content") or message.get("reasoning")
    if not why or message["role"] != "assistant":
        return dict(message)
    plain = {name: value for name, value in message.items() if name not in REASONING_NAMES}
    for name in (names or _USUAL) if is_kept else ():
        plain = with_reasoning(plain, name, why)
    return plain
