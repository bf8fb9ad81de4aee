"""Pace: how much of other people's prompts a step computes while somebody waits for a next token.

A step of a whole budget of prompt tokens takes a small machine a fifth of a second and more, and every stream stands
still for as long. What a step takes is learned (cost.py), and prompts get the tokens that fit beside the decodes into
the longest gap that streams shall have.

A prompt is never stopped: a step beside streams computes LEAST_TOKENS of prompts whatever they cost, so one of n
tokens is computed by ceil(n / LEAST_TOKENS) steps in which no other prompt comes first.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from kvloom.contract.config import Limits
from kvloom.engine.schedule.cost import StepCost, decode_load, load_of
from kvloom.engine.schedule.seq import Plan, Seq, Status

GAP_STEPS = 3.0  # the longest gap where none is given, in steps that decode whoever streams or waits to
LEAST_TOKENS = 16  # and their multiples: tiles of the kernels, blocks of the KV cache
FIRST_TOKENS = 128  # before anything was learned, beside streams
FIRST_ALONE_TOKENS = 512  # and without
LONGEST_S = 5.0  # of a step that only computes prompts: whoever comes meanwhile, or leaves, waits for its end
_TIMEOUT_SHARE = 0.25  # of the time after which a rank counts as dead, of any step


class Pace:
    """What share of a step prompts may have, by what steps have been seen to cost. Used by the engine thread alone."""

    def __init__(self, max_gap_s: float | None = None, step_timeout_s: float = 300.0) -> None:
        """`max_gap_s`: what a step beside streams may take; None = GAP_STEPS decodes, 0 = as long as it does."""
        self._max_gap_s = max_gap_s
        self._longest_s = min(LONGEST_S, step_timeout_s * _TIMEOUT_SHARE)
        self._cost = StepCost()

    @property
    def token_s(self) -> float | None:
        """What a prompt's token is believed to take; None before the first step."""
        return self._cost.token_s

    def decode_s(self, seqs: Sequence[Seq]) -> float:
        """What a step that decodes the running sequences is believed to take; 0 before the first, and for none."""
        load = decode_load([seq for seq in seqs if _is_decoding(seq)], 0)
        return self._cost.step_s(load) if load.num_tokens and self._cost.is_known else 0.0

    def limited(self, limits: Limits, seqs: Sequence[Seq]) -> Limits:
        """The budget of the next step."""
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
        """The step has taken so long; to be called before the plan is committed."""
        self._cost.learn(load_of(plan), compute_s)

    def _gap_s(self, decoding: Sequence[Seq], prompts: Sequence[Seq], limits: Limits) -> float:
        """Those who wait to stream count: with them a step will take so long, and a burst is not let in by drips."""
        if self._max_gap_s is not None:
            return self._max_gap_s
        soon = islice((seq for seq in prompts if seq.max_len > len(seq.token_ids)), limits.max_batch - len(decoding))
        return GAP_STEPS * self._cost.step_s(decode_load([*decoding, *soon], limits.max_draft_tokens))

    def _num_fitting(self, prompts: Sequence[Seq], room_s: float, most: int) -> int:
        """Tokens that fit, those in prefill first, then those that wait; whole tiles, one at least."""
        total = 0
        for seq in prompts:
            count = self._cost.num_fitting(seq, room_s)
            total += count
            if count < seq.num_pending or total >= most:
                break
            room_s -= self._cost.prompt_s(seq, count)
        else:
            return most  # whatever else comes fits as well
        return min(most, max(LEAST_TOKENS, total - total % LEAST_TOKENS))


def _is_decoding(seq: Seq) -> bool:
    return seq.status is Status.RUNNING and seq.num_pending == 1
