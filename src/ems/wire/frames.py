"""Frames: how a message is cut out of a stream of bytes and checked. Pure: the sockets are elsewhere.

A frame is a 28-byte little-endian header and a body (MessagePack array of one message):
  magic u32 | version u8 | op u8 | flags u16 | request_id u64 | deadline_ms u32 | body_len u32 | crc32 u32
The CRC covers header and body. In a keyed session (peers) 16 bytes of keyed BLAKE2b over a sequence number, header and
body follow. Block bytes of peers follow a frame raw; their lengths and checksums are in its body.
Limits are checked before anything is buffered; a frame that breaks them ends its connection, nothing else.
"""

import hashlib
import hmac
import struct
import zlib
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Final, NamedTuple

from ems.wire.messages import MESSAGES, Message
from ems.wire.packing import READERS, Reader, pack, unpack

VERSION = 1
MAX_BODY_BYTES = 1 << 20
TAG_BYTES = 16
_MAGIC = 0x31534D45  # "EMS1"
_HEADER = struct.Struct("<IBBHQIII")
HEADER_BYTES = _HEADER.size


class WireError(Exception):
    """The other side broke the protocol; the connection is of no use any more."""


class _Kind(NamedTuple):
    """A kind of message: its class, what reads its fields, and how many of them must be there."""

    message: Any
    readers: Sequence[Reader]
    num_required: int


def _kind(cls: Any) -> _Kind:
    known = fields(cls)
    return _Kind(cls, [READERS[each.type] for each in known], sum(each.default is MISSING for each in known))


_KINDS: Final = {op: _kind(cls) for op, cls in MESSAGES.items()}


@dataclass(frozen=True, slots=True)
class Frame:
    """request_id: repeated in the answer; deadline_ms: time left for the answer, 0 = do not wait for anything."""

    message: Message
    request_id: int
    deadline_ms: int


def _tag(key: bytes, sequence: int, data: bytes) -> bytes:
    return hashlib.blake2b(struct.pack("<Q", sequence) + data, key=key, digest_size=TAG_BYTES).digest()


class FrameWriter:
    """Encodes the frames of one direction of a connection; with a key, each gets a tag over its number."""

    def __init__(self) -> None:
        self._key = b""
        self._sequence = 0

    def use_key(self, key: bytes) -> None:
        """Later frames are tagged with `key` (32 bytes)."""
        self._key = key
        self._sequence = 0

    def encode(self, message: Message, request_id: int = 0, deadline_ms: int = 0) -> bytes:
        body = pack(vars(message).values())
        if len(body) > MAX_BODY_BYTES:
            raise WireError(f"body of {len(body)} bytes, the limit is {MAX_BODY_BYTES}")
        head = _HEADER.pack(_MAGIC, VERSION, message.OP, 0, request_id, deadline_ms, len(body), 0)[:-4]
        data = head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body
        if self._key:
            data += _tag(self._key, self._sequence, data)
            self._sequence += 1
        return data


class FrameReader:
    """Decodes the frames of one direction: `feed` at most `missing` bytes, then `next_frame`.

    Feeding no more than `missing` keeps the raw bytes that follow a frame out of its buffer.
    """

    def __init__(self) -> None:
        self.num_frames = 0  # that came so far
        self._buffer = bytearray()
        self._key = b""
        self._sequence = 0

    def use_key(self, key: bytes) -> None:
        """Later frames must carry a tag of `key`."""
        self._key = key
        self._sequence = 0

    @property
    def missing(self) -> int:
        """How many bytes the current header or frame still needs; 0 = `next_frame` returns or raises."""
        if len(self._buffer) < HEADER_BYTES:
            return HEADER_BYTES - len(self._buffer)
        return max(0, self._total() - len(self._buffer))

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def take(self) -> bytes:
        """Bytes that were fed and not used yet, for another reader."""
        data = bytes(self._buffer)
        self._buffer.clear()
        return data

    def _total(self) -> int:
        magic, version, op, _flags, _id, _deadline, size, _crc = _HEADER.unpack_from(self._buffer)
        if magic != _MAGIC or version != VERSION or op not in _KINDS:
            raise WireError("not a frame of this protocol and version")
        if size > MAX_BODY_BYTES:
            raise WireError(f"body of {size} bytes, the limit is {MAX_BODY_BYTES}")
        return HEADER_BYTES + int(size) + (TAG_BYTES if self._key else 0)

    def next_frame(self) -> Frame | None:
        """The next whole frame, or None when more bytes are needed. Raises WireError on anything malformed."""
        if len(self._buffer) < HEADER_BYTES or len(self._buffer) < (total := self._total()):
            return None
        data = bytes(self._buffer[:total])
        del self._buffer[:total]
        if self._key:
            data, tag = data[:-TAG_BYTES], data[-TAG_BYTES:]
            if not hmac.compare_digest(tag, _tag(self._key, self._sequence, data)):
                raise WireError("wrong tag")
            self._sequence += 1
        _magic, _version, op, _flags, request_id, deadline_ms, _size, crc = _HEADER.unpack_from(data)
        if crc != zlib.crc32(data[HEADER_BYTES:], zlib.crc32(data[: HEADER_BYTES - 4])):
            raise WireError("wrong checksum")
        self.num_frames += 1
        return Frame(_read(_KINDS[op], data[HEADER_BYTES:]), request_id, deadline_ms)


def _read(kind: _Kind, body: bytes) -> Message:
    try:
        values = unpack(body, kind.readers)
        if len(values) < kind.num_required:
            raise ValueError(f"{len(values)} values, it has {kind.num_required} at least")
        message: Message = kind.message(*values)
    except ValueError as error:
        raise WireError(f"malformed message {kind.message.OP}: {error}") from None
    return message
