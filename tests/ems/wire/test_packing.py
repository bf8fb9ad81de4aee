"""Messages are MessagePack as msgspec writes and reads it: the same bytes, the same values, the same refusals."""

from dataclasses import fields

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ems.wire import messages as m
from ems.wire.packing import READERS, Value, _pack_head, pack, unpack

EDGES = [0, 31, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1]
NUMBERS = st.sampled_from([*EDGES, *(-edge for edge in EDGES if edge <= 2**63), -32, -33, -129, -32769, -(2**31) - 1])
INTS = st.integers(-(2**63), 2**64 - 1) | NUMBERS
VALUES = {
    int: INTS,
    bool: st.booleans(),
    bytes: st.binary(max_size=70) | st.sampled_from([bytes(n) for n in (255, 256, 65535, 65536)]),
    str: st.text(max_size=40) | st.sampled_from(["a" * n for n in (31, 32, 255, 256, 65536)]),
    list[int]: st.lists(INTS, max_size=40) | st.integers(0, 2**40).map(lambda start: list(range(start, start + 99, 3))),
}
KINDS = st.lists(st.sampled_from(list(VALUES)), max_size=9)
ENCODER = msgspec.msgpack.Encoder()


def peer(kinds: list[object]) -> type:
    """A msgspec struct with these fields, as another implementation of the message has it."""
    named = [(f"f{i}", kind) for i, kind in enumerate(kinds)]
    return msgspec.defstruct("Peer", named, array_like=True)


FORMS: list[tuple[object, Value]] = [
    *((int, sign * edge) for edge in EDGES for sign in (1, -1) if sign * edge >= -(2**63)),
    *((int, number) for number in (-32, -33, -129, -32769)),
    *((bool, is_so) for is_so in (True, False)),
    *((bytes, bytes(size)) for size in (0, 255, 256, 65536)),
    *((str, "a" * size) for size in (0, 31, 32, 255, 256, 65536)),
    *((list[int], numbers) for numbers in ([], [5, 6], [-1, 300, 5], [300] * 20, [300, 70000, 300], [7] * 65536)),
]


def test_every_form_of_a_value_is_that_of_msgspec_and_comes_back():
    for kind, value in FORMS:
        packed = pack([value])
        assert packed == ENCODER.encode([value])
        assert unpack(packed, [READERS[kind]]) == [value]


@pytest.mark.parametrize(
    ("data", "kind", "problem"),
    [
        (pack([True]), int, "expected an integer, got 0xc3"),
        (pack([5]), bool, "expected a boolean, got 0x5"),
        (pack([5]), str, "unexpected 0x5"),
        (pack([5]), list[int], "unexpected 0x5"),
        (pack(["abc"]), bytes, "unexpected 0xa3"),
        (pack([b"abc"])[:-1], bytes, "it ends too early"),
        (pack(["abc"])[:-1], str, "it ends too early"),
        (pack([300])[:-1], int, "it ends too early"),
        (b"", int, "it ends too early"),
        (pack([5]) + b"x", int, "1 bytes behind its end"),
        (b"\x92\x05\xc0", int, "unexpected 0xc0"),
    ],
)
def test_what_is_no_value_of_its_kind_is_refused(data, kind, problem):
    with pytest.raises(ValueError, match=problem):
        unpack(data, [READERS[kind]])


def test_values_behind_the_known_ones_are_left_out():
    assert unpack(pack([5, True, b"x", "text", [1, 300], -7]), [READERS[int]]) == [5]


def test_more_values_than_a_length_can_say_are_not_written():
    class Endless(list[int]):
        def __len__(self) -> int:
            return 2**32

    with pytest.raises(ValueError, match="4294967296 values or bytes are too many"):
        pack([Endless()])


@given(st.data(), KINDS)
@settings(max_examples=300, deadline=None)
def test_values_are_the_bytes_of_msgspec_and_come_back(data, kinds):
    values = [data.draw(VALUES[kind]) for kind in kinds]
    packed, theirs = pack(values), peer(kinds)
    assert packed == ENCODER.encode(theirs(*values))
    assert unpack(packed, [READERS[kind] for kind in kinds]) == values
    assert msgspec.msgpack.decode(packed, type=theirs) == theirs(*values)


@given(st.data(), KINDS)
@settings(max_examples=300, deadline=None)
def test_what_msgspec_refuses_is_refused_and_what_it_takes_is_taken(data, kinds):
    """Values of other fields, truncated, extended or with a changed byte; fields after the known ones are ignored."""
    others = data.draw(KINDS)
    packed = bytearray(
        pack([data.draw(VALUES[kind]) for kind in [*kinds[: data.draw(st.integers(0, 9))], *others]][:15])
    )
    if data.draw(st.booleans()):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    del packed[data.draw(st.integers(0, len(packed))) :]
    packed += data.draw(st.binary(max_size=2))
    try:
        expected = msgspec.msgpack.decode(packed, type=peer(kinds))
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
        expected = None
    try:
        found = unpack(bytes(packed), [READERS[kind] for kind in kinds])
    except ValueError:
        found = None
    if expected is not None and found is None:
        # msgspec accepts anything in ignored fields; we accept only kinds of values that messages have
        assert has_other_kinds(bytes(packed))
    elif expected is None and found is not None:
        assert len(found) < len(kinds)
    elif expected is not None:
        assert found == [getattr(expected, f"f{i}") for i in range(len(kinds))]


