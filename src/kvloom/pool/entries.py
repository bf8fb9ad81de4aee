"""What a pool is made of: its sizes, a published block, and a place for one that is being written."""

from dataclasses import dataclass, field
from typing import NamedTuple

from kvloom.pool.evict import Order


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes in bytes: a segment is one shared file, a multiple of a slab; a block fits into a slab."""

    segment_bytes: int
    slab_bytes: int
    has_huge_pages: bool = False  # where the system gives them


@dataclass(slots=True, eq=False)
class Entry:
    """A published block. `children` were saved right after it in a chain; they are useless without it."""

    key: bytes
    offset: int
    length: int
    slot: int  # bytes its place takes
    checksum: bytes
    is_rcache: bool
    parent: "Entry | None"
    queue: Order
    children: "dict[Entry, None]" = field(default_factory=dict)
    pins: int = 0
    is_live: bool = True


class Place(NamedTuple):
    """Memory for a block that is being written; it ends in `publish` or `abandon`."""

    key: bytes
    offset: int
    length: int
    slot: int
    is_rcache: bool
