"""Drafting: what sequences draft for their next steps, and which therefore do not run ahead."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvloom.contract.config import EngineConfig
from kvloom.contract.messages import BY_MODEL, Batch, StepOutput
from kvloom.engine.live import Live
from kvloom.engine.schedule.by_model import FREE, Belief, ModelCost, Price
from kvloom.engine.schedule.guessing import Bar, Guesser, guesser_of
from kvloom.engine.schedule.pace import Pace
from kvloom.engine.schedule.profit import STRETCH, Base, Turnaround, pays_to_wait
from kvloom.engine.schedule.recent import Recent
from kvloom.engine.schedule.seq import Plan, Seq, SeqStep

Guessing = Sequence[tuple[Seq, Guesser]]


class Drafting:
    """Decides from what steps cost (`pace`), and from what a rank waits for where nothing runs ahead."""

    def __init__(self, config: EngineConfig, pace: Pace, clock: Callable[[], float], reads_along: bool = False) -> None:
        """`reads_along`: of RankInfo."""
        self._config, self._pace, self._clock = config, pace, clock
        self._turnaround = Turnaround()
        self._recent = Recent()
        self._model = Belief() if config.draft_model else None
        self._model_cost = ModelCost()
        self._turn = 0  # number of the sequence that learns what seldom pays
        self._reads_along = reads_along
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
        """A request has ended. One that has got no token leaves no text."""
        if live.guesser is not None and len(live.seq.token_ids) > live.seq.num_prompt:
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

        Where no guess pays, whatever it were, none is made.
        """
        guessing = [(live.seq, live.guesser) for live in lives if live.guesser is not None]
        seqs = [seq for seq, _ in guessing]
        base = self._pace.base(seqs, self._turnaround.seconds if runs_ahead else 0.0) if guessing else None
        least = self._pace.least_chance(base, guessing[0][1].most) if base is not None else 1.0
        if base is None or (least >= 1.0 and not output.drafts):
            for seq in seqs:
                seq.may_run_ahead = True
            return
        self._follow(guessing, output, least)
        lengths = self._lengths(guessing, base)
        waits = pays_to_wait([guesser.start_share for _, guesser in guessing], base)
        for (seq, guesser), length in zip(guessing, lengths, strict=True):
            guesser.decided(length)
            seq.may_run_ahead = not (length or waits)
            seq.draft = [] if seq.num_computing else list(guesser.guess.tokens[:length])

    def _follow(self, guessing: Guessing, output: StepOutput, least: float) -> None:
        """Guess for each; one of them, each in its turn, learns what seldom pays: so that takes as long however many
        there are.
        """
        told, drafted = {one.id: one.token_ids for one in output.forced}, {one.id: one for one in output.drafts}
        self._turn = (self._turn + 1) % len(guessing)
        for i, (seq, guesser) in enumerate(guessing):
            most = seq.max_len - len(seq.token_ids) - 1
            forced, own = told.get(seq.id, ()), drafted.get(seq.id)
            guesser.follow(seq.token_ids, most, forced, own, Bar(least, i == self._turn))

    def _lengths(self, guessing: Guessing, base: Base) -> list[int]:
        """How many tokens each drafts. Where there is a draft model each takes its guess or that of the texts, and the
        sequences that take it share its passes: with fewer of them it costs each more, so they choose again.
        """
        if self._model is None:
            return self._paying(guessing, [FREE] * len(guessing), base)
        num_sharing = len(guessing)
        while True:
            prices = [self._choose(seq, guesser, num_sharing, base) for seq, guesser in guessing]
            lengths = self._paying(guessing, prices, base)
            drafting = [
                guesser.is_by_model and length > 0 for (_, guesser), length in zip(guessing, lengths, strict=True)
            ]
            if sum(drafting) in (0, num_sharing):
                break
            num_sharing = sum(drafting)
        if not any(drafting):
            self._model.rest()
        self._room = self._model_cost.room(STRETCH * base.seconds)
        return lengths

    def _paying(self, guessing: Guessing, prices: Sequence[Price], base: Base) -> list[int]:
        lengths = [0] * len(guessing)
        bidding = [i for i, (_, guesser) in enumerate(guessing) if guesser.guess.tokens]
        if bidding:
            bids = [(guessing[i][0], guessing[i][1].guess.chances, prices[i]) for i in bidding]
            for i, length in zip(bidding, self._pace.draft_lengths(bids, base), strict=True):
                lengths[i] = length
        return lengths

    def _choose(self, seq: Seq, guesser: Guesser, num_sharing: int, base: Base) -> Price:
        """Let a sequence take the guess that brings most tokens a second. Returns what the draft model takes for it."""
        num_read = seq.num_cached if guesser.num_read is None else guesser.num_read
        num_read = len(seq.token_ids) - 1 if self._reads_along else num_read
        num_given = len(guesser.by_model.tokens) - guesser.by_model.tokens.count(BY_MODEL)
        price = self._model_cost.price(seq, num_read, num_given, num_sharing)
        by_text = self._pace.draft_rate(seq, guesser.by_text.chances, FREE, base)
        by_model = self._pace.draft_rate(seq, guesser.by_model.chances, price, base)
        guesser.choose(by_model > by_text)
        return price if guesser.is_by_model else FREE
