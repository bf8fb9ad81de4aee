"""Frames survive every cut, and every damage is refused; keys are the same in all versions and processes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tools import wire_header

from ems import keys
from ems.wire import messages as m
from ems.wire.frames import HEADER_BYTES, MAX_BODY_BYTES, FrameReader, FrameWriter, WireError

KEY = bytes(range(32))
MESSAGES = [
    m.Hello("a", KEY),
    m.Save(KEY * 2, [0, 64], [64, 60], KEY, False, True),
    m.Found(7, [0], [4096], [100], bytes(16), 1),
    m.PeerBlocks([0, 5], bytes(32)),
    m.Saved(bytes(m.Status)),
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


def test_what_one_reader_has_not_read_another_goes_on_with():
    data, first, second = FrameWriter().encode(m.Ping(), 3, 5), FrameReader(), FrameReader()
    first.feed(data[:HEADER_BYTES])
    second.feed(first.take())
    assert first.missing == HEADER_BYTES
    second.feed(data[HEADER_BYTES:])
    assert second.next_frame().message == m.Ping()


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


def raw(op: int, values: tuple) -> m.Message:
    """A message with these fields and no checks, as a hostile peer would send it."""
    message = type("Raw", (), {"OP": op})()
    vars(message).update({str(i): value for i, value in enumerate(values)})
    return message


@pytest.mark.parametrize(
    ("cls", "values"),
    [
        (m.Load, (bytes(31), False)),
        (m.Save, (KEY, [0])),
        (m.Load, (bytes(32 * (m.MAX_KEYS + 1)), False)),
        (m.Save, (KEY, [0], [0], b"", True, True)),
        (m.Save, (KEY, [-1], [1], b"", True, True)),
        (m.Save, (KEY, [0, 1], [1], b"", True, True)),
        (m.Save, (KEY, [0], [m.MAX_BLOCK_BYTES + 1], b"", True, True)),
        (m.Save, (KEY, [0], [1], b"short", True, True)),
        (m.Commit, (bytes(m.SUM_BYTES - 1),)),
        (m.Found, (1, [0], [0], [1], b"", 0)),
        (m.PeerBlocks, ([m.MAX_BLOCK_BYTES + 1], bytes(16))),
        (m.Hello, ("a",)),
        (m.Hello, ("a" * 513, KEY, False)),
        (m.Hello, ("a", KEY[1:], False)),
        (m.Reserve, (KEY, [1, 1], b"")),
        (m.Reserve, (KEY, [0], b"")),
        (m.Exists, (KEY + b"1", False)),
        (m.PeerGet, ("t", KEY + b"1", False)),
        (m.PeerBlocks, ([-1], bytes(16))),
        (m.PeerBlocks, ([1], bytes(15))),
        (m.PeerPut, ("t", KEY, [1, 1], bytes(16), b"")),
        (m.PeerPut, ("t", KEY, [0], bytes(16), b"")),
        (m.PeerPut, ("t", KEY, [1], bytes(17), b"")),
        (m.PeerPut, ("t", KEY, [1], bytes(16), b"", KEY + KEY)),
        (m.PeerPut, ("t", KEY, [1], bytes(16), KEY[1:])),
        (m.Pick, (bytes(31), False)),
        (m.Has, (KEY + b"1", False)),
        (m.Present, (b"\0\1\2",)),
        (m.Saved, (b"\0\7",)),
        (m.Reserved, (b"\xff", [0], [0])),
    ],
)
def test_a_message_out_of_its_limits_is_malformed(cls, values):
    reader = FrameReader()
    reader.feed(FrameWriter().encode(raw(cls.OP, values)))
    with pytest.raises(WireError, match="malformed"):
        reader.next_frame()


@pytest.mark.parametrize(
    "message",
    [
        m.Load(KEY * m.MAX_KEYS),
        m.Exists(b""),
        m.Commit(bytes(2 * m.SUM_BYTES)),
        m.Save(KEY, [0], [m.MAX_BLOCK_BYTES]),
        m.Save(b"", [], []),
        m.Reserve(KEY, [1]),
        m.PeerGet("t", KEY),
        m.PeerBlocks([m.MAX_BLOCK_BYTES, 0], bytes(32)),
        m.PeerPut("t", KEY, [1], bytes(16), KEY),
        m.Hello("a" * 512, KEY),
        m.Pick(KEY * m.MAX_KEYS, True),
        m.Has(b""),
        m.Present(b"\0\1"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_at_its_limits_is_read(message):
    assert read_all(FrameReader(), FrameWriter().encode(message), 1 << 20) == [message]


def test_keys_and_sums_are_cut_as_they_were_joined():
    assert m.split_keys(KEY + bytes(32)) == [KEY, bytes(32)]
    assert m.split_sums(bytes(16) + KEY) == [bytes(16), KEY[:16], KEY[16:]]
    assert m.split_keys(b"") == []


def test_a_status_says_whether_the_block_is_there():
    assert [status.is_success for status in m.Status] == [True, True, True, False, False, False, True]


def test_a_body_over_the_limit_is_neither_sent_nor_waited_for():
    writer, reader = FrameWriter(), FrameReader()
    largest = raw(m.Proof.OP, (bytes(MAX_BODY_BYTES - 6),))
    reader.feed(writer.encode(largest))
    assert reader.next_frame() is not None
    with pytest.raises(WireError, match=f"the limit is {MAX_BODY_BYTES}"):
        writer.encode(raw(m.Proof.OP, (bytes(MAX_BODY_BYTES - 5),)))
    head = bytearray(writer.encode(m.Ping())[:HEADER_BYTES])
    head[20:24] = (MAX_BODY_BYTES + 1).to_bytes(4, "little")
    reader.feed(bytes(head))
    with pytest.raises(WireError, match=f"the limit is {MAX_BODY_BYTES}"):
        assert reader.missing


def test_frames_are_the_bytes_of_version_1():
    """Agents and SDKs of other versions depend on these bytes."""
    head = "454d5331010e00000700000000000000f401000024000000fbe3a446"
    assert FrameWriter().encode(m.Load(bytes(32), True), 7, 500).hex() == head + "92c420" + "00" * 32 + "c3"


def test_cpp_has_the_messages_of_python():
    assert wire_header.HEADER.read_text() == wire_header.header(), "make golden"


def test_a_number_is_one_message():
    with pytest.raises(TypeError, match="Late has the number of Ping"):
        type("Late", (m.Message,), {"OP": m.Ping.OP})
    assert m.MESSAGES[m.Ping.OP] is m.Ping


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


class Shouting:
    """Stands for the C++ naming: its keys show that it made them. It refuses integers beyond 64 bits."""

    def of_hashes(self, base, values, counts):
        return b"".join(b"H%d" % value for value in values) if max(values) < 2**64 else None

    def of_tokens(self, base, tokens, block_size):
        return b"T%d" % len(tokens)


def test_names_of_many_blocks_are_those_of_each():
    space, lengths = keys.KeySpace(b"salt", IDENTITY, LAYOUT), np.array([[4, 4], [4, 2]])
    assert space.of_chunks([7, 2**64], lengths) == space.of_chunk(7, [4, 4]) + space.of_chunk(2**64, [4, 2])
    assert space.of_sequence(np.arange(5), 4) == b"".join(space.of_tokens(range(5), 4))
    helped = keys.KeySpace(b"salt", IDENTITY, LAYOUT, Shouting())
    assert helped.of_chunks([7, 8], lengths) == b"H7H8"
    assert helped.of_chunks([7, 2**64], lengths) == space.of_chunks([7, 2**64], lengths)
    assert helped.of_sequence(np.arange(5), 4) == b"T5"


@given(st.integers(), st.integers())
def test_no_two_integers_share_an_encoding(a, b):
    assert (keys.encode_int(a) == keys.encode_int(b)) == (a == b)


@pytest.mark.parametrize(
    "change",
    [
        {"model_id": "n"},
        {"llm_engine": "other"},
        {"kvcache_type": "MLA"},
        {"tp_world_size": 2},
        {"pp_world_size": 2},
        {"rank_in_tp": 1},
        {"rank_in_tp": None},
        {"rank_in_pp": 1},
    ],
    ids=str,
)
def test_whoever_differs_in_anything_has_names_of_his_own(change):
    spaces = [keys.KeySpace(b"salt", each, LAYOUT) for each in (IDENTITY, replace(IDENTITY, **change))]
    assert len({space.of_hash(1, 4) for space in spaces}) == 2
    assert len({next(space.of_tokens([1], 4)) for space in spaces}) == 2


def test_names_differ_by_tenant_and_layout_and_chunks_of_one_group_are_blocks():
    layouts = [LAYOUT, replace(LAYOUT, dtype="int8"), replace(LAYOUT, block_size=8), replace(LAYOUT, groups=((0, 4),))]
    spaces = [keys.KeySpace(salt, IDENTITY, layout) for salt in (b"salt", b"other") for layout in layouts]
    assert len({space.of_hash(1, 4) for space in spaces}) == len(spaces)
    assert spaces[0].of_chunk(1, [4]) == spaces[0].of_hash(1, 4)
    assert spaces[0].of_chunk(1, [4, 2]) != spaces[0].of_chunk(1, [2, 4])


def test_names_of_values_differ_by_key_length_layout_tenant_and_model():
    other = replace(IDENTITY, model_id="n")
    names = [
        keys.ValueNames(salt, identity, layout).of_value(key, length)
        for salt in (b"salt", b"other")
        for identity in (IDENTITY, other)
        for layout in ("", "NHD")
        for key in (b"", b"\0", b"\0\0")
        for length in (1, 2)
    ]
    assert len(set(names)) == len(names)


def test_a_proof_holds_for_one_role_one_id_and_one_pair_of_nonces():
    secret = keys.verifier("key", b"salt")
    asked = ("client", "id", KEY, bytes(32))
    changed = [
        ("agent", *asked[1:]),
        ("client", "di", *asked[2:]),
        (*asked[:2], bytes(32), KEY),
        ("clien", "tid", *asked[2:]),
    ]
    proofs = [keys.proof(secret, *each) for each in (asked, *changed)]
    assert len(set(proofs)) == len(proofs)
    assert keys.same(proofs[0], keys.proof(secret, *asked))
    assert not keys.same(proofs[0], keys.proof(keys.verifier("key", b"other"), *asked))


def test_secrets_of_a_purpose_and_of_a_name_are_its_own():
    made = [keys.derive(KEY, *of) for of in (("salt",), ("salt", "a"), ("salta",), ("peer", "a"))]
    assert len({*made, keys.derive(bytes(32), "salt")}) == 5
    assert {len(each) for each in made} == {keys.KEY_BYTES}
