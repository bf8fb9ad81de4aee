"""Drafting: what sequences draft for their next steps, and which therefore do not run ahead."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvloom.contract.config import EngineConfig
from kvloom.contract.messages import BY_MODEL, Batch, StepOutput
from kvloom.engine.live import Live
from kvloom.engine.schedule.by_model import FREE, Belief, ModelCost, Price
from kvloom.engine.schedule.guessing import Guesser, guesser_of
from kvloom.engine.schedule.pace import Pace
from kvloom.engine.schedule.profit import Turnaround
from kvloom.engine.schedule.recent import Recent
from kvloom.engine.schedule.seq import Plan, Seq, SeqStep

Guessing = Sequence[tuple[Seq, Guesser]]


class Drafting:
    """Decides from what steps cost (`pace`), and from what a rank waits for where nothing runs ahead."""

    def __init__(self, config: EngineConfig, pace: Pace, clock: Callable[[], float]) -> None:
        self._config, self._pace, self._clock = config, pace, clock
        self._turnaround = Turnaround()
        self._recent = Recent()
        self._model = Belief() if config.draft_model else None
        self._model_cost = ModelCost()
        self._room = 0  # tokens of texts that the draft model may read in the next step
        self._num_drafted: dict[int, int] = {}  # tokens that the last step drafted by model, by sequence

    def gauges(self, seqs: Sequence[Seq]) -> dict[str, Any]:
        """By field names of Stats: what is believed of steps, and what is kept."""
        believed = {"decode_step_s": self._pace.decode_s(seqs), "prompt_token_s": self._pace.token_s or 0.0}
        return believed | {"recent_text_bytes": self._recent.num_bytes}

    def begin(self, live: Live) -> None:
        """A request has come."""
        live.guesser = guesser_of(self._config, live.request, live.seq, self._recent, self._model)

    def leave(self, live: Live) -> None:
        """A request has ended."""
        if live.guesser is not None:
            live.guesser.leave(live.seq.token_ids)

    def forget(self) -> None:
        """Forget the texts of requests that have ended."""
        self._recent.forget()

    def send(self, batch: Batch, is_alone: bool) -> None:
        """A step is about to be sent to the rank; `is_alone`: none is under way."""
        batch.draft_room = self._room
        self._turnaround.sent(self._clock(), is_alone)

    def ended(self, compute_s: float, waits: bool) -> None:
        """A step's result is there. `waits`: none is under way, and there is more to do."""
        self._turnaround.ended(self._clock(), compute_s, waits)

    def learn(self, plan: Plan, output: StepOutput) -> None:
        """What a step took, and its drafts. Call it before the plan is committed."""
        self._num_drafted = {one.id: len(one.token_ids) for one in output.drafts}
        model_s = 0.0
        if output.draft_load is not None:
            model_s = output.draft_load.seconds
            self._model_cost.learn(output.draft_load)
        if all(self.num_drafted(step) == len(step.draft) for step in plan.steps):
            self._pace.learn(plan, output.compute_s - model_s)

    def num_drafted(self, step: SeqStep) -> int:
        """How many tokens a sequence has drafted in the last step: the rank may have drafted fewer than planned."""
        return self._num_drafted.get(step.seq.id, len(step.draft))

    def draft(self, lives: Iterable[Live], output: StepOutput, runs_ahead: bool) -> None:
        """After sequences have their sampled tokens: guess what follows, and draft what pays. A sequence that drafts
        does not run ahead, because a draft follows from the last token; nor do those that often begin to.
        """
        guessing = [(live.seq, live.guesser) for live in lives if live.guesser is not None]
        told, drafted = {one.id: one.token_ids for one in output.forced}, {one.id: one for one in output.drafts}
        for seq, guesser in guessing:
            most = seq.max_len - len(seq.token_ids) - 1
            guesser.follow(seq.token_ids, most, told.get(seq.id, ()), drafted.get(seq.id))
        seqs, guessers = [seq for seq, _ in guessing], [guesser for _, guesser in guessing]
        gap_s = self._turnaround.seconds if runs_ahead else 0.0
        lengths = self._lengths(guessing, gap_s)
        waits = self._pace.pays_to_wait(seqs, [guesser.start_share for guesser in guessers], gap_s)
        for (seq, guesser), length in zip(guessing, lengths, strict=True):
            guesser.decided(length)
            seq.may_run_ahead = not (length or waits)
            seq.draft = [] if seq.num_computing else list(guesser.guess.tokens[:length])

    def _lengths(self, guessing: Guessing, gap_s: float) -> list[int]:
        """How many tokens each drafts. Where there is a draft model each takes its guess or that of the texts, and the
        sequences that take it share its passes: with fewer of them it costs each more, so they choose again.
        """
        seqs = [seq for seq, _ in guessing]
        if self._model is None:
            return self._pace.draft_lengths(seqs, [guesser.chances() for _, guesser in guessing], gap_s)
        num_sharing = len(seqs)
        while True:
            prices = [self._choose(seqs, seq, guesser, num_sharing) for seq, guesser in guessing]
            lengths = self._pace.draft_lengths(seqs, [guesser.chances() for _, guesser in guessing], gap_s, prices)
            drafting = [
                guesser.is_by_model and length > 0 for (_, guesser), length in zip(guessing, lengths, strict=True)
            ]
            if sum(drafting) in (0, num_sharing):
                break
            num_sharing = sum(drafting)
        if not any(drafting):
            self._model.rest()
        self._room = self._model_cost.room(self._pace.stretch_s(seqs))
        return lengths

    def _choose(self, seqs: Sequence[Seq], seq: Seq, guesser: Guesser, num_sharing: int) -> Price:
        """Let a sequence take the guess that brings most tokens a second. Returns what the draft model takes for it."""
        num_read = seq.num_cached if guesser.num_read is None else guesser.num_read
        num_given = len(guesser.by_model.tokens) - guesser.by_model.tokens.count(BY_MODEL)
        price = self._model_cost.price(seq, num_read, num_given, num_sharing)
        by_text = self._pace.draft_rate(seqs, seq, guesser.text_chances(), FREE)
        by_model = self._pace.draft_rate(seqs, seq, guesser.model_chances(), price)
        guesser.choose(by_model > by_text)
        return price if guesser.is_by_model else FREE
