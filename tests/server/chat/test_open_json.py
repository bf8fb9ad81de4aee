"""Arguments are given on only as far as they can be closed."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.server.chat.open_json import OpenJson

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def given_of(text: str, size: int = 1) -> str:
    """What is sent of arguments that are cut behind `text`."""
    arguments = OpenJson()
    return "".join(arguments.add(text[at : at + size]) for at in range(0, len(text), size)) + arguments.close()


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("", "{}"),
        ("{", "{}"),
        ('{"a', "{}"),
        ('{"a": ', "{}"),
        ('{"a": "', '{"a": ""}'),
        ('{"a": "x\\', '{"a": "x"}'),
        ('{"a": "x\\u00e', '{"a": "x"}'),
        ('{"a": "x\\ud83d', '{"a": "x"}'),
        ('{"a": "x\\ud83d\\ude00', '{"a": "x\\ud83d\\ude00"}'),
        ('{"a": "x", ', '{"a": "x"}'),
        ('{"a": "x", "b', '{"a": "x"}'),
        ('{"a": tru', "{}"),
        ('{"a": true', '{"a": true}'),
        ('{"a": 1', '{"a": 1}'),
        ('{"a": 1.', '{"a": 1}'),
        ('{"a": [1, {"b": [', '{"a": [1, {"b": []}]}'),
        ('{"a": [1, 2], "c": {"d": "e"}}', '{"a": [1, 2], "c": {"d": "e"}}'),
    ],
)
def test_what_is_cut_is_closed(text: str, sent: str):
    assert given_of(text) == given_of(text, 1000) == sent


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), st.booleans(), st.booleans())
def test_what_was_given_can_be_closed_everywhere(value: dict[str, Any], is_ascii: bool, is_tight: bool):
    text = json.dumps(value, ensure_ascii=is_ascii, separators=(",", ":") if is_tight else None)
    for end in range(len(text) + 1):
        sent = given_of(text[:end], 3)
        found = json.loads(sent)
        assert isinstance(found, dict)
        sent.encode()
        assert end < len(text) or found == value


def test_arguments_that_end_by_themselves_are_as_they_came():
    arguments = OpenJson()
    assert arguments.add("{'a': 1}") + arguments.rest() == "{'a': 1}"
