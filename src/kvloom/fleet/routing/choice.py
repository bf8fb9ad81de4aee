"""Which replica gets a prompt: the one expected to produce its first token soonest. Pure.

A replica's load is counted in tokens: those assigned to it and not computed yet, plus those of the prompt that it does
not hold. The guard bounds the cost of a wrong estimate: no prompt goes to a replica whose load exceeds `factor` times
the smallest load plus `slack_tokens`. (The common choice of the less loaded of two random replicas finds no less than
the smallest load, so the guard's bound holds relative to it as well.)
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Guard:
    """How much more than the least loaded replica another one may have, because of the prefix that it holds."""

    factor: float = 2.0
    slack_tokens: int = 2048


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica as a prompt would find it; all fields in tokens."""

    id: str
    load: int  # to be computed before the prompt
    num_known: int = 0  # tokens of the prompt in its prefix cache
    num_loadable: int = 0  # tokens after those in the outer pool


@dataclass(frozen=True, slots=True)
class Rules:
    """`load_cost`: what loading a token from the outer pool costs, as a share of computing it."""

    guard: Guard = Guard()
    load_cost: float = 0.15


def cost(candidate: Candidate, num_tokens: int, rules: Rules) -> float:
    """Tokens that are computed before the first answer token of a prompt of `num_tokens`."""
    loaded = min(candidate.num_loadable, num_tokens - candidate.num_known)
    computed = num_tokens - candidate.num_known - loaded
    return candidate.load + computed + rules.load_cost * loaded


def choose(candidates: Sequence[Candidate], num_tokens: int, rules: Rules, turn: int = 0) -> list[str]:
    """The ids of all candidates, the best first. `turn` breaks ties."""
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
