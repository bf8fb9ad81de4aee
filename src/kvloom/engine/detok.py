"""Detokenizer: tokens to text, one at a time, never half a UTF-8 character."""

import codecs
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Protocol


class Vocabulary(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def eos_ids(self) -> AbstractSet[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...


def text_bytes(vocabulary: Vocabulary, skips_special: bool) -> Callable[[int], bytes]:
    """Bytes of a token; special ones have none where they are skipped."""
    if not skips_special:
        return vocabulary.token_bytes
    return lambda token_id: b"" if vocabulary.is_special(token_id) else vocabulary.token_bytes(token_id)


class Detokenizer:
    """Joins the bytes that tokens stand for and gives out whole characters.

    `token_bytes(id)` gives a token's bytes. Bytes that are no UTF-8 come out as U+FFFD, an unfinished character at the
    end (`finish`) likewise, so joined texts equal the whole answer's bytes decoded with errors="replace".
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        """Characters completed by this token; may be empty."""
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """What is left when no more tokens come: "" or one U+FFFD."""
        return self._decoder.decode(b"", final=True)
