"""The safetensors format: files that its library writes are read, and files that it refuses are refused."""

import json
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from kvloom.checkpoints.tensorfile import MAX_HEADER_BYTES, Damaged, header_bytes, read_entries

GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def file_of(document: Any, num_bytes: int = 24) -> bytes:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return len(text).to_bytes(8, "little") + text + bytes(num_bytes)


def entries_of(data: bytes) -> dict[str, Any]:
    return read_entries(data[: header_bytes(data)])


@given(st.dictionaries(st.text(max_size=5), st.lists(st.integers(0, 4), max_size=3), max_size=5), st.booleans())
def test_what_the_library_writes_is_found_where_it_lies(shapes, has_metadata):
    tensors = {name: np.random.default_rng(1).standard_normal(shape, np.float32) for name, shape in shapes.items()}
    data = save(tensors, {"format": "np"} if has_metadata else None)
    found = entries_of(data)
    assert found.keys() == tensors.keys()
    for name, entry in found.items():
        assert (entry.kind, entry.shape) == ("F32", tensors[name].shape)
        assert data[entry.start : entry.end] == tensors[name].tobytes()


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (b"{", "no valid JSON"),
        (b"[" * 5000, "no valid JSON"),
        ([], "holds no JSON object"),
        ({"a": 3}, "has type None"),
        ({"a": {**GOOD, "dtype": 7}}, "has type 7"),
        ({"a": {**GOOD, "shape": [2, -3]}}, r"has shape \[2, -3\]"),
        ({"a": {**GOOD, "shape": [2, 3.0]}}, r"has shape \[2, 3.0\]"),
        ({"a": {**GOOD, "shape": [True, 6]}}, r"has shape \[True, 6\]"),
        ({"a": {**GOOD, "data_offsets": [0]}}, "has no data_offsets"),
        ({"a": {**GOOD, "data_offsets": [24, 0]}}, "has no data_offsets"),
        ({"a": {**GOOD, "data_offsets": [0, 1 << 80]}}, "has no data_offsets"),
        ({"a": {**GOOD, "data_offsets": [0, 20]}}, "has data_offsets that do not fit its shape"),
        ({"a": {**GOOD, "data_offsets": [4, 28]}}, "does not begin where the tensor before it ends"),
        ({"a": GOOD, "b": GOOD}, "does not begin where the tensor before it ends"),
    ],
)
def test_a_header_that_cannot_be_is_refused_as_by_the_library(document, problem):
    data = file_of(document)
    with pytest.raises(Damaged, match=problem):
        entries_of(data)
    with pytest.raises((safetensors.SafetensorError, OverflowError)):
        safetensors.deserialize(data)


@pytest.mark.parametrize("beginning", [b"", b"\1\0\0", (MAX_HEADER_BYTES + 1).to_bytes(8, "little")])
def test_a_length_that_cannot_be_is_refused(beginning):
    with pytest.raises(Damaged, match="cut short or too long"):
        header_bytes(beginning)


@given(st.binary(max_size=30), st.integers(0, 80))
def test_whatever_bytes_are_written_over_a_header_it_is_read_or_refused(noise, start):
    data = bytearray(file_of({"a": GOOD}))
    data[start : start + len(noise)] = noise
    try:
        for entry in entries_of(bytes(data)).values():
            assert 0 <= entry.start <= entry.end
    except Damaged:
        pass
