"""Greedy answers to prompts of several lengths, which tests of a family compare over all schedules."""

from collections.abc import Sequence
from dataclasses import replace

from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from tests.support.engine.engines import run_all, tokens_of

LENGTHS = (3, 40, 90)
LENGTH = 100  # most tokens of a prompt with its answer
MOST = 40  # of an answer, which crosses the ends of two blocks


def prompt(length: int) -> tuple[int, ...]:
    return tuple((7 * i + length) % 128 for i in range(length))


def num_answered(length: int) -> int:
    """Tokens of the answer to a prompt of that length."""
    return min(MOST, LENGTH - length)


def requests(lengths: Sequence[int] = LENGTHS) -> list[Request]:
    return [
        Request(f"{n}", prompt(n), SamplingParams(temperature=0, max_tokens=num_answered(n), ignore_eos=True))
        for n in lengths
    ]


def answers(engine: Engine, lengths: Sequence[int] = LENGTHS, is_drawn: bool = False) -> list[list[int]]:
    """The tokens of each, all asked for at once.

    is_drawn: by a seed, for models whose likeliest token is always the one before.
    """
    asked = requests(lengths)
    if is_drawn:
        asked = [replace(each, params=replace(each.params, temperature=1.0, seed=7)) for each in asked]
    found = run_all(engine, *asked)
    return [tokens_of(found[request.id]) for request in asked]
