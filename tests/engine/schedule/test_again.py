"""Which steps are sent as `again`: one more token of each sequence of the last step, behind what that computed."""

import pytest

from kvloom.contract.messages import Batch, Work
from kvloom.engine.schedule.again import Again

FIRST = [Work(1, 0, 8, 0, [4]), Work(2, 5, 1, 0, [6])]


def shortened(*batches: list[Work], is_taken: bool = True) -> Batch:
    """The last of `batches` as it is sent."""
    again = Again(is_taken)
    for works in batches:
        batch = Batch([], list(works), [])
        again.shorten(batch)
    return batch


def test_one_more_token_of_each_sequence_is_sent_as_the_blocks_that_are_new():
    batch = shortened(FIRST, [Work(1, 8, 1, 1, [9]), Work(2, 6, 1, 1, [])])
    assert (batch.again, batch.work) == (True, [Work(1, 8, 1, 1, [9])])
    batch = shortened(
        FIRST, [Work(1, 8, 1, 1, [9]), Work(2, 6, 1, 1, [])], [Work(1, 9, 1, 2, []), Work(2, 7, 1, 1, [])]
    )
    assert (batch.again, batch.work) == (True, [])


def test_a_batch_without_work_changes_nothing():
    batch = shortened(FIRST, [], [Work(1, 8, 1, 1, []), Work(2, 6, 1, 1, [])])
    assert (batch.again, batch.work) == (True, [])
    assert not shortened(FIRST, []).again


@pytest.mark.parametrize(
    "works",
    [
        [Work(1, 8, 1, 1, [])],
        [Work(2, 6, 1, 1, []), Work(1, 8, 1, 1, [])],
        [Work(1, 8, 1, 1, []), Work(2, 5, 1, 1, [])],
        [Work(1, 8, 2, 1, []), Work(2, 6, 1, 1, [])],
        [Work(1, 8, 1, 1, [], draft=[3]), Work(2, 6, 1, 1, [])],
        [Work(1, 8, 1, 0, [5], loads=[(0, 5)]), Work(2, 6, 1, 1, [])],
        [Work(1, 8, 1, 1, []), Work(2, 6, 1, 1, []), Work(3, 0, 1, 0, [7])],
        [Work(1, 8, 1, 1, [], kept=3), Work(2, 6, 1, 1, [])],
    ],
    ids=[
        "fewer",
        "another order",
        "computed once more",
        "two tokens",
        "a draft",
        "copied back",
        "more",
        "a state kept",
    ],
)
def test_any_other_step_is_sent_whole(works):
    batch = shortened(FIRST, works)
    assert (batch.again, batch.work) == (False, works)


def test_a_rank_that_does_not_take_it_is_sent_everything():
    works = [Work(1, 8, 1, 1, []), Work(2, 6, 1, 1, [])]
    batch = shortened(FIRST, works, is_taken=False)
    assert (batch.again, batch.work) == (False, works)
