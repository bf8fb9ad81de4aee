"""Drafting: what sequences draft for their next steps, and which therefore do not run ahead."""

from collections.abc import Callable, Iterable

from kvloom.contract.messages import Forced
from kvloom.engine.live import Live
from kvloom.engine.schedule.pace import Pace
from kvloom.engine.schedule.profit import Turnaround


class Drafting:
    """Decides from what steps cost (`pace`), and from what a rank waits for where nothing runs ahead."""

    def __init__(self, pace: Pace, clock: Callable[[], float]) -> None:
        self._pace, self._clock = pace, clock
        self._turnaround = Turnaround()

    def sent(self, is_alone: bool) -> None:
        """A step is sent to the rank; `is_alone`: none is under way."""
        self._turnaround.sent(self._clock(), is_alone)

    def ended(self, compute_s: float, waits: bool) -> None:
        """A step's result is there. `waits`: none is under way, and there is more to do."""
        self._turnaround.ended(self._clock(), compute_s, waits)

    def draft(self, lives: Iterable[Live], forced: Iterable[Forced], runs_ahead: bool) -> None:
        """After sequences have their sampled tokens: guess what follows, and draft what pays. A sequence that drafts
        does not run ahead, because a draft follows from the last token; nor do those that often begin to.
        """
        guessing = [(live.seq, live.guesser) for live in lives if live.guesser is not None]
        told = {one.id: one.token_ids for one in forced}
        for seq, guesser in guessing:
            guesser.follow(seq.token_ids, seq.max_len - len(seq.token_ids) - 1, told.get(seq.id, ()))
        seqs, guessers = [seq for seq, _ in guessing], [guesser for _, guesser in guessing]
        gap_s = self._turnaround.seconds if runs_ahead else 0.0
        lengths = self._pace.draft_lengths(seqs, [guesser.chances() for guesser in guessers], gap_s)
        waits = self._pace.pays_to_wait(seqs, [guesser.start_share for guesser in guessers], gap_s)
        for (seq, guesser), length in zip(guessing, lengths, strict=True):
            guesser.decided(length)
            seq.may_run_ahead = not (length or waits)
            seq.draft = [] if seq.num_computing else list(guesser.guess.tokens[:length])
