"""Prompts: texts to tokens within limits, so that a text that cannot fit is refused before it is tokenised."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvloom.contract.errors import BadRequest
from kvloom.server.errors import PromptTooLong
from kvloom.server.serving.generation import MAX_CHOICES
from kvloom.server.serving.service import GenerationService

# prompt tokens of one request: OpenAI's limit for embeddings, or one whole context if that is longer
MAX_REQUEST_TOKENS = 300_000

_MAX_CHARACTER_BYTES = 4  # of UTF-8


def request_limit(service: GenerationService) -> int:
    """Limit of the tokens of all prompts of a request; also of those counted where nothing is generated."""
    return max(MAX_REQUEST_TOKENS, service.engine.max_seq_len)


def check_count(count: int, field: str, most: int = MAX_CHOICES) -> None:
    """Raises BadRequest naming the prompts' field when a request asks for more answers than `most`."""
    if count > most:
        raise BadRequest(field, f"asks for more than {most} answers in one request")


def encode_text(
    service: GenerationService, text: str, field: str, limit: int, add_special_tokens: bool = True
) -> tuple[int, ...]:
    """The text's tokens, at most `limit`. Raises PromptTooLong."""
    check_fits(service, text, field, limit)
    ids = service.tokenizer.encode(text, add_special_tokens, _enough(limit))
    return _checked(service, ids, field, limit)


def embedded_text(service: GenerationService, text: str, field: str, before: str = "") -> str:
    """What is tokenised of a text to embed. `before`: a prompt of the model's. Raises BadRequest.

    Where the model's form says so, the text is a user's message and the prompt a system message, as in
    sentence-transformers 6; no special tokens are added then, because the template writes them.
    """
    form = service.card.message_form
    if not form:
        return before + text
    turns = [("system", before)] if before else []
    messages: list[dict[str, Any]] = [
        {"role": role, "content": one if form == "flat" else [{"type": "text", "text": one}]}
        for role, one in (*turns, ("user", text))
    ]
    try:
        return service.tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    except BadRequest as error:
        raise BadRequest(field, error.problem) from None


class Marked(NamedTuple):
    """A text with marks (engine/text/marks.py), and the characters that they replace."""

    text: str
    originals: Mapping[str, str]


def encode_marked(
    service: GenerationService, marked: Marked, field: str, limit: int, add_special_tokens: bool = False
) -> tuple[int, ...]:
    """As encode_text. Raises PromptTooLong."""
    text, originals = marked
    if not originals:
        return encode_text(service, text, field, limit, add_special_tokens)
    check_fits(service, text, field, limit)
    ids = service.tokenizer.encode_marked(text, originals, add_special_tokens, _enough(limit))
    return _checked(service, ids, field, limit)


def encode_prompts(
    service: GenerationService,
    items: Sequence[str | Sequence[int]],
    field: str,
    limit: int,
    add_special_tokens: bool = True,
) -> tuple[tuple[int, ...], ...]:
    """Of several texts, or tokens. Raises BadRequest."""
    found: list[tuple[int, ...]] = []
    left = request_limit(service)
    for item in items:
        if isinstance(item, str):
            ids = encode_text(service, item, field, limit, add_special_tokens)
        else:
            ids = _checked(service, item, field, limit)
        left -= len(ids)
        if left < 0:
            raise BadRequest(field, f"has more than {request_limit(service)} tokens in all its prompts")
        found.append(ids)
    return tuple(found)


def begin_of(
    service: GenerationService, item: str | Sequence[int], most: int, add_special_tokens: bool = True
) -> Sequence[int]:
    """The first tokens of a prompt, at most `most`, with all that the tokenizer puts around a text."""
    return service.tokenizer.encode_within(item, most, add_special_tokens) if isinstance(item, str) else item[:most]


def check_fits(service: GenerationService, text: str, field: str, limit: int) -> None:
    """Raises PromptTooLong when the text's length alone shows that it cannot fit."""
    if _MAX_CHARACTER_BYTES * len(text) <= limit:
        return  # not even if every token were one byte
    least = service.tokenizer.least_tokens(text)
    if least > limit:
        raise PromptTooLong(field, least, limit, service.engine.max_seq_len, is_exact=False)


def check_length(service: GenerationService, ids: Sequence[int], field: str, limit: int) -> None:
    """Raises PromptTooLong."""
    _checked(service, ids, field, limit)


def _enough(limit: int) -> int:
    """Tokens are counted up to twice the limit, so that callers slightly above it learn by how much."""
    return 2 * limit


def _checked(service: GenerationService, ids: Sequence[int], field: str, limit: int) -> tuple[int, ...]:
    if len(ids) > limit:
        raise PromptTooLong(field, len(ids), limit, service.engine.max_seq_len, is_exact=len(ids) <= _enough(limit))
    return tuple(ids)
