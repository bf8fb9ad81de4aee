"""Repute: how suspicious a request is, by the rank crashes that happened while it was computed. Pure.

A request in a step that the rank does not survive may be the cause: it becomes a suspect, and is computed alone from
then on. If the rank dies again, it was this one. A suspect that has been computed again and has brought a few more
tokens is cleared; two, because the first comes of a prefill and the second of a decode. Each further crash doubles the
tokens it must bring, so that a request that kills only in company, or rarely, gets few tries.
"""

from dataclasses import dataclass

FIRST_PROOF = 2  # tokens that clear a suspect after its first crash
MAX_PROOF = 32


@dataclass(slots=True)
class Repute:
    """A request's crashes. Lengths are in tokens, those of its answer included."""

    num_crashes: int = 0  # of ranks that died while they computed it
    cleared_len: int = 0

    def is_suspect(self, length: int) -> bool:
        """Whether the request is a suspect; `length` is its present number of tokens."""
        return length < self.cleared_len

    def accuse(self, length: int) -> bool:
        """A rank died while it computed the request. Returns whether it was a suspect already, and so is guilty."""
        is_guilty = self.is_suspect(length)
        self.num_crashes += 1
        self.cleared_len = length + min(FIRST_PROOF << (self.num_crashes - 1), MAX_PROOF)
        return is_guilty
