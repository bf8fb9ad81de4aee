"""The breaker: a failing peer is left alone, each time for longer, and then tried by one call at a time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ems.common.breaker import Breaker


def test_a_breaker_of_one_failure_pauses_at_once_and_no_longer_than_its_longest():
    breaker = Breaker(max_failures=1, first_pause_s=1.0, last_pause_s=4.0)
    assert (breaker.allows(0.0), breaker.pause_s(0.0)) == (True, 0.0)
    pauses = []
    for _ in range(4):
        breaker.fail(10.0)
        pauses.append(breaker.pause_s(10.0))
    assert pauses == [1.0, 2.0, 4.0, 4.0]
    assert (breaker.pause_s(12.0), breaker.pause_s(14.0)) == (2.0, 0.0)
    breaker.succeed()
    breaker.fail(20.0)
    assert breaker.pause_s(20.0) == 1.0


@given(
    st.lists(st.tuples(st.sampled_from(["fail", "succeed", "ask"]), st.integers(0, 160)), max_size=40),
    st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_a_breaker_lets_one_call_a_pause_through(steps, max_failures):
    """Below its number of failures it is closed; when open, it allows no call before the pause is over, then one."""
    breaker, now_s = Breaker(max_failures), 0.0
    for step, passed_s in steps:
        now_s += passed_s / 4
        if step == "fail":
            breaker.fail(now_s)
            is_opened = breaker.failures >= max_failures
            assert (0.5 <= breaker.pause_s(now_s) <= 30.0) == is_opened
            assert breaker.is_open(now_s) == is_opened
        elif step == "succeed":
            breaker.succeed()
            assert not breaker.is_open(now_s)
        else:
            is_closed, is_paused = breaker.failures < max_failures, breaker.is_open(now_s)
            assert breaker.allows(now_s) == (not is_paused)
            assert breaker.allows(now_s) == is_closed, "one call tries, the others wait for its outcome"


def test_the_breaker_opens_tries_once_and_closes():
    breaker = Breaker()
    breaker.fail(0.0)
    assert breaker.allows(0.0)
    breaker.fail(0.0)
    assert not breaker.allows(0.4)
    assert breaker.allows(0.6)
    assert not breaker.allows(0.6), "one call tries, the others wait for its outcome"
    breaker.fail(0.7)
    assert not breaker.allows(1.6)
    assert breaker.allows(1.8)
    breaker.succeed()
    assert breaker.allows(1.8)
    assert not breaker.is_open(1.8)


def test_calls_that_are_given_up_early_count_together():
    breaker = Breaker(patience_s=0.2)
    for _ in range(3):
        breaker.give_up(0.05, 1.0)
    assert breaker.failures == 0
    breaker.give_up(0.01, 1.0, is_answered=True)
    assert breaker.waited_s == 0.0, "the peer is there"
    for _ in range(5):
        breaker.give_up(0.05, 1.0)
    assert breaker.failures == 2
    assert not breaker.allows(1.0)


def test_a_call_that_had_its_time_counts_whatever_came():
    breaker = Breaker(patience_s=0.2)
    for _ in range(2):
        breaker.give_up(0.25, 1.0, is_answered=True)
    assert breaker.failures == 2


def test_the_one_call_after_a_pause_decides_however_short_it_was():
    breaker = Breaker()
    breaker.fail(0.0)
    breaker.fail(0.0)
    assert breaker.allows(1.0)
    breaker.give_up(0.01, 1.0)
    assert breaker.pause_s(1.0) == 1.0
