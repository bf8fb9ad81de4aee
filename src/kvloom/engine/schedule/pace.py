"""Pace: how much of other people's prompts a step computes while somebody waits for a next token.

A step of a whole budget of prompt tokens takes a small machine a fifth of a second, and every stream stands still for
as long. What a token costs is learned from the steps, so that a quick machine is never held back.
"""

from collections.abc import Sequence
from dataclasses import replace

from kvloom.contract.config import Limits
from kvloom.engine.schedule.seq import Seq, Status

LEAST_TOKENS = 64  # a step computes so many whatever they cost, so that prompts get on
LEAST_DEAR_TOKENS = 32  # and of those that cost more
FIRST_TOKENS = 128  # before anything was measured
_WEIGHT = 0.2  # of the newest step, when it was quicker than was thought; a slower one counts at once


class Pace:
    """Prompts of which every token is wanted (log-probabilities, means) cost more than others and are counted apart."""

    def __init__(self, step_s: float) -> None:
        """`step_s`: what a step with prompts should take; 0 = as long as it does."""
        self._step_s = step_s
        self._token_s: dict[bool, float] = {}  # by whether every token is wanted

    def limited(self, limits: Limits, seqs: Sequence[Seq]) -> Limits:
        """The budget of the next step."""
        if not self._step_s or not any(seq.status is Status.RUNNING and seq.num_pending == 1 for seq in seqs):
            return limits
        is_dear = _is_dear(seqs)
        least = LEAST_DEAR_TOKENS if is_dear else LEAST_TOKENS
        cost_s = self._token_s.get(is_dear)
        most = FIRST_TOKENS if cost_s is None else int(min(self._step_s / cost_s, limits.prefill_tokens))
        most = max(least, most)
        return limits if most >= limits.prefill_tokens else replace(limits, max_prefill_tokens=most)

    def learn(self, seqs: Sequence[Seq], num_tokens: int, compute_s: float) -> None:
        """A step that computed so many tokens of these has taken so long."""
        if num_tokens < LEAST_DEAR_TOKENS or compute_s <= 0:
            return
        kind, new_s = _is_dear(seqs), compute_s / num_tokens
        old_s = self._token_s.get(kind, new_s)
        self._token_s[kind] = max(new_s, old_s + _WEIGHT * (new_s - old_s))


def _is_dear(seqs: Sequence[Seq]) -> bool:
    return any(not seq.may_reuse and seq.num_pending > 1 for seq in seqs)
