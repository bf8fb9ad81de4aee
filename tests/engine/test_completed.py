"""The COMPLETED REQ ID line: eight columns that operators grep for."""

import logging

import pytest

from kvloom.contract.request import Delta, FinishReason, Request
from kvloom.engine.completed import CompletedLog, StepSize, completed_line

STEP = StepSize(12, 60)


def test_the_columns_are_those_of_the_document():
    """The document's example is 363 , 5 , 593 , 81 , 512 , 12 , 60 , 1."""
    line = completed_line([("363", 81, 512)], STEP, 128)
    assert line == "COMPLETED REQ ID: 363 , 5 , 593 , 81 , 512 , 12 , 60 , 1"


def test_a_step_that_ends_two_requests_is_one_line_about_the_first(caplog):
    caplog.set_level(logging.INFO)
    completed = CompletedLog(16)
    for name in ("a", "b", "c"):
        completed.added(Request(name, (1, 2, 3)))
    completed.delivered([Delta(name, token_ids=(7,)) for name in "abc"], STEP)
    assert not caplog.records
    last = [Delta(name, token_ids=(8,), finish_reason=FinishReason.LENGTH) for name in ("b", "c")]
    completed.delivered(last, STEP)
    assert [record.message for record in caplog.records] == ["COMPLETED REQ ID: b , 1 , 5 , 3 , 2 , 12 , 60 , 2"]


def test_nothing_is_kept_while_the_level_leaves_it_out(caplog):
    caplog.set_level(logging.WARNING)
    completed = CompletedLog(16)
    completed.added(Request("a", (1,)))
    caplog.set_level(logging.INFO)
    completed.delivered([Delta("a", finish_reason=FinishReason.EOS)], STEP)
    assert not caplog.records


def test_the_requests_of_one_id_are_told_in_their_order(caplog):
    """The second request is added before the end of the first, an abort, is delivered."""
    caplog.set_level(logging.INFO)
    completed = CompletedLog(16)
    for prompt in ((1, 2, 3), (1,)):
        completed.added(Request("a", prompt))
    completed.delivered([Delta("a", finish_reason=FinishReason.ABORT)], STEP)
    completed.delivered([Delta("a", token_ids=(7,), finish_reason=FinishReason.LENGTH)], STEP)
    assert [record.message.split(" , ")[1:5] for record in caplog.records] == [
        ["1", "3", "3", "0"],
        ["1", "2", "1", "1"],
    ]


@pytest.mark.parametrize(
    ("id", "shown"),
    [
        ("1-76-0", "1"),
        ("UINT64:2", "2"),
        ("STRING:a-1-2", "a-1-2"),
        ("chatcmpl-f0-7-1", "chatcmpl-f0"),
        ("a:b-4-0", "a:b"),
    ],
)
def test_the_first_column_is_the_id_that_the_caller_knows(id: str, shown: str):
    assert completed_line([(id, 81, 512)], STEP, 128).startswith(f"COMPLETED REQ ID: {shown} , ")
