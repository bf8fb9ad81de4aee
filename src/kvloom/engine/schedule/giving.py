"""Giving: a prompt whose KV blocks are saved to the outer tier for another engine. Pure."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Giving:
    """How many full blocks of a prompt are saved, or being saved, to the outer tier, in chain order."""

    num_blocks: int  # full blocks of the prompt
    num_sent: int = 0  # blocks handed to saves so far
    pending: dict[int, int] = field(default_factory=dict)  # transfer id -> index of its first block
    # index of a transfer's first block -> number of its blocks that were stored
    moved: dict[int, int] = field(default_factory=dict)

    @property
    def num_given(self) -> int:
        """Length of the gapless prefix of stored blocks: what another engine will find."""
        end = 0
        while (count := self.moved.get(end, 0)) > 0:
            end += count
        return end

    def sent(self, transfer: int, count: int) -> None:
        """A transfer of the next `count` blocks was submitted."""
        self.pending[transfer] = self.num_sent
        self.num_sent += count

    def finish(self, transfer: int, count: int) -> None:
        """The tier has stored the first `count` blocks of a transfer."""
        self.moved[self.pending.pop(transfer)] = count

    def lose(self, is_computed: bool) -> None:
        """The rank is gone, and transfers under way are lost. A prompt that is computed again is saved again from the
        beginning.
        """
        self.pending.clear()
        if not is_computed:
            self.num_sent = 0
            self.moved.clear()
