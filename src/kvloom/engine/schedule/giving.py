"""Giving: a prompt whose KV is saved to the outer tier for another engine: its blocks, and what layers keep of its end,
the last state that is taken of it or the blocks of its last window. Pure.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Giving:
    """How many full blocks of a prompt are saved, or being saved, to the outer tier, in chain order."""

    num_blocks: int  # full blocks of the prompt
    needs_end: bool = False  # without what layers keep of its end, its blocks are of no use
    num_sent: int = 0  # blocks handed to saves so far
    pending: dict[int, int] = field(default_factory=dict)  # transfer id -> index of its first block
    # index of a transfer's first block -> number of its blocks that were stored
    moved: dict[int, int] = field(default_factory=dict)
    end: int | None = None  # id of the transfer of that; None = not handed to a save yet
    end_at: int = 0  # full blocks before it
    is_end_moved: bool | None = None  # None = not known yet

    @property
    def is_pending(self) -> bool:
        """Whether a transfer of it is under way."""
        return bool(self.pending) or (self.end is not None and self.is_end_moved is None)

    @property
    def num_given(self) -> int:
        """Length of the gapless prefix of stored blocks, up to what is needed of its end: what another engine finds."""
        stored = 0
        while (count := self.moved.get(stored, 0)) > 0:
            stored += count
        if not self.needs_end:
            return stored
        return self.end_at if self.is_end_moved and self.end_at <= stored else 0

    def sent(self, transfer: int, count: int) -> None:
        """A transfer of the next `count` blocks was submitted."""
        self.pending[transfer] = self.num_sent
        self.num_sent += count

    def sent_end(self, transfer: int, at: int) -> None:
        """The transfer of what is kept behind `at` full blocks, and maybe a part of one, was submitted."""
        self.end, self.end_at = transfer, at

    def finish(self, transfer: int, count: int) -> None:
        """The tier has stored the first `count` blocks of a transfer; of that of the end, all if it is not 0."""
        if transfer == self.end:
            self.is_end_moved = count > 0
        else:
            self.moved[self.pending.pop(transfer)] = count

    def lose(self, is_computed: bool) -> None:
        """The rank is gone, and transfers under way are lost. A prompt that is computed again is saved again from the
        beginning.
        """
        self.pending.clear()
        self.is_end_moved = self.is_end_moved or False
        if not is_computed:
            self.num_sent = 0
            self.moved.clear()
            self.end = self.is_end_moved = None
