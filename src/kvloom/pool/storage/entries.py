"""What a pool is made of: its files, a published block, and memory for one that is being written."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from ems.wire.messages import Status
from kvloom.pool.storage.evict import Order


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes in bytes: a segment is one shared file, a multiple of a slab; a block fits into a slab."""

    segment_bytes: int
    slab_bytes: int
    has_huge_pages: bool = False  # where the system gives them
    is_sealed: bool = True  # clients may map a segment for reading only


class Block(Protocol):
    """A published block, pinned by who looks at it. slot: bytes of memory it takes, its size class."""

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

    is_home: bool  # its home, another node or a store, has it too, as far as known


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
    is_spoiled: bool = False  # its bytes changed by themselves: its memory is not used again
    is_home: bool = False  # its home, another node or a store, has it too, as far as known
    used_at: int = 0  # bytes the tenant had saved when it was last used

    @property
    def parent_key(self) -> bytes:
        """The key before it in its chain, or empty."""
        return self.parent.key if self.parent is not None else b""


class Reservation(NamedTuple):
    """Memory for a block that is being written; it ends in `publish` or `abandon`."""

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
    """Memory that holds its block's bytes now. parent: the key before it in its chain, or empty."""

    reservation: Reservation
    checksum: bytes
    parent: bytes = b""


class Published(NamedTuple):
    """What became of a written block, and the block of its key, pinned: it, or one that somebody was faster with."""

    status: Status
    entry: Block
