"""Detokenizer: tokens to text, one at a time, never half a UTF-8 character."""

import codecs
from collections.abc import Callable

from kvloom.contract.tokenizer import Tokenizer


def text_bytes(vocabulary: Tokenizer, skips_special: bool) -> Callable[[int], bytes]:
    """Bytes of a token; special ones have none where they are skipped."""
    if not skips_special:
        return vocabulary.token_bytes
    return lambda token_id: b"" if vocabulary.is_special(token_id) else vocabulary.token_bytes(token_id)


class Detokenizer:
    """Joins the bytes that tokens stand for and gives out whole characters.

    `token_bytes(id)` gives a token's bytes. Bytes that cannot become a character come out as U+FFFD. One that is not
    finished when no more tokens come is never given out: it is none, and the client could not tell what it was to be.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        """Characters completed by this token; may be empty."""
        return self._decoder.decode(self._token_bytes(token_id))
