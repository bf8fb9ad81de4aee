"""Pool: what a tenant's blocks on one node can be asked, whichever way they are kept.

A block is written in two steps: `begin` reserves memory that nobody else sees, `publish` makes it readable; a writer
that dies in between leaves nothing behind. A read pins its blocks, and a pinned block keeps its bytes whatever happens
to its key. `TenantPool` keeps them in Python, `NativePool` in C++, with the same answers.
"""

from abc import ABC, abstractmethod
from ctypes import c_uint64
from typing import NamedTuple, Protocol, TypeAlias

import xxhash

from ems.common.channel import Channel
from ems.runs import Areas, Bytes
from ems.wire.frames import Frame
from ems.wire.messages import Cause, Status
from kvloom.pool.storage.budget import Budget, Refusal
from kvloom.pool.storage.counts import Counts
from kvloom.pool.storage.entries import Begun, Block, Geometry, Published, Reservation, Written
from kvloom.pool.storage.held import Held
from kvloom.pool.storage.passing import Announced, Arrival, Offered
from kvloom.pool.storage.segments import SharedMemory


class Batch(NamedTuple):
    """Blocks to save. keys: 32 bytes each, in chain order; parent: the key before the first, or empty; None = no chain.

    areas: their bytes; is_rcache: which are copies of other nodes' blocks.
    """

    keys: list[bytes]
    areas: Areas
    parent: bytes | None
    is_rcache: list[bool]


Refused: TypeAlias = tuple[bytes, Refusal]
"""A key that found no room, and why."""


class Saved(NamedTuple):
    """One status a key, up to the first that found no room; those that are here now, pinned; how many are new.

    refused: those without room. They may be tried again; who does not counts them.
    """

    statuses: bytearray
    held: Held
    num_stored: int
    refused: list[Refused]


class Terms(NamedTuple):
    """What a session may be answered without asking the node."""

    can_save: bool  # its rate has no limit, and no block's home is another node
    has_others: bool  # other nodes may have what is not here
    keyring_version: c_uint64  # grows when the session's key may have been revoked


class Serving(Protocol):
    """The requests of a session, but for those that are answered without its knowing."""

    def receive(self) -> Frame:
        """The next one; waits for ever. Raises what `Channel.receive` does."""
        ...

    def has_frame(self) -> bool:
        """Whether `receive` would return at once, or what comes is being answered."""
        ...

    def use_arena(self, arena: SharedMemory | None) -> None:
        """The session's staging area."""
        ...

    def close(self) -> None:
        """Ends the session's pins."""
        ...


