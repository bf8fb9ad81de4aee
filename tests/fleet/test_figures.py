"""The figures of a fleet over time: sums of what replicas report, in which no counter falls."""

from kvloom.engine.counts import STEP_TOKEN_BOUNDS
from kvloom.engine.histogram import Histogram
from kvloom.engine.stats import Stats
from kvloom.fleet.figures import Totals, told
from kvloom.fleet.routing.board import View


def view(id: str, num_tokens: int) -> View:
    """A replica that has generated so many tokens, in steps of 8, and runs one request."""
    steps = Histogram(STEP_TOKEN_BOUNDS)
    for _ in range(num_tokens // 8):
        steps.add(8)
    stats = Stats(num_running=1, num_blocks=64, total_output_tokens=num_tokens, decode_step_s=0.5, step_tokens=steps)
    return View(id, stats={"figures": told(stats)})


def figures(stats: Stats) -> tuple[float, ...]:
    return (
        stats.total_output_tokens,
        stats.step_tokens.count,
        stats.step_tokens.sum,
        stats.num_running,
        stats.num_blocks,
    )


def test_what_a_lost_replica_had_counted_stays_in_the_sums_and_what_it_held_does_not():
    totals = Totals()
    assert figures(totals.sum([view("a", 80), view("b", 16)])) == (96, 12, 96, 2, 128)
    assert figures(totals.sum([view("b", 24)])) == (104, 13, 104, 1, 64)
    assert figures(totals.sum([view("b", 24), View("c")])) == (104, 13, 104, 1, 64), "c has not reported yet"
    assert figures(totals.sum([view("b", 24), view("c", 8)])) == (112, 14, 112, 2, 128)
    assert figures(totals.sum([])) == (112, 14, 112, 0, 0)
    assert totals.sum([view("b", 24)]).decode_step_s == 0.5


def test_accepted_tokens_are_added_by_position_also_where_a_replica_had_fewer_positions():
    def accepted(id: str, *counts: int) -> View:
        stats = Stats(accepted_by_position=counts, step_tokens=Histogram(STEP_TOKEN_BOUNDS))
        return View(id, stats={"figures": told(stats)})

    totals = Totals()
    assert totals.sum([accepted("a", 5, 3, 1), accepted("b"), accepted("c", 2)]).accepted_by_position == (7, 3, 1)
    assert totals.sum([accepted("c", 4, 1)]).accepted_by_position == (9, 4, 1)


def test_a_replica_that_is_found_again_is_counted_once():
    totals = Totals()
    for views in ([view("a", 80)], [], [view("a", 88)]):
        found = totals.sum(views)
    assert figures(found) == (88, 11, 88, 1, 64)


def test_replicas_that_come_and_go_for_long_are_counted_and_forgotten():
    totals = Totals()
    for number in range(300):
        found = totals.sum([view(f"replica-{number}", 8)])
        assert figures(found) == (8 * (number + 1), number + 1, 8 * (number + 1), 1, 64)
