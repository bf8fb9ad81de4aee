"""Frames survive every cut, and refuse every damage; keys are steady across versions and processes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ems import keys
from ems.wire import messages as m
from ems.wire.frames import HEADER_BYTES, MAX_BODY_BYTES, FrameReader, FrameWriter, WireError

KEY = bytes(range(32))
MESSAGES = [
    m.Hello("a", KEY),
    m.Save(KEY * 2, [0, 64], [64, 60], KEY, False, True),
    m.Found(7, [0], [4096], [100], bytes(16), 1),
    m.PeerBlocks([0, 5], bytes(32)),
    m.Ping(),
]


def read_all(reader: FrameReader, data: bytes, step: int) -> list[m.Message]:
    found, position = [], 0
    while position < len(data):
        part = data[position : position + min(step, reader.missing)]
        reader.feed(part)
        position += len(part)
        while frame := reader.next_frame():
            found.append(frame.message)
    return found


@pytest.mark.parametrize("session_key", [b"", KEY])
def test_the_same_bytes_cut_anywhere_are_the_same_frames(session_key):
    writer = FrameWriter()
    if session_key:
        writer.use_key(session_key)
    data = b"".join(writer.encode(message, 3, 5) for message in MESSAGES)
    for step in range(1, len(data) + 1):
        reader = FrameReader()
        if session_key:
            reader.use_key(session_key)
        assert read_all(reader, data, step) == MESSAGES


@pytest.mark.parametrize("session_key", [b"", KEY])
def test_every_flipped_bit_is_refused(session_key):
    writer = FrameWriter()
    if session_key:
        writer.use_key(session_key)
    data = writer.encode(MESSAGES[1], 3, 5)
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        reader = FrameReader()
        if session_key:
            reader.use_key(session_key)
        try:
            reader.feed(bytes(damaged))
            frame = reader.next_frame()
        except WireError:
            continue
        assert frame is None, "waits for more bytes, at most the limit"
        assert reader.missing <= MAX_BODY_BYTES


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_garbage_is_refused_or_waited_for(data):
    reader = FrameReader()
    reader.feed(data)
    try:
        assert reader.next_frame() is None
    except WireError:
        assert len(data) >= HEADER_BYTES


def test_a_repeated_or_missing_frame_of_a_keyed_session_is_refused():
    writer, reader = FrameWriter(), FrameReader()
    writer.use_key(KEY)
    reader.use_key(KEY)
    first = writer.encode(m.Ping())
    reader.feed(first)
    assert reader.next_frame().message == m.Ping()
    reader.feed(first)
    with pytest.raises(WireError, match="tag"):
        reader.next_frame()


class Raw(list):
    """The fields of a message without its checks, as a hostile peer would send them."""

    def __init__(self, op: int, values: tuple) -> None:
        super().__init__(values)
        self.OP = op


@pytest.mark.parametrize(
    ("cls", "values"),
    [
        (m.Load, (bytes(31), False)),
        (m.Load, (bytes(32 * (m.MAX_KEYS + 1)), False)),
        (m.Save, (KEY, [0], [0], b"", True, True)),
        (m.Save, (KEY, [-1], [1], b"", True, True)),
        (m.Save, (KEY, [0, 1], [1], b"", True, True)),
        (m.Save, (KEY, [0], [m.MAX_BLOCK_BYTES + 1], b"", True, True)),
        (m.Save, (KEY, [0], [1], b"short", True, True)),
        (m.Found, (1, [0], [0], [1], b"", 0)),
        (m.PeerBlocks, ([m.MAX_BLOCK_BYTES + 1], bytes(16))),
        (m.Hello, ("a" * 513, KEY, False)),
    ],
)
def test_a_message_out_of_its_limits_is_malformed(cls, values):
    reader = FrameReader()
    reader.feed(FrameWriter().encode(Raw(cls.OP, values)))
    with pytest.raises(WireError, match="malformed"):
        reader.next_frame()


def test_frames_are_the_bytes_of_version_1():
    """Other versions of agent and SDK depend on these bytes."""
    head = "454d5331010e00000700000000000000f401000024000000fbe3a446"
    assert FrameWriter().encode(m.Load(bytes(32), True), 7, 500).hex() == head + "92c420" + "00" * 32 + "c3"


IDENTITY = keys.Identity("m", "vllm", "MHA", 1, 1, 0, 0)
LAYOUT = keys.Layout("float16", 4, ((2, 8), (2, 8)))


def test_names_of_blocks_are_steady():
    space = keys.KeySpace(b"salt", IDENTITY, LAYOUT)
    assert space.of_hash(-5, 4).hex() == "e0fe994f0b799121475e93b89e7c1e15c644b93cd7fed989847f1d34c61cc142"
    assert len({space.of_hash(h, n) for h in (0, 1, -1, 255, 256, 2**64, -(2**64)) for n in (3, 4)}) == 14
    first, second = space.of_tokens([1, 2, 3, 4, 5], 4)
    assert list(space.of_tokens([1, 2, 3, 4], 4)) == [first]
    assert first.hex() == "0fd462c47cae9b900c27d4a90a9cba5472f89059af07ecb4a6efb9134985d493"
    assert list(space.of_tokens([9, 2, 3, 4, 5], 4))[1] != second


@given(st.integers(), st.integers())
def test_no_two_integers_share_an_encoding(a, b):
    assert (keys.encode_int(a) == keys.encode_int(b)) == (a == b)
