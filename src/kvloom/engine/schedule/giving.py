"""Giving: a prompt whose KV blocks another engine takes up out of the outer tier. Pure."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Giving:
    """How far the full blocks of a sequence's prompt are on their way into the outer tier, in chain order."""

    num_blocks: int  # full blocks of the prompt
    num_sent: int = 0  # of these, given to saves
    pending: dict[int, int] = field(default_factory=dict)  # transfer -> number of its first block
    moved: dict[int, int] = field(default_factory=dict)  # number of a transfer's first block -> blocks that are there

    @property
    def num_given(self) -> int:
        """Blocks that are there without a gap, from the first on: what another engine will find."""
        end = 0
        while (count := self.moved.get(end, 0)) > 0:
            end += count
        return end

    def sent(self, transfer: int, count: int) -> None:
        """The next `count` blocks are on their way."""
        self.pending[transfer] = self.num_sent
        self.num_sent += count

    def finish(self, transfer: int, count: int) -> None:
        """The tier has stored the first `count` blocks of a transfer."""
        self.moved[self.pending.pop(transfer)] = count

    def lose(self, is_computed: bool) -> None:
        """The rank is gone, and what was on its way. A prompt that is computed again is given again."""
        self.pending.clear()
        if not is_computed:
            self.num_sent = 0
            self.moved.clear()
