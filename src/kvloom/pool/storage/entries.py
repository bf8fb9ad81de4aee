"""The elements of a pool: its files, a published block, and memory for a block being written."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from ems.wire.messages import Status
from kvloom.pool.storage.evict import Order


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes in bytes: a segment is one shared file, a multiple of a slab; a block fits into a slab."""

    segment_bytes: int
    slab_bytes: int
    has_huge_pages: bool = False  # if the system has them
    is_sealed: bool = True  # clients may only map a segment for reading


class Block(Protocol):
    """A published block, pinned by the reader. slot: bytes of memory that it takes, its size class."""

    @property
    def key(self) -> bytes: ...
    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def checksum(self) -> bytes: ...
    @property
    def is_rcache(self) -> bool: ...
    @property
    def pins(self) -> int: ...
    @property
    def parent_key(self) -> bytes:
        """The key before it in its chain, or empty."""
        ...

    is_home: bool  # whether its home (another node or a store) is known to have it too


@dataclass(slots=True, eq=False)
class Entry:
    """A block of a `TenantPool`. `children` were saved right after it in a chain; they are useless without it."""

    key: bytes
    offset: int
    length: int
    slot: int  # bytes of memory it takes: its size class
    checksum: bytes
    is_rcache: bool
    parent: "Entry | None"
    queue: Order
    children: "dict[Entry, None]" = field(default_factory=dict)
    pins: int = 0
    is_live: bool = True
    is_spoiled: bool = False  # its bytes are damaged: its memory is not used again
    is_home: bool = False  # whether its home (another node or a store) is known to have it too
    used_at: int = 0  # bytes that the tenant had saved when it was last used

    @property
    def parent_key(self) -> bytes:
        """The key before it in its chain, or empty."""
        return self.parent.key if self.parent is not None else b""


class Reservation(NamedTuple):
    """Memory for a block being written; ended by `publish` or `abandon`."""

    key: bytes
    offset: int
    length: int
    slot: int
    is_rcache: bool


class NoRoom(NamedTuple):
    """There is no memory for a block: NO_ROOM, or TOO_LARGE for any pool like this one."""

    status: Status


Begun: TypeAlias = Reservation | Block | NoRoom
"""What a key meets that is to be written: memory of its own; the block that is there, pinned; or no room."""


class Written(NamedTuple):
    """Reserved memory that holds the block's bytes. parent: the key before it in its chain, or empty."""

    reservation: Reservation
    checksum: bytes
    parent: bytes = b""


class Published(NamedTuple):
    """The result for a written block, and the block of its key, pinned: this one, or one that another writer published
    first.
    """

    status: Status
    entry: Block
