"""Saving and loading over one link: sub-batches whose copies overlap with the agent's work, and verified reads.

Both update a `Progress` as they go, so that a call that is cut short still knows the prefix it finished.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ems import road
from ems.blocks import Request
from ems.buffer import RegisteredCache, Snapshot
from ems.config import CcKvOption
from ems.keys import KEY_BYTES
from ems.native.calls import PARTLY, NativeCalls
from ems.native.functions import Plan, Save
from ems.native.line import FIRST_BYTES, REGION_BYTES, REGIONS, Loaded, WantedLoad, WantedSave
from ems.runs import Areas, Blocks, Bytes
from ems.transport import Link
from ems.wire import messages as m
from ems.wire.frames import WireError

_NO_ROOM = (
    "a save found room for its first blocks only: what this tenant may use of the pool is smaller than the save, or "
    "full of what is being read and written; the agent's /metrics count such blocks by cause"
)
_GROUP_KEYS = 64  # blocks a sub-batch: each costs a message
_FIRST_BYTES = 256 << 10  # bytes of the first sub-batch: small, so that the agent begins soon; later ones grow
_GROWTH = 4
_SUCCESSES = bytes(status for status in m.Status if status.is_success)
_ALIGN = 64


@dataclass(slots=True)
class Progress:
    """Blocks of the contiguous prefix that are done, those of them that are on this node only, and bytes moved."""

    success: int = 0
    local: int = 0
    num_bytes: int = 0
    problem: m.Status | None = None  # result of the first block that was not saved

    @property
    def is_whole(self) -> bool:
        """Whether no block has failed so far."""
        return self.problem is None

    def add(self, statuses: bytes) -> None:
        """Counts the statuses of the next sub-batch."""
        if self.is_whole:
            count = len(statuses) - len(statuses.lstrip(_SUCCESSES))
            self.success += count
            self.local += statuses.count(m.Status.LOCAL, 0, count)
            self.problem = m.Status(statuses[count]) if count < len(statuses) else None

    def add_counted(self, done: Save) -> None:
        """Add the counters of a save in one call."""
        self.success += done.num_success
        self.local += done.num_local
        self.num_bytes += done.done_bytes
        self.problem = m.Status(done.problem) if done.problem >= 0 else None


@dataclass(slots=True)
class Transfer:
    """A save or load over a lent link. request: a Plan only where C++ can carry it out."""

    link: Link
    request: Request | Plan
    option: CcKvOption
    deadline_s: float  # of time.monotonic()
    progress: Progress

    @property
    def is_local(self) -> bool:
        """Whether no other node is asked."""
        return self.option.read_local_only or self.option.timeout == 0


class Begun(NamedTuple):
    """A call in one step that C++ returned with something left to do or to report."""

    link: Link
    calls: NativeCalls
    problem: int


def _groups(sizes: Sequence[int], first_bytes: int, max_bytes: int) -> list[range]:
    """Cuts the blocks into growing sub-batches of at most _GROUP_KEYS blocks and `max_bytes`, one block at least."""
    groups: list[range] = []
    start, room, limit = 0, 0, first_bytes
    for i, size in enumerate(map(_aligned, sizes)):
        if i - start == _GROUP_KEYS or size > room:
            groups.append(range(start, i))
            start, room = i, min(limit, max_bytes)
            limit *= _GROWTH
        room -= size
    return [*groups[1:], range(start, len(sizes))]


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def save(transfer: Transfer, cache: RegisteredCache | Snapshot, begun: Begun | None = None) -> None:
    """Save the blocks in order; stop at the first that the pool does not accept."""
    request, link = transfer.request, transfer.link
    if begun is not None:
        done = begun.calls.last.save
        try:
            link.finish_save(done, 0 if begun.problem == PARTLY else begun.problem, transfer.deadline_s)
        finally:
            transfer.progress.add_counted(done)
    elif isinstance(request, Plan) and request.largest <= link.welcome.max_block_bytes:
        _save_natively(transfer, request, len(request), request.largest)
    else:
        _save_fitting(transfer, cache)
    if transfer.progress.problem is m.Status.NO_ROOM:
        link.complain(_NO_ROOM)


def _save_fitting(transfer: Transfer, cache: RegisteredCache | Snapshot) -> None:
    """Up to the first block that is too large for the pool."""
    request, link = transfer.request, transfer.link
    sizes = _sizes(request, cache)
    largest, limit = max(sizes), link.welcome.max_block_bytes
    if largest > limit:
        link.complain(
            f"a block of {largest} bytes is not saved, nor any behind it: the agent's --slab, its largest block, "
            f"is {limit}"
        )
        sizes = sizes[: next(i for i, size in enumerate(sizes) if size > limit)]
        if not sizes:
            return
    plan = road.planned(link, request, cache, sizes)
    if plan is not None:
        parent = request.parent if isinstance(request, Request) else b""
        _save_natively(transfer, plan, len(sizes), max(sizes), parent)
        return
    assert isinstance(request, Request), "a plan is for C++"
    if link.welcome.is_direct:
        _save_direct(transfer, request, cache, sizes)
    else:
        _save_staged(transfer, request, cache, sizes)


def _sizes(request: Request | Plan, cache: RegisteredCache | Snapshot) -> list[int]:
    """Bytes of each block."""
    if isinstance(request, Plan):
        return request.all_sizes()
    sizes: list[int] = cache.sizes(request).tolist()
    return sizes


def _save_natively(transfer: Transfer, plan: Plan, num: int, largest: int, parent: bytes = b"") -> None:
    """As `_save_direct` or `_save_staged`, for the first `num` blocks in one call. largest: bytes of the largest."""
    wanted = WantedSave(plan, num, parent)
    if not transfer.link.welcome.is_direct:
        arena, num_regions, region_bytes = _regions(transfer, largest)
        wanted = wanted._replace(
            arena=arena,
            region_bytes=region_bytes,
            num_regions=num_regions,
            first_bytes=FIRST_BYTES,
            write_rcache=transfer.option.write_rcache,
        )
    call = wanted.call()
    try:
        transfer.link.save(call, transfer.deadline_s)
    finally:
        transfer.progress.add_counted(call)


def _regions(transfer: Transfer, largest: int) -> tuple[Bytes, int, int]:
    """Staging memory for blocks of at most `largest` bytes: number of messages that use it in turn, and bytes of
    each.
    """
    largest = _aligned(largest)
    region_bytes = max(largest, min(REGION_BYTES, largest * _GROUP_KEYS))
    arena = transfer.link.arena(region_bytes * REGIONS, largest, transfer.deadline_s)
    num_regions = min(REGIONS, len(arena) // largest)
    return arena, num_regions, len(arena) // num_regions // _ALIGN * _ALIGN


def _save_staged(transfer: Transfer, request: Request, cache: RegisteredCache | Snapshot, sizes: list[int]) -> None:
    """Copy into the agent's staging memory, region by region, while the agent processes the regions before."""
    link, deadline_s, progress = transfer.link, transfer.deadline_s, transfer.progress
    arena, num_regions, region_bytes = _regions(transfer, max(sizes))
    groups = _groups(sizes, _FIRST_BYTES, region_bytes)
    parent, under_way, is_ended = request.parent, 0, False
    for index, group in enumerate(groups):
        if under_way == num_regions:
            _collect(transfer)
            under_way -= 1
            if not progress.is_whole:
                break
        part = slice(group.start, group.stop)
        keys, lengths = request.keys(group.start, group.stop), sizes[part]
        is_ended = index == len(groups) - 1
        offsets = list(accumulate(map(_aligned, lengths[:-1]), initial=(index % num_regions) * region_bytes))
        cache.tensors.gather(request.blocks[part], Areas({0: arena}, [0] * len(offsets), offsets, lengths))
        message = m.Save(keys, offsets, lengths, parent, transfer.option.write_rcache, is_ended)
        link.begin(message, deadline_s)
        under_way += 1
        parent = keys[-KEY_BYTES:]
        progress.num_bytes += sum(lengths)
    if not is_ended:
        link.begin(m.Save(b"", [], []), deadline_s)
        under_way += 1
    for _ in range(under_way):
        _collect(transfer)


