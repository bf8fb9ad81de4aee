"""BlockPool: which sequence holds which KV block, and which blocks hold a known prefix.

Pure bookkeeping; the bytes live in a backend. A block is in one of three states:

  used      refs >= 1; in the block table of `refs` sequences
  cached    refs == 0, but published under a hash: free, and found again by `match` until it is handed out
  empty     refs == 0, no hash

Cached and empty blocks together are the free ones, handed out least recently released first. `host` has the blocks
of the second pool, where preempted sequences' blocks and states may wait; `states` the states of running sequences and
of `snapshots`, if the model's layers keep some; `windows` the blocks of layers that see a window only, if these have a
memory of their own.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvloom.contract.states import chain_hash
from kvloom.contract.windows import first_read, longest_prefix
from kvloom.engine.schedule.places import Places
from kvloom.engine.schedule.snapshots import Snapshots


def root_hash(salt: str) -> bytes:
    """The parent of a sequence's first block. Sequences of different salts share nothing."""
    return hashlib.sha256(salt.encode()).digest()


def adapter_salt(salt: str, digest: str) -> str:
    """The salt of a sequence that runs with the LoRA adapter of this digest; a request's own salt holds no NUL."""
    return f"{digest}\0{salt}" if digest else salt


class Switch(NamedTuple):
    """From position `at` on the LoRA adapter of this digest acts: blocks before are those of the base model."""

    at: int
    digest: str


class Scope(NamedTuple):
    """Whose blocks a sequence shares: those of the same salt, and behind `switch` those of the same."""

    salt: str = ""
    switch: Switch | None = None


BASE = Scope()


