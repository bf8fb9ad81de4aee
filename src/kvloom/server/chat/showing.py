"""A conversation as a model's own chat template can show it, found by asking the template once."""

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from kvloom.contract.errors import BadRequest
from kvloom.contract.tokenizer import Tokenizer
from kvloom.server.chat.content import with_parts
from kvloom.server.chat.derive import Render
from kvloom.server.chat.fold import folded
from kvloom.server.chat.form import ChatForm
from kvloom.server.chat.parts import reads_parts_alone
from kvloom.server.chat.tool_prompt import calls_in_text, results_in_text, with_tools_in_text
from kvloom.server.chat.turns import ROLES, Turns, shows_role, turns_of

Messages = Sequence[Mapping[str, Any]]


def as_shown(
    tokenizer: Tokenizer, style: ChatForm, messages: Messages, tools: Messages, field: str
) -> tuple[list[dict[str, Any]], Messages]:
    """The messages, and the tools that the template is shown. Raises BadRequest naming `field` for a role that it shows
    nowhere.
    """
    for role in {message["role"] for message in messages} - set(ROLES):
        if not _shows_role(cast("Hashable", tokenizer), role):
            raise BadRequest(
                field, f"hold one of the role {role[:40]!r}, which the model's chat template does not show"
            )
    turns = turns_for(tokenizer, bool(tools) and style.takes_tools)
    if not style.takes_tools:
        return folded(with_tools_in_text(_parsed(messages), tools), turns), ()
    if not turns.has_calls:
        messages = calls_in_text(_parsed(messages), style.calls)
    if not turns.has_results and not turns.has_results_within:
        messages = results_in_text(messages)
    return folded(messages, turns), tools


def turns_for(tokenizer: Tokenizer, has_tools: bool) -> Turns:
    """What the model's template takes."""
    return _turns_for(cast("Hashable", tokenizer), has_tools)


def _parsed(messages: Messages) -> list[dict[str, Any]]:
    return folded(messages, Turns())


@lru_cache(64)
def _turns_for(known: Hashable, has_tools: bool) -> Turns:
    return turns_of(_renderer(cast("Tokenizer", known)), has_tools)


@lru_cache(64)
def _shows_role(known: Hashable, role: str) -> bool:
    return shows_role(_renderer(cast("Tokenizer", known)), role)


def _renderer(tokenizer: Tokenizer) -> Render:
    has_parts = reads_parts_alone(tokenizer)

    def render(messages: Messages, tools: Messages, is_open: bool) -> str:
        formed = with_parts(messages) if has_parts else [dict(message) for message in messages]
        shown = [dict(tool) for tool in tools] or None
        return tokenizer.apply_chat_template(formed, tools=shown, add_generation_prompt=is_open)

    return render
