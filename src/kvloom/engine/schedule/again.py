"""Again: a step that computes one more token of each sequence of the last one is sent in a few bytes. Pure."""

from kvloom.contract.messages import Batch, Work


class Again:
    """The sequences of the last step that computed something, and where each goes on. Owned by the engine."""

    def __init__(self, is_taken: bool) -> None:
        """`is_taken`: takes_again of RankInfo."""
        self._is_taken = is_taken
        self._ends: list[tuple[int, int]] = []  # sequence id, position behind its work

    def shorten(self, batch: Batch) -> None:
        """Make it `again` of messages.Batch where that says the same. To be called with every batch that is sent."""
        works = batch.work
        if not (self._is_taken and works):
            return
        is_next = [(work.id, work.start) for work in works] == self._ends
        batch.again = is_next and all([_is_plain(work) for work in works])
        self._ends = [(work.id, work.start + work.num_tokens) for work in works]
        if batch.again:
            batch.work = [work for work in works if work.blocks]


def _is_plain(work: Work) -> bool:
    return work.num_tokens == 1 and not (work.draft or work.loads) and work.kept < 0 and work.state < 0
