"""Saving and loading over one link: sub-batches of copies that overlap with the agent's work, and the verified read.

Both update a `Progress` as they go, so that a call that is cut short still knows the prefix it finished.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from ems.blocks import Block, Request
from ems.buffer import RegisteredCache, Snapshot
from ems.config import CcKvOption
from ems.transport import Link
from ems.wire import messages as m
from ems.wire.frames import WireError

Bytes = npt.NDArray[np.uint8]
_GROUP_KEYS = 64  # blocks a sub-batch: each costs a message
_FIRST_BYTES = 256 << 10  # the first sub-batch is small, so that the agent begins soon; the next grow
_GROWTH = 4
_REGIONS = 4  # sub-batches under way at once
_ALIGN = 64
_REGION_BYTES = 4 << 20  # little enough to stay in the processor's cache on the way to the agent


@dataclass(slots=True)
class Progress:
    """Blocks of the contiguous prefix that are done, and bytes moved."""

    success: int = 0
    num_bytes: int = 0
    is_whole: bool = True  # no block has failed so far

    def add(self, statuses: bytes) -> None:
        """Counts the statuses of the next sub-batch."""
        for status in statuses:
            self.is_whole = self.is_whole and m.Status(status).is_success
            self.success += self.is_whole


def _groups(blocks: Sequence[Block], size_of: Callable[[Block], int], max_bytes: int) -> list[list[Block]]:
    """Cuts the blocks into growing sub-batches of at most _GROUP_KEYS blocks and `max_bytes`, one block at least."""
    groups: list[list[Block]] = []
    room, limit = 0, _FIRST_BYTES
    for block in blocks:
        size = _aligned(size_of(block))
        if not groups or len(groups[-1]) == _GROUP_KEYS or size > room:
            groups.append([])
            room = min(limit, max_bytes)
            limit *= _GROWTH
        groups[-1].append(block)
        room -= size
    return groups


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def save(
    link: Link,
    cache: RegisteredCache | Snapshot,
    request: Request,
    option: CcKvOption,
    deadline_s: float,
    progress: Progress,
) -> None:
    """Saves the blocks in order; stops at the first that the pool does not take."""
    blocks = request.blocks
    too_large = [i for i, block in enumerate(blocks) if cache.size_of(block) > link.welcome.max_block_bytes]
    if too_large:
        blocks = blocks[: too_large[0]]
    if not blocks:
        return
    request = Request(blocks, request.parent)
    if link.welcome.is_direct:
        _save_direct(link, cache, request, deadline_s, progress)
    else:
        _save_staged(link, cache, request, option, deadline_s, progress)


def _save_staged(
    link: Link,
    cache: RegisteredCache | Snapshot,
    request: Request,
    option: CcKvOption,
    deadline_s: float,
    progress: Progress,
) -> None:
    largest = _aligned(max(map(cache.size_of, request.blocks)))
    region_bytes = max(largest, min(_REGION_BYTES, largest * _GROUP_KEYS))
    arena = link.arena(region_bytes * _REGIONS, deadline_s)
    region_bytes = len(arena) // _REGIONS // _ALIGN * _ALIGN
    groups = _groups(request.blocks, cache.size_of, region_bytes)
    parent, under_way = request.parent, 0
    is_ended = False
    for index, group in enumerate(groups):
        if under_way == _REGIONS:
            _collect(link, deadline_s, progress)
            under_way -= 1
            if not progress.is_whole:
                break
        is_ended = index == len(groups) - 1
        _stage(link, cache, arena, (index % _REGIONS) * region_bytes, group, parent, option, is_ended, deadline_s)
        under_way += 1
        parent = group[-1].key
        progress.num_bytes += sum(map(cache.size_of, group))
    if not is_ended:
        link.begin(m.Save(b"", [], []), deadline_s)
        under_way += 1
    for _ in range(under_way):
        _collect(link, deadline_s, progress)


def _stage(
    link: Link,
    cache: RegisteredCache | Snapshot,
    arena: Bytes,
    position: int,
    group: list[Block],
    parent: bytes,
    option: CcKvOption,
    is_last: bool,
    deadline_s: float,
) -> None:
    """Copies a sub-batch into the staging area from `position` on and asks the agent to take it."""
    offsets, lengths = [], []
    for block in group:
        offsets.append(position)
        lengths.append(cache.size_of(block))
        position += _aligned(lengths[-1])
    targets = [arena[offset : offset + length] for offset, length in zip(offsets, lengths, strict=True)]
    cache.tensors.gather(group, targets)
    keys = b"".join(block.key for block in group)
    link.begin(m.Save(keys, offsets, lengths, parent, option.write_rcache, is_last), deadline_s)


def _collect(link: Link, deadline_s: float, progress: Progress) -> None:
    answer = link.finish(deadline_s)
    if not isinstance(answer, m.Saved):
        raise WireError("expected the result of a save")
    progress.add(answer.statuses)


def _save_direct(
    link: Link, cache: RegisteredCache | Snapshot, request: Request, deadline_s: float, progress: Progress
) -> None:
    """Trusted node: writes into the places the agent reserves, then publishes them with their checksums."""
    parent = request.parent
    for group in _groups(request.blocks, cache.size_of, m.MAX_BLOCK_BYTES):
        lengths = [cache.size_of(block) for block in group]
        keys = b"".join(block.key for block in group)
        answer = link.call(m.Reserve(keys, lengths, parent), deadline_s)
        if not isinstance(answer, m.Reserved) or len(answer.statuses) != len(group):
            raise WireError("expected the result of a reservation")
        sums = []
        for i, block in enumerate(group):
            if answer.statuses[i] == m.Status.STORED:
                offset = answer.offsets[i]
                target = link.segment(answer.segments[i], deadline_s)[offset : offset + lengths[i]]
                cache.tensors.gather([block], [target])
                sums.append(xxhash.xxh3_128_digest(target.data))
        if not isinstance(link.call(m.Commit(b"".join(sums)), deadline_s), m.Saved):
            raise WireError("expected the result of a commit")
        progress.add(answer.statuses)
        progress.num_bytes += sum(lengths)
        parent = group[-1].key
        if not progress.is_whole:
            return


def load(
    link: Link, cache: RegisteredCache, request: Request, option: CcKvOption, deadline_s: float, progress: Progress
) -> None:
    """Loads the blocks in order until one is missing or damaged; later ones leave the caller's cache as it was."""
    for start in range(0, len(request.blocks), m.MAX_KEYS):
        blocks = request.blocks[start : start + m.MAX_KEYS]
        keys = b"".join(block.key for block in blocks)
        found = link.call(m.Load(keys, option.read_local_only or option.timeout == 0), deadline_s)
        if not isinstance(found, m.Found) or len(found.segments) > len(blocks):
            raise WireError("expected the result of a load")
        before = progress.success
        corrupt = _copy_found(link, cache, blocks, found, deadline_s, progress)
        if found.lease:
            link.begin(m.Release(found.lease, corrupt), max(deadline_s, time.monotonic() + 0.1))
        if progress.success - before < len(blocks):
            return


def _copy_found(
    link: Link, cache: RegisteredCache, blocks: list[Block], found: m.Found, deadline_s: float, progress: Progress
) -> int:
    """Verifies each pinned block where it lies, then copies it. Returns the index of a damaged one, or -1."""
    sums = m.split_sums(found.sums)
    segments = {number: link.segment(number, deadline_s) for number in dict.fromkeys(found.segments)}
    batch = cache.tensors.batch
    for start in range(0, len(found.segments), batch):
        sources: list[Bytes] = []
        corrupt = -1
        for i in range(start, min(start + batch, len(found.segments))):
            offset, length = found.offsets[i], found.lengths[i]
            source = segments[found.segments[i]][offset : offset + length]
            if length != cache.size_of(blocks[i]) or xxhash.xxh3_128_digest(source.data) != sums[i]:
                corrupt = i
                break
            sources.append(source)
            progress.num_bytes += length
        if time.monotonic() > deadline_s:
            raise TimeoutError("deadline passed")
        cache.tensors.scatter(blocks[start : start + len(sources)], sources)
        progress.success += len(sources)
        if corrupt >= 0:
            return corrupt
    return -1
