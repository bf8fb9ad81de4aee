"""Giving: a prompt whose KV is saved to the outer tier for another engine: its blocks, and where layers keep states the
last one that is taken of it. Pure.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Giving:
    """How many full blocks of a prompt are saved, or being saved, to the outer tier, in chain order."""

    num_blocks: int  # full blocks of the prompt
    needs_state: bool = False  # without one of their layers' states, its blocks are of no use
    num_sent: int = 0  # blocks handed to saves so far
    pending: dict[int, int] = field(default_factory=dict)  # transfer id -> index of its first block
    # index of a transfer's first block -> number of its blocks that were stored
    moved: dict[int, int] = field(default_factory=dict)
    state: int | None = None  # id of the transfer of the state; None = not handed to a save yet
    state_at: int = 0  # full blocks before the state
    is_state_moved: bool | None = None  # None = not known yet

    @property
    def is_pending(self) -> bool:
        """Whether a transfer of it is under way."""
        return bool(self.pending) or (self.state is not None and self.is_state_moved is None)

    @property
    def num_given(self) -> int:
        """Length of the gapless prefix of stored blocks, up to the state if one is needed: what another engine will
        find.
        """
        end = 0
        while (count := self.moved.get(end, 0)) > 0:
            end += count
        if not self.needs_state:
            return end
        return self.state_at if self.is_state_moved and self.state_at <= end else 0

    def sent(self, transfer: int, count: int) -> None:
        """A transfer of the next `count` blocks was submitted."""
        self.pending[transfer] = self.num_sent
        self.num_sent += count

    def sent_state(self, transfer: int, at: int) -> None:
        """The transfer of the state behind `at` full blocks, and maybe a part of one, was submitted."""
        self.state, self.state_at = transfer, at

    def finish(self, transfer: int, count: int) -> None:
        """The tier has stored the first `count` blocks of a transfer, or the state if that is 1."""
        if transfer == self.state:
            self.is_state_moved = count > 0
        else:
            self.moved[self.pending.pop(transfer)] = count

    def lose(self, is_computed: bool) -> None:
        """The rank is gone, and transfers under way are lost. A prompt that is computed again is saved again from the
        beginning.
        """
        self.pending.clear()
        self.is_state_moved = self.is_state_moved or False
        if not is_computed:
            self.num_sent = 0
            self.moved.clear()
            self.state = self.is_state_moved = None
