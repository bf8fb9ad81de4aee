"""The COMPLETED REQ ID line: eight columns that operators grep for."""

import logging

from kvloom.engine.completed import CompletedLog, completed_line
from kvloom.engine.request import Delta, FinishReason, Request
from kvloom.engine.stats import Stats

STATS = Stats(num_running=11, num_blocks=870, num_free_blocks=815)


def test_the_columns_are_those_of_the_document():
    """Its example: 363 , 5 , 593 , 81 , 512 , 12 , 60 , 1."""
    line = completed_line([("363", 81, 512)], STATS, 128)
    assert line == "COMPLETED REQ ID: 363 , 5 , 593 , 81 , 512 , 12 , 60 , 1"


def test_a_step_that_ends_two_requests_is_one_line_about_the_first(caplog):
    caplog.set_level(logging.INFO)
    completed = CompletedLog(16)
    for name in ("a", "b", "c"):
        completed.added(Request(name, (1, 2, 3)))
    completed.delivered([Delta(name, token_ids=(7,)) for name in "abc"], STATS)
    assert not caplog.records
    last = [Delta(name, token_ids=(8,), finish_reason=FinishReason.LENGTH) for name in ("b", "c")]
    completed.delivered(last, STATS)
    assert [record.message for record in caplog.records] == ["COMPLETED REQ ID: b , 1 , 5 , 3 , 2 , 13 , 57 , 2"]


def test_nothing_is_kept_while_the_level_leaves_it_out(caplog):
    caplog.set_level(logging.WARNING)
    completed = CompletedLog(16)
    completed.added(Request("a", (1,)))
    caplog.set_level(logging.INFO)
    completed.delivered([Delta("a", finish_reason=FinishReason.EOS)], STATS)
    assert not caplog.records
