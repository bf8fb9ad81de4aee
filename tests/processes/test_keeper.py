"""Keeper, beside a plain model of it, by any order of calls."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvloom.processes.keeper import Keeper

SILENCE_S = 5.0


class Kept(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.keeper = Keeper(SILENCE_S)
        self.asked = False
        self.silence: list[float] = []  # intervals that have passed since the last sign of life
        self.num_tries = 0

    @rule(interval_s=st.sampled_from((0.5, 1.0, 4.5, 60.0)))
    def time_passes(self, interval_s: float) -> None:
        assert self.keeper.passed(interval_s) == (not self.asked)
        if self.asked:
            self.silence.append(interval_s)
        self.asked = True

    @rule()
    def it_says_something(self) -> None:
        self.keeper.heard()
        self.silence.clear()

    @rule()
    def it_answers(self) -> None:
        self.keeper.heard(is_answer=True)
        self.silence.clear()
        self.asked = False

    @rule()
    def it_cannot_be_started(self) -> None:
        assert self.keeper.pause_s() == min(0.1 * 2**self.num_tries, 10.0)
        self.num_tries += 1

    @invariant()
    def it_hangs_when_it_was_asked_and_is_silent(self) -> None:
        assert self.keeper.is_hung == (self.asked and sum(self.silence) >= SILENCE_S)


TestKeeper = Kept.TestCase
