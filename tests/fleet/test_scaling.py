"""The number of replicas wanted, from the tokens of waiting prompts."""

from types import SimpleNamespace

import pytest

from kvloom.fleet.scaling import MAILBOXES, METRIC, on_queued_tokens, on_requests, wanted


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


@pytest.mark.parametrize(
    ("requests", "mailboxes", "number"),
    [(0, (), 1), (8, (), 1), (8.5, (), 2), (17, (), 3), (100, (), 4), (10, (1, 1), 1), (1, (1, 1), 1)],
)
def test_who_decodes_is_scaled_by_requests_and_mailboxes_are_none(requests, mailboxes, number):
    context = SimpleNamespace(
        aggregated_metrics={MAILBOXES: dict(enumerate(mailboxes))},
        total_num_requests=requests,
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 8),
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
    )
    assert on_requests(context) == (number, {})
