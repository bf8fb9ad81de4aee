"""Messages between SDK, agents and peers: one struct each, with packed arrays, checked when decoded."""

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Generic, TypeVar, get_args

from ems.keys import KEY_BYTES, NONCE_BYTES

MESSAGES: dict[int, type["Message"]] = {}
"""By their number."""


class Message:
    """Base of all messages: dataclasses of fields that `packing` knows, new ones last and with a default.

    A `__post_init__` that raises ValueError makes the frame malformed. IS_NATIVE: the agent answers it in C++ where it
    need not ask the node; `make golden` writes its struct, and that of its answer, to `ems/native/messages.hpp`.
    """

    OP: ClassVar[int]
    IS_NATIVE: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "OP" in vars(cls) and MESSAGES.setdefault(cls.OP, cls) is not cls:
            raise TypeError(f"{cls.__name__} has the number of {MESSAGES[cls.OP].__name__}")


A = TypeVar("A", bound=Message)


class Request(Message, Generic[A]):
    """A message with an answer of one kind; a Failure comes instead if it cannot be served."""

    ANSWER: type[A]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        (cls.ANSWER,) = get_args(cls.__orig_bases__[0])  # type: ignore[attr-defined]


SUM_BYTES = 16  # xxh3-128
MAX_KEYS = 4096  # a frame
MAX_BLOCK_BYTES = 1 << 28
BOARD_BYTES = 8


class Status(IntEnum):
    """Result for one key of a SAVE."""

    STORED = 0
    DUPLICATE = 1  # the same bytes were there
    CONFLICT = 2  # other bytes were there and stay: the first write wins
    NO_ROOM = 3
    TOO_LARGE = 4
    LIMITED = 5  # the tenant exceeds its rate
    LOCAL = 6  # stored on this node only: its home was not reached in time

    @property
    def is_success(self) -> bool:
        return self <= Status.CONFLICT or self is Status.LOCAL


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


def _check_statuses(statuses: bytes) -> None:
    if unknown := statuses.translate(None, bytes(Status)):
        raise ValueError(f"{unknown[0]} is no status")


def _check_lengths(lengths: list[int]) -> None:
    if lengths and not 0 < min(lengths) <= max(lengths) <= MAX_BLOCK_BYTES:
        raise ValueError(f"a block is 1 to {MAX_BLOCK_BYTES} bytes")


def _check_sums(expected: int, sums: bytes, seals: bytes) -> None:
    if len(sums) != SUM_BYTES * expected or len(seals) not in (0, len(sums)):
        raise ValueError("sums or seals: not one a key")


@dataclass
class Asking(Request[A]):
    """Asks about keys; read_local_only: other nodes are not asked."""

    keys: bytes
    read_local_only: bool = False

    def __post_init__(self) -> None:
        _check_keys(self.keys)


@dataclass
class Challenge(Message):
    OP = 2
    nonce: bytes
    salt: bytes  # salt of the verifier


@dataclass
class Hello(Request[Challenge]):
    """First frame of a client; a peer sends is_peer=True and its node id as access_id."""

    OP = 1
    access_id: str
    nonce: bytes
    is_peer: bool = False

    def __post_init__(self) -> None:
        if len(self.nonce) != NONCE_BYTES or len(self.access_id) > 512:
            raise ValueError("nonce or access_id has a wrong length")


@dataclass
class Welcome(Message):
    """The session is open. incarnation: this run of the agent; key_salt: the tenant's; proof: the agent's own.

    pool: identifies the tenant's pool, the same on all nodes that share it; older agents leave it empty.
    A descriptor may come with it: shared memory of BOARD_BYTES, the session's board. A client that has read an odd
    lease may write its number there instead of sending a Release; that releases all odd leases up to it.
    """

    OP = 4
    incarnation: bytes
    key_salt: bytes
    proof: bytes
    segment_bytes: int
    max_block_bytes: int
    is_direct: bool
    pool: bytes = b""


@dataclass
class Proof(Request[Welcome]):
    OP = 3
    proof: bytes


@dataclass
class Failure(Message):
    """Answer to a request that the agent cannot serve; `code` is an EmsErrorCode."""

    OP = 5
    code: int
    message: str


@dataclass
class Done(Message):
    OP = 8


@dataclass
class Arena(Request[Done]):
    """Asks for a staging area; the answer is Done with its descriptor.

    It has `size` bytes, or fewer, but `least`, where staging memory is short; least = 0: no fewer.
    """

    OP = 6
    size: int
    least: int = 0


@dataclass
class Segment(Request[Done]):
    """Asks for a segment's descriptor; the answer is Done with it, read-only unless the session is direct."""

    OP = 7
    segment: int


@dataclass
class Ping(Request[Done]):
    OP = 19
    IS_NATIVE = True


@dataclass
class Saved(Message):
    """One `Status` a key."""

    OP = 10
    statuses: bytes

    def __post_init__(self) -> None:
        _check_statuses(self.statuses)


