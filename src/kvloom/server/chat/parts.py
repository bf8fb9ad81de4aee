"""Whether a chat template reads the content of a message as a list of parts alone, found by asking it."""

from collections.abc import Hashable
from functools import lru_cache
from typing import cast

from kvloom.contract.errors import BadRequest
from kvloom.contract.tokenizer import Tokenizer

_TRACE = "\ue0c2"  # a character that no template contains


def reads_parts_alone(tokenizer: Tokenizer) -> bool:
    """Whether the template loses a text that is given as one, and shows it as a part: so do those of many text models
    that were cut from models that see.
    """
    return _reads_parts_alone(cast("Hashable", tokenizer))


@lru_cache(16)
def _reads_parts_alone(known: Hashable) -> bool:
    tokenizer = cast("Tokenizer", known)
    return not _shows(tokenizer, _TRACE) and _shows(tokenizer, [{"type": "text", "text": _TRACE}])


def _shows(tokenizer: Tokenizer, content: object) -> bool:
    try:
        return _TRACE in tokenizer.apply_chat_template([{"role": "user", "content": content}])
    except BadRequest:
        return False
