"""Pool: the interface of a tenant's blocks on one node, however they are kept.

A block is written in two steps: `begin` reserves memory that is invisible to others, `publish` makes it readable; a
writer that dies in between leaves nothing behind. Readers pin blocks, and a pinned block keeps its bytes whatever
happens to its key. `TenantPool` keeps blocks in Python, `NativePool` in C++, with the same results.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
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
from kvloom.pool.storage.passing import Announced, Arrival, Held, Offered
from kvloom.pool.storage.segments import SharedMemory


class Batch(NamedTuple):
    """Blocks to save. keys: 32 bytes each, in chain order; parent: the key before the first, or empty; None = not a
    chain. areas: their bytes; is_rcache: which are copies of other nodes' blocks.
    """

    keys: list[bytes]
    areas: Areas
    parent: bytes | None
    is_rcache: list[bool]


Refused: TypeAlias = tuple[bytes, Refusal]
"""A key that found no room, and why."""


class Saved(NamedTuple):
    """One status a key, up to the first that found no room; the blocks that are here now, pinned; how many are new.

    refused: keys without room. They may be tried again; a caller that does not counts them.
    """

    statuses: bytearray
    held: Held
    num_stored: int
    refused: list[Refused]


class Homes(Protocol):
    """The other nodes as saves see them."""

    def routes(self, keys: list[bytes]) -> bytes:
        """The home of each new block: a `Route`."""
        ...

    def send_now(self, key: bytes, data: Bytes, parent: bytes, deadline_s: float) -> bool:
        """Sends a block home. Returns whether it arrived. parent: the key before it in its chain, or empty."""
        ...

    def send_later(self, blocks: list[Block], parents: list[bytes], deadline_s: float) -> bytes:
        """Sends blocks home in the background, and takes over a pin of each. Returns 1 for each that will be sent."""
        ...


class Terms(NamedTuple):
    """How a session is served."""

    keyring_version: c_uint64  # incremented when the session's key may have been revoked
    homes: Homes | None = None  # None = there are no other nodes
    may_put: Callable[[int], bool] | None = (
        None  # whether the tenant's rate allows so many bytes now; None = it has none
    )
    is_direct: bool = False  # the client may write into memory that is reserved for it
    is_valid: Callable[[], bool] = lambda: True  # whether the session's key is valid now
    board: Bytes | None = None  # where the client writes leases that it has read; None = it sends Release


class Serving(Protocol):
    """Source of a session's requests, except those that it answers itself."""

    def receive(self) -> Frame:
        """The next request; waits for ever. Raises as `Channel.receive` does."""
        ...

    def has_frame(self) -> bool:
        """Whether `receive` would return at once, or an arriving request is being answered."""
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
        self._has_no_memory = False  # whether the system refused memory when last asked

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
        """A reader did not find the key, nor `count` - 1 more behind it. Returns why; COLD when it was never here, as
        far as is known.
        """

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
        """Number of segments given back to the system: clients that have mapped one should unmap it."""

    # Sessions

    def board(self) -> SharedMemory | None:
        """A board for a session (`messages.Welcome`); None where nothing would look at it."""
        return None

    def serving(self, channel: Channel, terms: Terms) -> "Serving | None":
        """What answers a session's requests without Python; None where nothing does."""
        return None

    # Writing

    @abstractmethod
    def save(self, batch: Batch) -> Saved:
        """Copy blocks into memory, compute checksums, publish and pin them; stops after a block without room."""

    def begin(self, key: bytes, length: int, is_rcache: bool = False) -> Begun:
        """Memory for a block; or the block of that key, pinned; or NoRoom."""
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
        """Free the memory unwritten."""

    # Between nodes

    @abstractmethod
    def offer(self, keys: list[bytes]) -> Offered:
        """As `pin_each`, as a batch."""

    @abstractmethod
    def arrive(self, blocks: Announced) -> Arrival:
        """Memory for blocks of another node. A block without room does not stop those behind it."""

    # Damage

    def distrust(self, entry: Block) -> bool:
        """Check a pinned block's bytes; if damaged, remove it and never use its memory again."""
        if xxhash.xxh3_128_digest(self.view(entry.offset, entry.length).data) == entry.checksum:
            return False
        if self._spoil(entry):
            self._counts.add("corrupt")
        return True

    @abstractmethod
    def _spoil(self, entry: Block) -> bool:
        """Remove a pinned block, and never use its memory again. False when it was removed before."""

    def _refuse(self, key: bytes, slot: int, refused: list[Refused] | None = None) -> Status:
        """Count a block that found no room, by reason. refused: collects it instead, because it may be tried again."""
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
        """Record why a key is not here."""

    # Room

    @abstractmethod
    def evict(self, size: int) -> int:
        """Evict blocks of `size` bytes, or all that are not pinned. Returns the bytes freed.

        First the least useful segments, which go back to the node, then single blocks, least useful first.
        """

    @abstractmethod
    def shrink(self, size: int) -> None:
        """Give at least `size` bytes back to the node, in whole segments, the least useful first.

        Others may use the memory at once; blocks being read stay readable until then.
        """

    @abstractmethod
    def make_room_ahead(self, slot: int, count: int) -> bool:
        """Evict some of what a batch of `count` blocks would evict, before it comes. Returns whether there is more to
        evict.

        At most a small share of the memory is kept free.
        """

    @abstractmethod
    def warm(self) -> None:
        """Take all memory that the quota allows, and make the kernel provide its pages; for a thread of its own."""

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
        """Assert the invariants: index, queues and slabs list the same blocks; chains are linked in both directions."""
