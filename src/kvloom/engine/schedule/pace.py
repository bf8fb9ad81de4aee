"""Pace: limits the prompt tokens of a step while other sequences decode, so that their streams do not stall.

A step with a full budget of prompt tokens takes a small machine 0.2 s or more, and every stream pauses for as long.
Pace predicts step times (cost.py), and gives prompts as many tokens as fit, beside the decodes, into the longest gap
that streams may have.

A prompt always advances: a step beside decodes computes at least LEAST_TOKENS of prompts whatever they cost. So a
prompt of n tokens takes at most ceil(n / LEAST_TOKENS) steps in which no other prompt comes first.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from kvloom.contract.config import Limits
from kvloom.engine.schedule.by_model import Price
from kvloom.engine.schedule.commit import is_void
from kvloom.engine.schedule.cost import StepCost, decode_load, load_of
from kvloom.engine.schedule.profit import Base, Bid, best_rate, draft_lengths
from kvloom.engine.schedule.seq import Plan, Seq, Status

GAP_STEPS = 3.0  # default gap, in steps that decode all sequences that stream or wait to
LEAST_TOKENS = 16  # shares are multiples of it: tiles of the kernels, blocks of the KV cache
FIRST_TOKENS = 128  # before any step was measured, beside decodes
FIRST_ALONE_TOKENS = 512  # and without
LONGEST_S = 5.0  # of a step of prompts alone: new and aborted requests wait for its end
_TIMEOUT_SHARE = 0.25  # of the step timeout, after which a rank counts as dead; for any step


class Pace:
    """The prompts' share of a step, from measured costs of steps. Used by the engine's thread alone."""

    def __init__(self, max_gap_s: float | None = None, step_timeout_s: float = 300.0) -> None:
        """`max_gap_s`: time that a step beside decodes may take; None = GAP_STEPS decode steps, 0 = unlimited."""
        self._max_gap_s = max_gap_s
        self._longest_s = min(LONGEST_S, step_timeout_s * _TIMEOUT_SHARE)
        self._cost = StepCost()

    @property
    def token_s(self) -> float | None:
        """Predicted seconds of one prompt token; None before the first step."""
        return self._cost.token_s

    def decode_s(self, seqs: Sequence[Seq]) -> float:
        """Predicted seconds of a step that decodes the running sequences; 0 before the first step, or if none runs."""
        load = decode_load([seq for seq in seqs if _is_decoding(seq)], 0)
        return self._cost.step_s(load) if load.num_tokens and self._cost.is_known else 0.0

    def base(self, seqs: Sequence[Seq], gap_s: float) -> Base | None:
        """The step that decodes `seqs` without drafts; None before the first step."""
        if not self._cost.is_known:
            return None
        return Base(len(seqs), max(self._cost.step_s(decode_load(seqs, 0)), 1e-12), gap_s)

    def least_chance(self, base: Base, most: int) -> float:
        """Of a guessed token to pay in such a step, whatever sequence it is of; see profit.py."""
        return base.least_chance(self._cost.least_row_s, most)

    def draft_lengths(self, guesses: Sequence[tuple[Seq, Sequence[float], Price]], base: Base) -> list[int]:
        """How many tokens of each guess to draft; see profit.py. Of a guess: the sequence, the chances of its tokens,
        and what a draft model takes for it.
        """
        return draft_lengths([self._bid(*guess) for guess in guesses], base)

    def draft_rate(self, seq: Seq, chances: Sequence[float], price: Price, base: Base) -> float:
        """Tokens a second of a sequence of this step that drafts what pays of a guess."""
        return best_rate(self._bid(seq, chances, price), base.seconds / base.num_seqs)

    def _bid(self, seq: Seq, chances: Sequence[float], price: Price) -> Bid:
        return Bid(chances, self._cost.row_s(seq), bool(seq.states), price.pass_s, price.num_given)

    def limited(self, limits: Limits, seqs: Sequence[Seq]) -> Limits:
        """`limits` with the token budget of the next step."""
        prompts = [seq for seq in seqs if seq.status is Status.RUNNING and seq.num_pending > 1]
        prompts += [seq for seq in seqs if seq.status is Status.WAITING]
        if not prompts:
            return limits
        decoding = [seq for seq in seqs if _is_decoding(seq)]
        is_paced = bool(decoding) and self._max_gap_s != 0
        if not self._cost.is_known:
            most = FIRST_TOKENS if is_paced else FIRST_ALONE_TOKENS
        else:
            decode_s = self._cost.step_s(decode_load(decoding, limits.max_draft_tokens))
            gap_s = self._gap_s(decoding, prompts, limits) if is_paced else self._longest_s
            most = self._num_fitting(prompts, min(gap_s, self._longest_s) - decode_s, limits.prefill_tokens)
        return limits if most >= limits.prefill_tokens else replace(limits, max_prefill_tokens=most)

    def learn(self, plan: Plan, compute_s: float) -> None:
        """Learn what the step took, if the rank has computed all of it. Call it before the plan is committed."""
        if any(map(is_void, plan.steps)):
            return
        self._cost.learn(load_of(plan), compute_s)

    def _gap_s(self, decoding: Sequence[Seq], prompts: Sequence[Seq], limits: Limits) -> float:
        """The gap is computed as if waiting prompts decoded already, so a burst is not admitted one by one."""
        if self._max_gap_s is not None:
            return self._max_gap_s
        soon = islice((seq for seq in prompts if seq.max_len > len(seq.token_ids)), limits.max_batch - len(decoding))
        return GAP_STEPS * self._cost.step_s(decode_load([*decoding, *soon], limits.max_draft_tokens))

    def _num_fitting(self, prompts: Sequence[Seq], room_s: float, most: int) -> int:
        """Prompt tokens that fit into `room_s`: running prefills first, then waiting ones; whole tiles, one at
        least.
        """
        total = 0
        for seq in prompts:
            count = self._cost.num_fitting(seq, room_s)
            total += count
            if count < seq.num_pending or total >= most:
                break
            room_s -= self._cost.prompt_s(seq, count)
        else:
            return most  # all that is left fits as well
        return min(most, max(LEAST_TOKENS, total - total % LEAST_TOKENS))


def _is_decoding(seq: Seq) -> bool:
    return seq.status is Status.RUNNING and seq.num_pending == 1
