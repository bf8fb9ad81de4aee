"""Which replica a prompt goes to: the one that gives its first token soonest, by what is known. Pure.

What a replica has before it is counted in tokens: those it has been given and not computed, those of the prompt that it
does not hold. The guard bounds what a wrong guess costs: nobody gets a prompt who has more before him than `factor`
times the least loaded has, and `slack_tokens`. The choice of two random replicas takes the less loaded of them, which
has no less than the least loaded: so no prompt is put behind more than the guard allows over what that choice finds.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Guard:
    """How much more than the least loaded a replica may have before it, for the sake of what it holds."""

    factor: float = 2.0
    slack_tokens: int = 2048


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica as a prompt would find it; all in tokens."""

    id: str
    load: int  # to be computed before the prompt
    num_known: int = 0  # of the prompt, in its prefix cache
    num_loadable: int = 0  # behind those, in the outer pool


@dataclass(frozen=True, slots=True)
class Rules:
    """`load_cost`: what loading a token from the outer pool costs, as a share of computing it."""

    guard: Guard = Guard()
    load_cost: float = 0.15


def cost(candidate: Candidate, num_tokens: int, rules: Rules) -> float:
    """Tokens that are computed before the first one of an answer to a prompt of `num_tokens`."""
    loaded = min(candidate.num_loadable, num_tokens - candidate.num_known)
    computed = num_tokens - candidate.num_known - loaded
    return candidate.load + computed + rules.load_cost * loaded


def choose(candidates: Sequence[Candidate], num_tokens: int, rules: Rules, turn: int = 0) -> list[str]:
    """The ids of all candidates, the best first. `turn` settles who is first among equals."""
    if not candidates:
        return []
    least = min(candidate.load for candidate in candidates)
    limit = rules.guard.factor * least + rules.guard.slack_tokens
    order = {candidate.id: (index - turn) % len(candidates) for index, candidate in enumerate(candidates)}

    def rank(candidate: Candidate) -> tuple[bool, float, float, int]:
        is_over = candidate.load > limit
        first = candidate.load if is_over else cost(candidate, num_tokens, rules)
        return is_over, first, candidate.load, order[candidate.id]

    return [candidate.id for candidate in sorted(candidates, key=rank)]
