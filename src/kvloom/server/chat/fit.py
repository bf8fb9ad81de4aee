"""Shortens a chat that is too long, by as few of its oldest messages as possible."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from kvloom.contract.sampling import SamplingParams
from kvloom.server.chat.content import sources_of
from kvloom.server.chat.request import ChatRequest, PreparedChat, prepare
from kvloom.server.errors import PromptTooLong
from kvloom.server.serving.service import GenerationService

_SHARE = 8  # if the answer's length is open, an eighth of the context is reserved for it
Message = Mapping[str, Any]


def prepare_fitting(
    service: GenerationService, request: ChatRequest, params: SamplingParams, context: int
) -> PreparedChat:
    """As `prepare`, of a conversation whose prompt and answer share `context` tokens.

    The system's messages at the beginning stay, and so does the last message; a call stays with its results, or goes
    with them. A chat that is too long for `context` all the same comes back whole. Raises BadRequest naming the field,
    PromptTooLong of the whole chat; a chat with images is never shortened.
    """
    if sources_of(request.messages):  # the tokens of images are known only after the engine has seen them
        return prepare(service, request, params)
    chat, problem = _prepared(service, request, params)
    asked = min(params.max_tokens or 1, context // 2)
    if chat is not None and len(chat.prompt_ids) <= min(service.max_input_tokens, context - asked):
        return chat
    room = min(params.max_tokens or context // _SHARE, context // 2)
    limit = min(service.max_input_tokens, context - room)
    kept, groups = _parts(request.messages)
    fitting = None
    low, high = 1, len(groups) - 1  # number of groups that are dropped
    while low <= high:
        middle = (low + high) // 2
        shorter = replace(request, messages=[*kept, *chain.from_iterable(groups[middle:])])
        tried, _ = _prepared(service, shorter, params)
        if tried is not None and len(tried.prompt_ids) <= limit:
            fitting, high = tried, middle - 1
        else:
            low = middle + 1
    found = fitting or chat
    if found is None:
        assert problem is not None
        raise problem
    return found


def _prepared(
    service: GenerationService, request: ChatRequest, params: SamplingParams
) -> tuple[PreparedChat | None, PromptTooLong | None]:
    """The prepared chat, or the error that says how long it is."""
    try:
        return prepare(service, request, params), None
    except PromptTooLong as problem:
        return None, problem


def _parts(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """Messages that are always kept, and the others in groups that stay or go together, oldest first."""
    num_kept = next(
        (i for i, message in enumerate(messages) if message["role"] not in ("system", "developer")), len(messages)
    )
    groups: list[list[Message]] = []
    for message in messages[num_kept:]:
        if groups and message["role"] == "tool":
            groups[-1].append(message)
        else:
            groups.append([message])
    return list(messages[:num_kept]), groups