@dataclass
class Save(Request[Saved]):
    """Blocks in the staging area, in chain order. parent: the key before the first, or empty. is_last: the batch ends
    here; until then its blocks do not evict each other. is_chain: a block is useless without those before it;
    otherwise they are independent.
    """

    OP = 9
    IS_NATIVE = True
    keys: bytes
    offsets: list[int]
    lengths: list[int]
    parent: bytes = b""
    write_rcache: bool = True
    is_last: bool = True
    is_chain: bool = True

    def __post_init__(self) -> None:
        _check_counts(_check_keys(self.keys), self.offsets, self.lengths)
        _check_lengths(self.lengths)
        if len(self.parent) not in (0, KEY_BYTES):
            raise ValueError("parent: neither empty nor a key")


@dataclass
class Reserved(Message):
    """statuses: STORED = write here then COMMIT; others are final. Positions are 0 where nothing is to be written.
    num_given_back: as in Found.
    """

    OP = 12
    statuses: bytes
    segments: list[int]
    offsets: list[int]
    num_given_back: int = 0

    def __post_init__(self) -> None:
        _check_statuses(self.statuses)


@dataclass
class Reserve(Request[Reserved]):
    """Direct sessions: asks for memory to write to. The answer is Reserved."""

    OP = 11
    IS_NATIVE = True
    keys: bytes
    lengths: list[int]
    parent: bytes = b""

    def __post_init__(self) -> None:
        _check_counts(_check_keys(self.keys), self.lengths)
        _check_lengths(self.lengths)


@dataclass
class Commit(Request[Saved]):
    """What the last Reserve reserved is written; a checksum of 16 bytes each, in order. Answer: Saved."""

    OP = 13
    IS_NATIVE = True
    sums: bytes

    def __post_init__(self) -> None:
        if len(self.sums) % SUM_BYTES:
            raise ValueError(f"sums: {len(self.sums)} bytes are not sums of {SUM_BYTES}")


@dataclass
class Found(Message):
    """The contiguous prefix that is here, pinned under `lease` until Release, the board's word (Welcome) or the end of
    the connection.

    num_given_back: segments of the tenant that were given back so far. When it grows, mappings of segments that this
    answer does not name may be stale and should be dropped.
    """

    OP = 15
    lease: int
    segments: list[int]
    offsets: list[int]
    lengths: list[int]
    sums: bytes
    cause: int
    num_given_back: int = 0

    def __post_init__(self) -> None:
        _check_counts(len(self.segments), self.offsets, self.lengths)
        _check_sums(len(self.segments), self.sums, b"")


@dataclass
class Load(Asking[Found]):
    OP = 14
    IS_NATIVE = True


@dataclass
class Release(Message):
    """Ends a lease; no answer. corrupt: index of the block whose bytes did not match, or -1."""

    OP = 16
    IS_NATIVE = True
    lease: int
    corrupt: int = -1


@dataclass
class Count(Message):
    OP = 18
    count: int


@dataclass
class Exists(Asking[Count]):
    OP = 17
    IS_NATIVE = True


@dataclass
class Pick(Asking[Found]):
    """Asks for each key independently. The answer is Found, with length 0 for those that are nowhere."""

    OP = 23
    IS_NATIVE = True


@dataclass
class Present(Message):
    """One byte a key: 1 = it is there."""

    OP = 25
    found: bytes

    def __post_init__(self) -> None:
        if self.found.strip(b"\0\1"):
            raise ValueError("found: neither 0 nor 1")


@dataclass
class Has(Asking[Present]):
    """Which of the keys `Pick` would find; the answer is Present."""

    OP = 24
    IS_NATIVE = True


@dataclass
class PeerBlocks(Message):
    """lengths: 0 = not here. The bytes of the others follow the frame in order. seals: checksums bound to the keys."""

    OP = 21
    lengths: list[int]
    sums: bytes
    seals: bytes = b""

    def __post_init__(self) -> None:
        _check_counts(len(self.lengths), self.lengths)
        _check_sums(len(self.lengths), self.sums, self.seals)
        if max(self.lengths, default=0) > MAX_BLOCK_BYTES:
            raise ValueError(f"a block is at most {MAX_BLOCK_BYTES} bytes")


@dataclass
class PeerGet(Request[PeerBlocks]):
    """Blocks of a tenant; the answer is PeerBlocks and their bytes. has_only: no bytes are wanted."""

    OP = 20
    tenant: str
    keys: bytes
    has_only: bool = False

    def __post_init__(self) -> None:
        _check_keys(self.keys)


@dataclass
class PeerPut(Request[Saved]):
    """Blocks for their home node; the bytes follow the frame. Answer: Saved.

    parents: of each block, the key before it in its chain, or zeros; absent: a chain that follows `parent`.
    """

    OP = 22
    tenant: str
    keys: bytes
    lengths: list[int]
    sums: bytes
    parent: bytes = b""
    parents: bytes = b""
    seals: bytes = b""

    def __post_init__(self) -> None:
        count = _check_keys(self.keys)
        if self.parents and len(self.parents) != len(self.keys):
            raise ValueError("parents: not one a key")
        _check_counts(count, self.lengths)
        _check_lengths(self.lengths)
        _check_sums(count, self.sums, self.seals)
        if len(self.parent) not in (0, KEY_BYTES):
            raise ValueError("parent: neither empty nor a key")


def split_keys(keys: bytes) -> list[bytes]:
    """The 32-byte keys packed in `keys`."""
    return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]


def split_sums(sums: bytes) -> list[bytes]:
    """The 16-byte checksums packed in `sums`."""
    return [sums[i : i + SUM_BYTES] for i in range(0, len(sums), SUM_BYTES)]
