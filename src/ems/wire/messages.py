"""What SDK, agents and peers say to each other: one struct a message, packed arrays inside, checked when decoded."""

from enum import IntEnum
from typing import ClassVar

import msgspec

from ems.keys import KEY_BYTES, NONCE_BYTES

SUM_BYTES = 16  # xxh3-128
MAX_KEYS = 4096  # a frame
MAX_BLOCK_BYTES = 1 << 28


class Status(IntEnum):
    """What became of one key of a SAVE."""

    STORED = 0
    DUPLICATE = 1  # same bytes were there
    CONFLICT = 2  # other bytes were there and stay: the first write wins
    NO_ROOM = 3
    TOO_LARGE = 4
    LIMITED = 5  # the tenant saves faster than it may

    @property
    def is_success(self) -> bool:
        return self <= Status.CONFLICT


class Cause(IntEnum):
    """Why the first key after the found prefix was not found."""

    NONE = 0
    COLD = 1
    EVICTED = 2
    CORRUPT = 3
    TIMEOUT = 4
    PEER_DOWN = 5
    NO_ROOM = 6
    QUOTA = 7  # it was saved, and found no room within the tenant's quota


class Message(msgspec.Struct, array_like=True):
    """Base of all messages. A `__post_init__` that raises ValueError makes the frame malformed."""

    OP: ClassVar[int] = 0


def _check_keys(keys: bytes) -> int:
    if len(keys) % KEY_BYTES or len(keys) > MAX_KEYS * KEY_BYTES:
        raise ValueError(f"keys: {len(keys)} bytes are not 0 to {MAX_KEYS} keys of {KEY_BYTES}")
    return len(keys) // KEY_BYTES


def _check_counts(expected: int, *lists: list[int]) -> None:
    for values in lists:
        if len(values) != expected:
            raise ValueError(f"{len(values)} values for {expected} keys")
        if values and min(values) < 0:
            raise ValueError("negative value")


def _check_lengths(lengths: list[int]) -> None:
    if lengths and not 0 < min(lengths) <= max(lengths) <= MAX_BLOCK_BYTES:
        raise ValueError(f"a block is 1 to {MAX_BLOCK_BYTES} bytes")


class Hello(Message):
    """First frame of a client; a peer sends is_peer=True and its node id as access_id."""

    OP = 1
    access_id: str
    nonce: bytes
    is_peer: bool = False

    def __post_init__(self) -> None:
        if len(self.nonce) != NONCE_BYTES or len(self.access_id) > 512:
            raise ValueError("nonce or access_id has a wrong length")


class Challenge(Message):
    OP = 2
    nonce: bytes
    salt: bytes  # of the verifier


class Proof(Message):
    OP = 3
    proof: bytes


class Welcome(Message):
    """The session stands. incarnation: this life of the agent; key_salt: the tenant's; proof: the agent's own."""

    OP = 4
    incarnation: bytes
    key_salt: bytes
    proof: bytes
    segment_bytes: int
    max_block_bytes: int
    is_direct: bool


class Failure(Message):
    """Answer to a request that the agent cannot serve; `code` is an EmsErrorCode."""

    OP = 5
    code: int
    message: str


class Arena(Message):
    """Asks for a staging area of `size` bytes; the answer is Done with its descriptor."""

    OP = 6
    size: int


class Segment(Message):
    """Asks for a segment's descriptor; the answer is Done with it, read-only unless the session is direct."""

    OP = 7
    segment: int


class Done(Message):
    OP = 8


class Save(Message):
    """Blocks in the staging area, in chain order. parent: the key before the first, or empty.

    is_last: the batch ends here; until then its blocks do not make room for each other.
    """

    OP = 9
    keys: bytes
    offsets: list[int]
    lengths: list[int]
    parent: bytes = b""
    write_rcache: bool = True
    is_last: bool = True

    def __post_init__(self) -> None:
        _check_counts(_check_keys(self.keys), self.offsets, self.lengths)
        _check_lengths(self.lengths)
        if len(self.parent) not in (0, KEY_BYTES):
            raise ValueError("parent: neither empty nor a key")


class Saved(Message):
    """One `Status` a key."""

    OP = 10
    statuses: bytes


class Reserve(Message):
    """Direct sessions: asks for places to write to. The answer is Reserved."""

    OP = 11
    keys: bytes
    lengths: list[int]
    parent: bytes = b""

    def __post_init__(self) -> None:
        _check_counts(_check_keys(self.keys), self.lengths)
        _check_lengths(self.lengths)


class Reserved(Message):
    """statuses: STORED = write here then COMMIT; others are final. Positions are 0 where nothing is to be written."""

    OP = 12
    statuses: bytes
    segments: list[int]
    offsets: list[int]


class Commit(Message):
    """The reserved places of the last Reserve are written; 16 bytes of checksum each, in order. Answer: Saved."""

    OP = 13
    sums: bytes


class Load(Message):
    OP = 14
    keys: bytes
    read_local_only: bool = False

    def __post_init__(self) -> None:
        _check_keys(self.keys)


class Found(Message):
    """The contiguous prefix that is here, pinned under `lease` until Release or the end of the connection."""

    OP = 15
    lease: int
    segments: list[int]
    offsets: list[int]
    lengths: list[int]
    sums: bytes
    cause: int

    def __post_init__(self) -> None:
        _check_counts(len(self.segments), self.offsets, self.lengths)
        if len(self.sums) != SUM_BYTES * len(self.segments):
            raise ValueError("sums: not one a block")


class Release(Message):
    """Ends a lease; no answer. corrupt: index of the block whose bytes did not match, or -1."""

    OP = 16
    lease: int
    corrupt: int = -1


class Exists(Message):
    OP = 17
    keys: bytes
    read_local_only: bool = False

    def __post_init__(self) -> None:
        _check_keys(self.keys)


class Count(Message):
    OP = 18
    count: int


class Ping(Message):
    OP = 19


class PeerGet(Message):
    """Blocks of a tenant; the answer is PeerBlocks and their bytes. has_only: no bytes are wanted."""

    OP = 20
    tenant: str
    keys: bytes
    has_only: bool = False

    def __post_init__(self) -> None:
        _check_keys(self.keys)


class PeerBlocks(Message):
    """lengths: 0 = not here. The bytes of the others follow the frame in order."""

    OP = 21
    lengths: list[int]
    sums: bytes

    def __post_init__(self) -> None:
        _check_counts(len(self.lengths))
        if max(self.lengths, default=0) > MAX_BLOCK_BYTES or len(self.sums) != SUM_BYTES * len(self.lengths):
            raise ValueError("lengths or sums out of range")


class PeerPut(Message):
    """Blocks for their home node; the bytes follow the frame. Answer: Saved."""

    OP = 22
    tenant: str
    keys: bytes
    lengths: list[int]
    sums: bytes
    parent: bytes = b""

    def __post_init__(self) -> None:
        count = _check_keys(self.keys)
        _check_counts(count, self.lengths)
        _check_lengths(self.lengths)
        if len(self.sums) != SUM_BYTES * count:
            raise ValueError("sums: not one a key")


def split_keys(keys: bytes) -> list[bytes]:
    """The 32-byte keys packed in `keys`."""
    return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]


def split_sums(sums: bytes) -> list[bytes]:
    """The 16-byte checksums packed in `sums`."""
    return [sums[i : i + SUM_BYTES] for i in range(0, len(sums), SUM_BYTES)]
