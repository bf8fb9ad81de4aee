"""Drafting: what sequences draft for their next steps, and which therefore do not run ahead."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvloom.contract.config import EngineConfig
from kvloom.contract.messages import Forced
from kvloom.engine.live import Live
from kvloom.engine.schedule.guessing import guesser_of
from kvloom.engine.schedule.pace import Pace
from kvloom.engine.schedule.profit import Turnaround
from kvloom.engine.schedule.recent import Recent
from kvloom.engine.schedule.seq import Seq


class Drafting:
    """Decides from what steps cost (`pace`), and from what a rank waits for where nothing runs ahead."""

    def __init__(self, config: EngineConfig, pace: Pace, clock: Callable[[], float]) -> None:
        self._config, self._pace, self._clock = config, pace, clock
        self._turnaround = Turnaround()
        self._recent = Recent()

    def gauges(self, seqs: Sequence[Seq]) -> dict[str, Any]:
        """By field names of Stats: what is believed of steps, and what is kept."""
        believed = {"decode_step_s": self._pace.decode_s(seqs), "prompt_token_s": self._pace.token_s or 0.0}
        return believed | {"recent_text_bytes": self._recent.num_bytes}

    def begin(self, live: Live) -> None:
        """A request has come."""
        live.guesser = guesser_of(self._config, live.request, live.seq, self._recent)

    def leave(self, live: Live) -> None:
        """A request has ended."""
        if live.guesser is not None:
            live.guesser.leave(live.seq.token_ids)

    def forget(self) -> None:
        """Forget the texts of requests that have ended."""
        self._recent.forget()

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