def has_other_kinds(packed: bytes) -> bool:
    """Whether one of the values is of a kind that no message has."""
    try:
        values = msgspec.msgpack.decode(packed, strict=False)
    except UnicodeDecodeError:  # invalid UTF-8 in a text
        return True
    return not all(
        isinstance(value, int | bool | bytes | str)
        or (isinstance(value, list) and all(type(number) is int for number in value))
        for value in values
    )


@given(st.binary(max_size=60))
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\x91\xdd\xff\xff\xff\xff\x00")
@example(b"\x91\xc6\xff\xff\xff\xff\x00")
def test_garbage_is_refused_before_memory_is_taken_for_it(data):
    for kind in VALUES:
        try:
            unpack(b"\x91" + data, [READERS[kind]])
        except ValueError:
            continue


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1])
def test_a_number_beyond_64_bits_is_not_written(number):
    for values in ([number], [[number]], [[1, number]]):
        with pytest.raises(ValueError, match="64 bits"):
            pack(values)


@pytest.mark.parametrize("cls", m.MESSAGES.values(), ids=lambda cls: cls.__name__)
def test_every_field_of_a_message_can_be_read(cls):
    assert {field.type for field in fields(cls)} <= READERS.keys()
    assert len(fields(cls)) < 16


@pytest.mark.parametrize(
    ("value", "packed"),
    [
        (0, "00"),
        (127, "7f"),
        (-1, "ff"),
        (-32, "e0"),
        (128, "cc80"),
        (0x1234, "cd1234"),
        (0x12345678, "ce12345678"),
        (2**64 - 1, "cf" + "ff" * 8),
        (-33, "d0df"),
        (-0x1234, "d1edcc"),
        (-0x12345678, "d2edcba988"),
        (-(2**63), "d380" + "00" * 7),
        (True, "c3"),
        (False, "c2"),
        ("é", "a2c3a9"),
        ("a" * 32, "d920" + "61" * 32),
        ("a" * 256, "da0100" + "61" * 256),
        (b"", "c400"),
        (b"a" * 256, "c50100" + "61" * 256),
        (b"a" * 65536, "c600010000" + "61" * 65536),
        ([], "90"),
        ([7, 7], "920707"),
        ([1, 2, 3], "93010203"),
        ([300, 200], "92cd012cccc8"),
        ([200, 300], "92ccc8cd012c"),
        ([300, 301], "92cd012ccd012d"),
        ([0, -33, 5], "9300d0df05"),
        ([-1, 300, 1], "93ffcd012c01"),
        (list(range(16)), "dc0010" + bytes(range(16)).hex()),
        ([9] * 65536, "dd00010000" + "09" * 65536),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_value_is_what_the_format_says(value, packed):
    data = bytes.fromhex("91" + packed)
    assert pack([value]) == data
    assert unpack(data, [READERS[list[int] if isinstance(value, list) else type(value)]]) == [value]


@pytest.mark.parametrize(
    ("packed", "kind", "problem"),
    [
        ("", int, "it ends too early"),
        ("91", int, "it ends too early"),
        ("91cd12", int, "it ends too early"),
        ("91c405", bytes, "it ends too early"),
        ("91a561", str, "it ends too early"),
        ("919301", list[int], "it ends too early"),
        ("91ddffffffff01", list[int], "it ends too early"),
        ("910000", int, "1 bytes behind its end"),
        ("c0", int, "unexpected 0xc0"),
        ("91c0", int, "expected an integer, got 0xc0"),
        ("9191c0", list[int], "expected an integer, got 0xc0"),
        ("9101", bool, "expected a boolean, got 0x1"),
        ("9101", bytes, "unexpected 0x1"),
        ("91c401", str, "unexpected 0xc4"),
        ("91a1ff", str, "invalid start byte"),
        ("9200c0", int, "unexpected 0xc0"),
    ],
)
def test_what_is_no_such_value_is_refused(packed, kind, problem):
    with pytest.raises(ValueError, match=problem):
        unpack(bytes.fromhex(packed), [READERS[kind]])


def test_what_a_newer_version_adds_is_left_out_and_what_an_older_one_lacks_is_not_there():
    newer = pack([1, b"new", [1, 2], "x", True])
    assert unpack(newer, [READERS[int]]) == [1]
    assert unpack(pack([1]), [READERS[int], READERS[str]]) == [1]


def test_more_than_a_length_can_say_is_not_written():
    with pytest.raises(ValueError, match="too many"):
        _pack_head(2**32, {0xDC: "H", 0xDD: "I"})
