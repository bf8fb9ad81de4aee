"""Detokenizer: tokens to text, one at a time, never half a UTF-8 character."""

import codecs
from collections.abc import Callable

from kvloom.contract.tokenizer import Tokenizer


def text_bytes(vocabulary: Tokenizer, skips_special: bool) -> Callable[[int], bytes]:
    """Bytes of a token by id; none for special tokens when `skips_special`."""
    if not skips_special:
        return vocabulary.token_bytes
    return lambda token_id: b"" if vocabulary.is_special(token_id) else vocabulary.token_bytes(token_id)


class Detokenizer:
    """Joins the bytes of tokens and returns whole characters.

    `token_bytes(id)` gives a token's bytes. Invalid bytes become U+FFFD. A character that is still unfinished after the
    last token is never returned: the client could not tell what it was to be.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        """The characters that this token completes; may be empty."""
        return self._decoder.decode(self._token_bytes(token_id))
