"""Arguments of a tool call cut by the length limit: a whole message has what Anthropic's client parses from its
stream.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.server.dialects.anthropic.shapes import object_so_far
from tests.support.lazily import lazily

jiter = lazily("jiter")  # the parser of Anthropic's client

TEXT = '{"a": [1, 2.5e3, {"b": "x\\u00e9\\"y", "c": null}, true], "d": {"e": -12, "f": {}}, "g": [], "h": "last" }'
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.floats(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def by_the_client(text: str) -> object:
    return jiter.from_json(text.encode(), partial_mode=True)


@pytest.mark.parametrize("length", range(1, len(TEXT) + 1))
def test_each_beginning_is_read_as_by_the_client(length: int):
    assert object_so_far(TEXT[:length]) == by_the_client(TEXT[:length])


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), st.booleans(), st.data())
def test_each_beginning_of_any_object_is(value, is_ascii, data):
    text = json.dumps(value, ensure_ascii=is_ascii)
    cut = text[: data.draw(st.integers(1, len(text)))]
    assert object_so_far(cut) == by_the_client(cut)


@pytest.mark.parametrize("text", ["", "x", "[1", "}", '"a', "1", "{1: 2", '{"a" 1', "[" * 99_999, '{"a":' * 99_999])
def test_what_begins_no_object_is_an_empty_one(text: str):
    assert object_so_far(text) == {}


@given(st.text('{}[]":,\\ 1.-etruE', max_size=30))
def test_anything_is_read(text: str):
    object_so_far("{" + text)