def _collect(transfer: Transfer) -> None:
    transfer.progress.add(transfer.link.finish(m.Saved, transfer.deadline_s).statuses)


def _save_direct(transfer: Transfer, request: Request, cache: RegisteredCache | Snapshot, sizes: list[int]) -> None:
    """Trusted node: write into memory that the agent reserves, then publish it with its checksums."""
    link, deadline_s, progress = transfer.link, transfer.deadline_s, transfer.progress
    parent = request.parent
    for group in _groups(sizes, m.MAX_BLOCK_BYTES, m.MAX_BLOCK_BYTES):
        keys, lengths = request.keys(group.start, group.stop), sizes[group.start : group.stop]
        answer = link.call(m.Reserve(keys, lengths, parent), deadline_s)
        if len(answer.statuses) != len(group):
            raise WireError("expected the result of a reservation")
        link.keep_up(answer.num_given_back)
        reserved = [i for i, status in enumerate(answer.statuses) if status == m.Status.STORED]
        segments = _mapped(link, [answer.segments[i] for i in reserved], deadline_s)
        sums = b""
        for i in reserved:
            target = Areas(segments, answer.segments[i : i + 1], answer.offsets[i : i + 1], lengths[i : i + 1])
            if not target.are_within():
                raise WireError("a reservation outside of its segment")
            sums += cache.tensors.gather_summed(request.blocks[group[i] : group[i] + 1], target)
        saved = link.call(m.Commit(sums), deadline_s)
        if len(saved.statuses) != len(reserved):
            raise WireError("expected the result of a commit")
        statuses = bytearray(answer.statuses)
        for i, status in zip(reserved, saved.statuses, strict=True):
            statuses[i] = status
        progress.add(bytes(statuses))
        progress.num_bytes += sum(lengths)
        parent = keys[-KEY_BYTES:]
        if not progress.is_whole:
            return


