"""Tokenizer: what the engine, its ranks and the server need of a model's tokenizer; implemented in
engine/text/tokenizer.py.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Ids are 0 .. vocab_size - 1."""

    @property
    def eos_ids(self) -> Set[int]:
        """Tokens that end an answer; may be empty."""

    @property
    def eos_id(self) -> int | None:
        """The token of eos_ids that ends a text, to be shown; None without one."""

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text; None without one."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, those of added tokens included."""

    @property
    def special_texts(self) -> frozenset[str]:
        """The literal texts of all special tokens."""

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Token ids of a text. With `max_tokens`, encoding may stop early: then more than `max_tokens` ids are
        returned.
        """

    def encode_within(self, text: str, max_tokens: int, add_special_tokens: bool = True) -> list[int]:
        """At most `max_tokens` ids: those of the text's beginning, and all that are put around a text."""

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Token ids of two texts together, and the index where the second one begins."""

    def encode_marked(
        self, text: str, marks: Mapping[str, str], add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """As `encode`, with each character of `marks` replaced by the text that it stands for, never as a special
        token.
        """

    def least_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens, found without tokenising; 0 where none is guaranteed."""

    def encode_inside(self, text: str, is_plain: bool = True) -> list[int]:
        """Token ids of a text that continues another one: nothing is put before it, not even the space with which some
        tokenizers begin a text. With `is_plain` no special token is read from it.
        """

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD."""

    def prompt_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes that each token contributes to a prompt's text, without what the tokenizer puts around a text."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token contributes to a text behind others; of a special token its literal text."""

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary spells it; "" for an id outside of it."""

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a special one."""

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        """A conversation as the model's prompt. Raises BadRequest when the template refuses it or there is none."""

    def chat_template(self, has_tools: bool = False) -> str:
        """The source of the template, of the one for tools if `has_tools`; "" when there is none."""
