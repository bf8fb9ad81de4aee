"""The guarantees of scheduling policies for priorities, deadlines and tenants, over whole loads in simulated time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.contract.config import EngineConfig
from kvloom.engine.schedule.policies import Turns
from kvloom.tuning.simulate import simulate
from kvloom.tuning.trace import Arrival
from tests.tuning.test_simulate import make_times

LOADS = st.lists(
    st.builds(
        Arrival,
        st.floats(0, 300),
        st.integers(1, 30),
        st.integers(1, 20),
        st.integers(0, 5),
        st.sampled_from([0.5, 5.0, 60.0]),
    ),
    min_size=2,
    max_size=15,
)
SLOW = make_times(num_blocks=40, base_s=2.0)  # a step takes seconds, so that queues form


def first_tokens(trace: list[Arrival], **fields: object) -> list[float]:
    """The time of each request's first token, on the trace's clock."""
    config = EngineConfig(backend="fake", max_batch=2, max_tokens_per_step=16, **fields)
    found = simulate(trace, config, SLOW)
    return [a.arrival_s + (run.first_token_s or 0.0) for a, run in zip(trace, found.times, strict=True)]


@settings(max_examples=60, deadline=None)
@given(LOADS)
def test_no_privilege_overtakes_by_more_than_its_lead(trace):
    started = first_tokens(trace)
    for early, early_start in zip(trace, started, strict=True):
        for late, late_start in zip(trace, started, strict=True):
            if early.arrival_s + Turns.max_lead_s < late.arrival_s:
                assert early_start <= late_start


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 12), st.integers(0, 11), st.sampled_from([{"priority": 1}, {"slo_s": 0.5}]))
def test_of_those_that_come_together_the_urgent_one_is_first(count, position, privilege):
    trace = [Arrival(0.0, 10, 5, **privilege if i == position % count else {"priority": 4}) for i in range(count)]
    started = first_tokens(trace)
    assert started[position % count] == min(started)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 25), st.integers(1, 12), st.floats(0, 60), st.floats(0.05, 2.0))
def test_a_crowd_of_one_tenant_does_not_hold_up_another(crowd, output, arrival_s, fair_token_s):
    trace = [Arrival(0.0, 10, output, tenant="crowd") for _ in range(crowd)]
    trace.append(Arrival(arrival_s, 10, output, tenant="one"))
    *others, one = first_tokens(trace, fair_token_s=fair_token_s)
    ahead = sum(arrival_s < start <= one for start in others)
    share = int(arrival_s / ((10 + output) * fair_token_s)) + 1  # of the crowd: served at its fair rate by then
    assert ahead <= 2 + share


def test_without_fairness_the_crowd_does_hold_it_up():
    trace = [Arrival(0.0, 10, 10, tenant="crowd") for _ in range(20)] + [Arrival(1.0, 10, 10, tenant="one")]
    *others, one = first_tokens(trace)
    assert max(others) <= one
    *_, fair = first_tokens(trace, fair_token_s=1.0)
    assert fair < one / 3


@pytest.mark.parametrize("policy", [0, 1, 3])
@settings(max_examples=30, deadline=None)
@given(LOADS, st.sampled_from([0, 3, 100]))
def test_every_request_ends_with_all_its_tokens_under_each_policy(policy, trace, num_host_blocks):
    config = EngineConfig(
        backend="fake", max_batch=4, max_tokens_per_step=16, prefill_policy=policy, decode_policy=policy,
        num_blocks=16, num_host_blocks=num_host_blocks, fair_token_s=0.1,
    )  # fmt: skip
    found = simulate(trace, config, SLOW)
    assert [run.num_output for run in found.times] == [a.output_tokens for a in trace]
    assert all(run.ended_s is not None for run in found.times)
