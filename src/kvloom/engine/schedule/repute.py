"""Repute: what is known of a request by the crashes of ranks that computed it. Pure.

Whoever is computed in a step that the rank does not survive may be what it died of: a suspect, computed alone from then
on. When the rank dies again, it was this one. A suspect that has been computed again and has brought a few tokens more
is cleared: its first comes of a prefill, its second of a decode. With every crash of its life it has to bring twice as
many, so that what kills only in company, or seldom, has few tries.
"""

from dataclasses import dataclass

FIRST_PROOF = 2  # tokens that clear a suspect
MAX_PROOF = 32


@dataclass(slots=True)
class Repute:
    """Lengths are in tokens, the answer's always among them."""

    num_crashes: int = 0  # of ranks that died while they computed it
    cleared_len: int = 0

    def is_suspect(self, length: int) -> bool:
        """Whether a rank may have died of it; `length` is what it has now."""
        return length < self.cleared_len

    def accuse(self, length: int) -> bool:
        """A rank died while it computed this. Returns whether it was a suspect before, and so is guilty."""
        is_guilty = self.is_suspect(length)
        self.num_crashes += 1
        self.cleared_len = length + min(FIRST_PROOF << (self.num_crashes - 1), MAX_PROOF)
        return is_guilty