def _mapped(link: Link, segments: list[int], deadline_s: float) -> dict[int, Bytes]:
    """The memory of each of these segments."""
    return {number: link.segment(number, deadline_s) for number in dict.fromkeys(segments)}


def load(transfer: Transfer, cache: RegisteredCache, begun: Begun | None = None) -> None:
    """Load the blocks in order until one is missing or damaged; later ones leave the caller's cache unchanged.

    Where copies of other nodes' blocks found no room beside those being read, these are released, and it continues.
    """
    request, progress = transfer.request, transfer.progress
    sizes = _sizes(request, cache)
    if begun is not None:
        problem = 0 if begun.problem == PARTLY else begun.problem
        done = transfer.link.finish_load(begun.calls.last.load, problem, transfer.deadline_s)
        progress.success, progress.num_bytes = done.num_done, sum(sizes[: done.num_done])
        if not (_is_cut(done) and done.num_done):
            return
    plan = road.planned(transfer.link, request, cache, sizes)
    start = progress.success
    while start < len(sizes):
        part = slice(start, min(start + m.MAX_KEYS, len(sizes)))
        before = progress.success
        if plan is not None:
            is_cut = _load_natively(transfer, plan, sizes, part)
        else:
            is_cut = _load_part(transfer, cache, sizes, part)
        count = progress.success - before
        if count < part.stop - start and not (is_cut and count):
            return
        start += count


def _load_natively(transfer: Transfer, plan: Plan, sizes: list[int], part: slice) -> bool:
    """As `_load_part`, in one call."""
    progress = transfer.progress
    done = transfer.link.load(WantedLoad(plan, part.start, part.stop, transfer.is_local), transfer.deadline_s)
    progress.success += done.num_done
    progress.num_bytes += sum(sizes[part.start : part.start + done.num_done])
    return _is_cut(done)


def _is_cut(done: Loaded) -> bool:
    """Whether a load stopped because copies found no room."""
    return done.cause == m.Cause.NO_ROOM and not done.is_damaged


def _load_part(transfer: Transfer, cache: RegisteredCache, sizes: list[int], part: slice) -> bool:
    """Load the prefix of some blocks. Returns whether it stopped because copies found no room."""
    link, request = transfer.link, transfer.request
    assert isinstance(request, Request), "a plan is for C++"
    found = link.call(m.Load(request.keys(part.start, part.stop), transfer.is_local), transfer.deadline_s)
    if len(found.segments) > part.stop - part.start:
        raise WireError("expected the result of a load")
    corrupt = _copy_found(transfer, cache, request.blocks[part], sizes[part], found)
    if found.lease:
        link.begin(m.Release(found.lease, corrupt), max(transfer.deadline_s, time.monotonic() + 0.1))
    return found.cause == m.Cause.NO_ROOM and corrupt < 0


def _copy_found(transfer: Transfer, cache: RegisteredCache, blocks: Blocks, sizes: list[int], found: m.Found) -> int:
    """Verify each pinned block in place, then copy it. Returns the index of a damaged one, or -1."""
    tensors, progress = cache.tensors, transfer.progress
    transfer.link.keep_up(found.num_given_back)
    segments = _mapped(transfer.link, found.segments, transfer.deadline_s)
    areas = Areas(segments, found.segments, found.offsets, found.lengths)
    if not areas.are_within():
        raise WireError("a block outside of its segment")
    batch = max(1, tensors.batch_bytes // max(sizes))
    for start in range(0, len(areas), batch):
        lengths = found.lengths[start : start + batch]
        wanted = sizes[start : start + len(lengths)]
        alike = len(lengths) if lengths == wanted else next(i for i, n in enumerate(lengths) if n != wanted[i])
        if time.monotonic() > transfer.deadline_s:
            raise TimeoutError("deadline passed")
        part = slice(start, start + alike)
        sums = found.sums[part.start * m.SUM_BYTES : part.stop * m.SUM_BYTES]
        done = tensors.scatter_checked(blocks[part], areas[part], sums)
        progress.success += done
        progress.num_bytes += sum(lengths[:done])
        if done < len(lengths):
            return start + done
    return -1
