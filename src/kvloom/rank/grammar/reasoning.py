"""A guide for answers that begin with reasoning: unrestricted until its end mark, which is forced after a budget; then
the grammar.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]


class Guide(Protocol):
    """What the sampler needs of a sequence's guide. Owned by the rank's thread."""

    def mask(self) -> Mask | None:
        """[num_logits] bool: tokens that may come next, at least one. None = every token."""
        ...

    def problem(self) -> str:
        """Why no token can follow, if that is known when `is_ready`; "" = one can."""
        ...

    def is_ready(self) -> bool:
        """Whether `mask` returns without waiting. If not, the sequence gets no token in this step, so that others go
        on.
        """
        ...

    def take(self, token_id: int) -> None:
        """The token was chosen."""
        ...

    def forced(self) -> Sequence[int]:
        """Tokens that must follow those chosen, the next one first, as far as that is known soon."""
        ...

    def close(self) -> None:
        """The sequence has ended: work that was not started for it need not be."""
        ...

    def is_free(self, num_more: int) -> bool:
        """Whether every token is allowed during the next `num_more` tokens too, whichever they are."""
        ...


class EndMark:
    """The text that ends the reasoning, and how tokens spell it. `tokens`: the bytes of each id."""

    def __init__(
        self, text: str, ids: Sequence[int], tokens: Sequence[bytes], eos_ids: Sequence[int], size: int
    ) -> None:
        """`ids`: the mark as tokens. `size`: length of a mask."""
        self.text, self.ids = text.encode(), ids
        self._tokens, self._eos_ids, self._size = tokens, eos_ids, size
        self._inside: dict[int, Mask] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id outside the vocabulary."""
        return self._tokens[token_id] if token_id < len(self._tokens) else b""

    def written(self, tail: bytes) -> int:
        """How many bytes of the mark's beginning stand at the end of `tail`, which does not contain the whole mark."""
        return next((n for n in range(min(len(tail), len(self.text) - 1), 0, -1) if tail.endswith(self.text[:n])), 0)

    def only(self, token_id: int) -> Mask:
        """The mask that allows this token alone."""
        mask = np.zeros(self._size, np.bool_)
        mask[token_id] = True
        return mask

    def inside(self, num_written: int) -> Mask:
        """The mask before a grammar begins: no end of the answer, and no token that goes on behind the mark."""
        if num_written not in self._inside:
            mask = np.ones(self._size, np.bool_)
            rest = self.text[num_written:]
            mask[list(self._eos_ids)] = False
            mask[[id for id, token in enumerate(self._tokens) if len(token) > len(rest) and token.startswith(rest)]] = (
                False
            )
            mask[len(self._tokens) :] = False
            self._inside[num_written] = mask
        return self._inside[num_written]


class ReasoningGuide:
    """`grammar`: guide of the answer behind the reasoning; None = unrestricted. `max_tokens`: of the reasoning; then
    the mark is forced.
    """

    def __init__(self, mark: EndMark, grammar: Guide | None, max_tokens: int | None) -> None:
        self._mark, self._grammar, self._max_tokens = mark, grammar, max_tokens
        self._num_tokens = 0
        self._tail = b""
        self._is_over = False
        self._forced = list(mark.ids) if max_tokens == 0 else []

    def mask(self) -> Mask | None:
        if self._is_over:
            return None if self._grammar is None else self._grammar.mask()
        if self._forced:
            return self._mark.only(self._forced[0])
        return None if self._grammar is None else self._mark.inside(self._mark.written(self._tail))

    def problem(self) -> str:
        return self._grammar.problem() if self._is_over and self._grammar is not None else ""

    def is_ready(self) -> bool:
        return not self._is_over or self._grammar is None or self._grammar.is_ready()

    def take(self, token_id: int) -> None:
        if self._is_over:
            if self._grammar is not None:
                self._grammar.take(token_id)
            return
        self._num_tokens += 1
        tail = self._tail + self._mark.bytes_of(token_id)
        was_forced = bool(self._forced)
        self._forced = self._forced[1:]
        self._is_over = self._mark.text in tail or (was_forced and not self._forced)
        self._tail = tail[-len(self._mark.text) :]
        if not self._is_over and self._num_tokens == self._max_tokens:
            self._forced = list(self._mark.ids)

    def forced(self) -> Sequence[int]:
        if not self._is_over:
            return self._forced
        return () if self._grammar is None else self._grammar.forced()

    def close(self) -> None:
        if self._grammar is not None:
            self._grammar.close()

    def is_free(self, num_more: int) -> bool:
        if self._grammar is not None or self._forced:
            return False
        return self._is_over or self._max_tokens is None or self._num_tokens + num_more < self._max_tokens
