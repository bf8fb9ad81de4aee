"""How many replicas are wanted, by the tokens of prompts that wait."""

from types import SimpleNamespace

import pytest

from kvloom.fleet.scaling import METRIC, on_queued_tokens, wanted


@pytest.mark.parametrize(
    ("queued", "busy", "number"), [(0, 0, 0), (0, 1, 1), (1, 1, 1), (100, 3, 1), (101, 3, 2), (1000, 3, 10)]
)
def test_so_many_replicas_for_so_many_tokens(queued, busy, number):
    assert wanted(queued, busy, 100) == number


@pytest.mark.parametrize(("queued", "number"), [((), 1), ((90, 80), 2), ((900, 800), 4)])
def test_serve_is_told_a_number_within_its_bounds(queued, number):
    context = SimpleNamespace(
        aggregated_metrics={METRIC: dict(enumerate(queued))},
        total_num_requests=len(queued),
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 100),
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
    )
    assert on_queued_tokens(context) == (number, {})
