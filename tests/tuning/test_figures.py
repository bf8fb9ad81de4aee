"""The figures of a run, computed from known times."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.tuning.figures import Spread, Times, figures, percentile, spread, table

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)


@given(VALUES, st.floats(0.1, 100))
def test_a_percentile_is_a_value_that_enough_do_not_exceed(values, percent):
    ordered = sorted(values)
    found = percentile(ordered, percent)
    assert found in ordered
    needed = math.ceil(len(values) * percent / 100)
    assert sum(v <= found for v in ordered) >= needed
    assert sum(v < found for v in ordered) < max(1, needed)


def test_nothing_measured_has_no_spread():
    assert spread([]) is None
    assert spread([2.0, 1.0, 3.0]) == Spread(2.0, 2.0, 3.0, 3.0, 3.0)


def test_gaps_are_shared_by_tokens_that_come_together():
    times = Times(5, started_s=10.0)
    times.take(1, 10.5)
    times.take(0, 10.6)
    times.take(2, 11.5)
    assert (times.first_token_s, times.gaps_s, times.num_output) == (0.5, [0.5, 0.5], 3)


def test_the_figures_of_a_run():
    good, bad = Times(10, 0.0), Times(7, 0.0, error="the model failed")
    for now_s in (0.25, 0.5, 1.0):
        good.take(1, now_s)
    found = figures([good, bad], elapsed_s=2.0)
    assert (found.num_requests, found.num_failed) == (2, 1)
    assert (found.average_input_length, found.average_output_length) == (10, 3)
    assert (found.first_token_ms.p50, found.lpot_ms.mean) == (250, 375)
    assert (found.generate_speed, found.total_speed, found.requests_per_s) == (1.5, 6.5, 0.5)
    shown = dict(table(found))
    assert shown["lpot"].startswith("375.00 ms mean, 250.00 p50, 500.00 p90")
    assert figures([], 0.0).generate_speed == pytest.approx(0)


def test_times_that_nothing_was_measured_of_are_not_shown_as_0():
    failed, single = Times(7, 0.0, error="the model failed"), Times(7, 0.0)
    single.take(1, 0.25)
    assert (figures([failed], 1.0).first_token_ms, figures([failed], 1.0).lpot_ms) == (None, None)
    shown = dict(table(figures([single], 1.0)))
    assert (shown["first token"].split(",")[0], shown["lpot"]) == ("250.00 ms mean", "none measured")