class Pool(ABC):
    """All methods may be called from any thread."""

    def __init__(self, tenant: str, budget: Budget, geometry: Geometry, rcache_share: float) -> None:
        """`budget` is the node's. rcache_share: of the quota, for copies of other nodes' blocks, 0..1."""
        self.tenant = tenant
        self.geometry = geometry
        self._budget = budget
        self._rcache_share = rcache_share
        self._counts = Counts()
        self._has_no_memory = False  # the system's answer when memory was last asked for

    @property
    def counts(self) -> Counts:
        """What happened so far, by name."""
        return self._counts

    # Reading

    @abstractmethod
    def hold_prefix(self, keys: list[bytes]) -> Held:
        """The blocks of the longest prefix of `keys` that is here."""

    @abstractmethod
    def pin_prefix(self, keys: list[bytes]) -> list[Block]:
        """As `hold_prefix`, each pinned until `unpin`."""

    @abstractmethod
    def pin_each(self, keys: list[bytes]) -> list[Block | None]:
        """Each block that is here, pinned; None for the others."""

    @abstractmethod
    def pin_again(self, entry: Block) -> None:
        """One more pin for a block that is pinned."""

    @abstractmethod
    def unpin(self, entries: list[Block]) -> None:
        """Ends pins; the memory of blocks that lost their key meanwhile is free from here on."""

    @abstractmethod
    def count_prefix(self, keys: list[bytes]) -> int:
        """Length of the longest prefix of `keys` that is here; does not count as a use."""

    @abstractmethod
    def missing(self, keys: list[bytes]) -> list[bytes]:
        """Those keys that are not here, in order."""

    @abstractmethod
    def missed(self, key: bytes, count: int) -> Cause:
        """A reader did not find the key, nor `count` - 1 behind it. Why: COLD when it was never here, as far as
        remembered."""

    @abstractmethod
    def view(self, offset: int, length: int) -> Bytes:
        """The bytes of reserved memory or of a pinned block."""

    def locate(self, offset: int) -> tuple[int, int]:
        """Segment number and offset within it."""
        return divmod(offset, self.geometry.segment_bytes)

    @abstractmethod
    def segment_fd(self, segment: int) -> int | None:
        """Descriptor of a segment for a client of this tenant; None when there is none of that number."""

    @property
    @abstractmethod
    def num_given_back(self) -> int:
        """Segments that went back to the system: who has mapped one may let go of it."""

    # Sessions

    def serving(self, channel: Channel, terms: Terms) -> "Serving | None":
        """What answers a session's requests without Python; None where nothing does."""
        return None

    # Writing

    @abstractmethod
    def save(self, batch: Batch) -> Saved:
        """Copies blocks to memory of their own, sums, publishes and pins them; ends after one without room."""

    def begin(self, key: bytes, length: int, is_rcache: bool = False) -> Begun:
        """Memory for a block; or the block of that key, pinned; or that there is no room."""
        return self.begin_all([key], [length], [is_rcache])[0]

    @abstractmethod
    def begin_all(self, keys: list[bytes], lengths: list[int], is_rcache: list[bool]) -> list[Begun]:
        """As `begin` for each in order; ends after the first that finds no room."""

    @abstractmethod
    def publish(self, written: Written) -> Published:
        """Makes a written block readable."""

    def publish_all(self, written: list[Written]) -> list[Published]:
        """As `publish` for each in order."""
        return list(map(self.publish, written))

    @abstractmethod
    def abandon(self, reservation: Reservation) -> None:
        """Gives memory back unwritten."""

    # Between nodes

    @abstractmethod
    def offer(self, keys: list[bytes]) -> Offered:
        """As `pin_each`, as a batch."""

    @abstractmethod
    def arrive(self, blocks: Announced) -> Arrival:
        """Memory for blocks of another node. One that finds no room does not keep out those behind it."""

    # Damage

    def distrust(self, entry: Block) -> bool:
        """Checks a pinned block's bytes; when they changed, forgets it and never uses its memory again."""
        if xxhash.xxh3_128_digest(self.view(entry.offset, entry.length).data) == entry.checksum:
            return False
        if self._spoil(entry):
            self._counts.add("corrupt")
        return True

    @abstractmethod
    def _spoil(self, entry: Block) -> bool:
        """Forgets a pinned block, and never uses its memory again; False when it was forgotten before."""

    def _refuse(self, key: bytes, slot: int, refused: list[Refused] | None = None) -> Status:
        """Counts a block that found no room, by why that is. refused: gets it instead: it may be tried again."""
        capacity = self._capacity()
        if slot > self.geometry.slab_bytes:
            cause = Refusal.TOO_LARGE
        elif slot <= capacity:
            cause = Refusal.PINNED
        elif self._has_no_memory:
            cause = Refusal.NO_MEMORY
        else:
            cause = self._budget.why_refused(self.tenant, slot - capacity)
        if refused is None:
            self.count_refused(key, cause)
        else:
            refused.append((key, cause))
        return Status.TOO_LARGE if cause is Refusal.TOO_LARGE else Status.NO_ROOM

    def count_refused(self, key: bytes, cause: Refusal) -> None:
        """A block was not stored."""
        self._counts.add(f"refused_{cause}")
        if cause is not Refusal.TOO_LARGE:
            self._counts.add("no_room")
            self._remember(key, Cause.QUOTA)

    @abstractmethod
    def _capacity(self) -> int:
        """Bytes of the tenant's memory."""

    @abstractmethod
    def _remember(self, key: bytes, cause: Cause) -> None:
        """Why a key is not in."""

    # Room

    @abstractmethod
    def evict(self, size: int) -> int:
        """Drops blocks of `size` bytes, or all that are not pinned. Bytes freed.

        First the segments of least use, which go back to the node, then single blocks, least useful first.
        """

    @abstractmethod
    def shrink(self, size: int) -> None:
        """Gives `size` bytes back to the node, or somewhat more: whole segments, those of least use first.

        Others may use them at once. What is being read of them stays readable until then.
        """

    @abstractmethod
    def make_room_ahead(self, slot: int, count: int) -> bool:
        """Evicts some of what a batch of `count` blocks would evict, before it comes. Whether more is to go.

        At most a small share of the memory is kept free.
        """

    @abstractmethod
    def warm(self) -> None:
        """Takes all memory the quota allows and has the kernel provide its pages now; for a thread of its own."""

    # Knowing

    @abstractmethod
    def block_keys(self) -> list[bytes]:
        """The keys of all blocks, oldest first: a prefix before what follows it."""

    @abstractmethod
    def usage(self) -> dict[str, int]:
        """Blocks, bytes in use, bytes of segments, bytes of read cache, quota."""

    @abstractmethod
    def close(self) -> None:
        """Closes the segments' descriptors; mappings of clients stay valid until they unmap."""

    @abstractmethod
    def check(self) -> None:
        """States the invariants: index, queues and slabs list the same blocks; chains are linked both ways."""