def extend_chain(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, salt: str, switch: Switch | None = None
) -> None:
    """Append to `hashes` those of the full blocks of `token_ids` that it lacks."""
    for i in range(len(hashes), len(token_ids) // block_size):
        parent = parent_hash(hashes, i, block_size, salt, switch)
        hashes.append(chain_hash(parent, token_ids[i * block_size : (i + 1) * block_size]))


class LastChain:
    """Makes chains one after the other; where one begins like the last, its hashes are the last one's. The questions
    about one input come so.
    """

    def __init__(self) -> None:
        self._key: tuple[int, Scope] = 0, BASE
        self._token_ids: tuple[int, ...] = ()
        self._hashes: list[bytes] = []

    def of(self, token_ids: tuple[int, ...], block_size: int, scope: Scope) -> list[bytes]:
        """The hashes of its full blocks."""
        known = self._hashes if self._key == (block_size, scope) else []
        starts = range(0, min(len(known) * block_size, len(token_ids) - block_size + 1), block_size)
        differs = (i for i in starts if token_ids[i : i + block_size] != self._token_ids[i : i + block_size])
        hashes = known[: next(differs, len(starts) * block_size) // block_size]
        extend_chain(hashes, token_ids, block_size, *scope)
        self._key, self._token_ids, self._hashes = (block_size, scope), token_ids, list(hashes)
        return hashes


def parent_hash(hashes: Sequence[bytes], index: int, block_size: int, salt: str, switch: Switch | None = None) -> bytes:
    """What the hash of block `index` of a sequence continues; `hashes` are those of its full blocks before."""
    parent = hashes[index - 1] if index else root_hash(salt)
    if switch is not None and index == switch.at // block_size:
        parent = hashlib.sha256(parent + f"{switch.digest}\0{switch.at}".encode()).digest()
    return parent


class BlockPool:
    """Reference-counted KV blocks 0 .. num_blocks-1 with a prefix cache. Owned by the engine thread."""

    def __init__(
        self,
        num_blocks: int,
        is_caching: bool = True,
        num_host_blocks: int = 0,
        snapshots: Snapshots | None = None,
        windows: "WindowPool | None" = None,
    ) -> None:
        """`snapshots`: None = no layer keeps a state. `windows`: None = all layers have their keys in these blocks."""
        self.num_blocks, self.windows = num_blocks, windows
        self.host, self.snapshots = Places(num_host_blocks), snapshots or Snapshots()
        self.states, self.known = self.snapshots.places, self.snapshots.known
        self.is_caching = is_caching
        self._refs = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # oldest release first
        self.num_evicted = 0  # published blocks that were handed out for other contents

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds, cached ones included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that a new sequence could find by hash, used or not."""
        return len(self._block_of)

    def key_of(self, block: int) -> bytes | None:
        """The hash under which the block is published."""
        return self._hash_of[block]

    def num_holders(self, block: int) -> int:
        """Sequences and transfers that hold the block."""
        return self._refs[block]

    def is_idle(self, block: int) -> bool:
        """Whether no sequence and no transfer holds the block: it is free, cached or empty."""
        return self._refs[block] == 0

    def num_exclusive(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` have a single holder, and so would become free if it released them."""
        return sum(self._refs[block] == 1 for block in blocks)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known prefix of `hashes`. Changes nothing; `retain` them before allocating."""
        found = []
        for key in hashes:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def retain(self, blocks: Iterable[int]) -> None:
        """Add one holder to each block."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one holder and unknown contents, or None when fewer are free (then nothing changes)."""
        if count > len(self._free):
            return None
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self.num_evicted += self._hash_of[block] is not None
            self._forget(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one holder from each block of a table. The end of the table is freed first, because its beginning, a
        shorter prefix, is more likely to be found again.
        """
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} released more often than retained"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None and block not in self.known and not self.snapshots.is_attached(block):
                    self._free.move_to_end(block, last=False)

    def block_of(self, key: bytes) -> int | None:
        """The block that is published under this hash."""
        return self._block_of.get(key)

    def publish(self, block: int, key: bytes) -> bool:
        """Let later sequences find a full, computed block by its hash. Of several blocks with one hash the first is
        found.

        Returns whether this block is the one that is found.
        """
        if not self.is_caching or self._hash_of[block] is not None or key in self._block_of:
            return False
        self._hash_of[block] = key
        self._block_of[key] = block
        return True

    def learn(self, block: int, parent: bytes, tokens: Sequence[int]) -> None:
        """Let later sequences begin with a copy of the block, as far as they continue `parent` with these tokens. Its
        holders may be gone by then: copy it before it is handed out.
        """
        if self.is_caching:
            self.known.learn(block, parent, tokens)

    def drop_cached(self) -> list[int]:
        """Forget all cached blocks. Returns the free blocks, whose contents no sequence needs, ascending; they are
        handed out in that order.
        """
        for block in self._free:
            self._forget(block)
        free = sorted(self._free)
        self._free = OrderedDict.fromkeys(free)
        return free

    def forget_all(self) -> None:
        """Forget all hashes. Sequences keep the blocks that they hold."""
        for block in range(self.num_blocks):
            self._forget(block)
        if self.windows is not None:
            self.windows.forget_all()

    def check(self) -> None:
        """Assert the invariants."""
        for block in range(self.num_blocks):
            assert self._refs[block] >= 0
            assert (self._refs[block] == 0) == (block in self._free), f"block {block} is both free and held, or neither"
            key = self._hash_of[block]
            assert key is None or self._block_of.get(key) == block, f"block {block} has a hash that finds another block"
        assert all(self._hash_of[block] == key for key, block in self._block_of.items())
        assert self.is_caching or not self._block_of
        for snapshot in self.snapshots:
            assert 0 <= snapshot.block < self.num_blocks

    def _forget(self, block: int) -> None:
        self.snapshots.forget(block)
        key = self._hash_of[block]
        if key is not None:
            del self._block_of[key]
            self._hash_of[block] = None


class WindowPool(BlockPool):
    """The blocks of layers that see only a window. A sequence has a table of these beside its block table, with the
    same block size; entries behind the window are given back. A hash may be known here, in the other pool, or in both.
    """

    def __init__(self, num_blocks: int, reach: int, block_size: int, is_caching: bool = True) -> None:
        """`reach`: of RankInfo."""
        super().__init__(num_blocks, is_caching)
        self.reach, self.block_size = reach, block_size
        self._fresh: dict[int, bytes] = {}
        # most blocks that a sequence needs in order to go on: its window, begun at any token, and one more
        self.most_needed = -(-reach // block_size) + 3

    def publish(self, block: int, key: bytes) -> bool:
        """As of any pool; see take_fresh."""
        is_new = super().publish(block, key)
        if is_new:
            self._fresh[block] = key
        return is_new

    def take_fresh(self) -> dict[int, bytes]:
        """Those that were published since the last call, with their hashes, in order."""
        fresh, self._fresh = self._fresh, {}
        return fresh

    def first_of(self, position: int) -> int:
        """The first block that a step reads which begins at `position`."""
        return first_read(position, self.reach, self.block_size)

    def match_end(self, hashes: Sequence[bytes]) -> tuple[int, list[int]]:
        """The longest prefix of `hashes` of which the last window is known: its number of blocks, and the blocks of
        that window. Changes nothing.
        """
        known = list(map(self.block_of, hashes))
        size = self.block_size
        count = longest_prefix(len(hashes), self.reach, size, lambda index: known[index] is not None)
        return count, [block for block in known[self.first_of(count * size) : count] if block is not None]
