"""Frames: any cut of the bytes gives the same frames, and nothing unbounded is buffered."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.gewu.protocol.frames import MAX_PAYLOAD_BYTES, Frame, FrameDecoder, FrameError, encode

numbers = st.integers(0, 2**32 - 1)
frames = st.builds(Frame, st.sampled_from("CFSADQore"), numbers, numbers, numbers, numbers, st.binary(max_size=200))


def decode(pieces: list[bytes]) -> list[Frame]:
    decoder = FrameDecoder()
    found = []
    for piece in pieces:
        decoder.feed(piece)
        while (frame := decoder.next_frame()) is not None:
            found.append(frame)
    return found


@given(st.lists(frames, max_size=5), st.lists(st.integers(0, 300), max_size=8))
def test_any_cut_gives_the_same_frames(sent, cuts):
    data = b"".join(encode(frame) for frame in sent)
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    assert decode([data[a:b] for a, b in pairwise(bounds)]) == sent


def test_a_payload_may_hold_newlines():
    frame = Frame("C", 1, payload=b'{\n  "model": "x"\n}\n')
    assert decode([encode(frame)]) == [frame]


@pytest.mark.parametrize(
    "data",
    [
        b"C 1 2 3 4\n",
        b"C 1 2 3 4 -5\n",
        b"CC 1 2 3 4 5\n",
        b"C 1 2 3 x 5\n",
        b"C 4294967296 2 3 4 0\n",
        b"C 1 2 3 4 %d\n" % (MAX_PAYLOAD_BYTES + 1),
        b"\n",
        b"C" * 80,
    ],
)
def test_what_is_no_header_ends_the_connection(data):
    with pytest.raises(FrameError):
        decode([data])


def test_a_payload_may_be_as_long_as_the_limit():
    decoder = FrameDecoder()
    decoder.feed(b"C 1 2 3 4 %d\n" % MAX_PAYLOAD_BYTES)
    assert decoder.next_frame() is None
    assert (decoder.is_inside, decoder.length) == (True, MAX_PAYLOAD_BYTES)


def test_a_frame_has_begun_with_its_first_byte_and_is_over_with_its_last():
    decoder = FrameDecoder()
    seen = []
    for byte in encode(Frame("C", 1, payload=b"ab")):
        seen.append((decoder.is_inside, decoder.length))
        decoder.feed(bytes([byte]))
        frame = decoder.next_frame()
    assert seen == [(False, 0)] + [(True, 0)] * 11 + [(True, 2)] * 2
    assert frame == Frame("C", 1, payload=b"ab")
    assert (decoder.is_inside, decoder.length) == (False, 0)
