"""Putting and getting a batch of values over one link. Results are recorded as they come: a call may be cut short.

A value's bytes are copied once, into staging memory or out of the pool; those of a get are verified in place.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate

import numpy as np
import xxhash

from ems import road
from ems.config import CcKvOption
from ems.native.functions import LOADED, UNDECIDED
from ems.native.line import FIRST_BYTES, REGION_BYTES, REGIONS, WantedLoad, WantedSave
from ems.native.tensors import plan_of_values
from ems.transport import Link
from ems.values.memory import Bytes, copy_in, copy_out
from ems.wire import messages as m
from ems.wire.frames import WireError

_GROUP_KEYS = 64  # values in one message
_PICKED_BYTES = 64 << 20  # approximate bytes that a get pins at once
_ALIGN = 64
_TOO_LARGE = "a value of %d bytes is not kept: the agent's --slab, its largest block, is %d"


class KvStatus(IntEnum):
    """Result for one value of a put."""

    STORED = m.Status.STORED
    PRESENT = m.Status.DUPLICATE  # the same bytes were there
    CONFLICT = m.Status.CONFLICT  # other bytes of the same length were there and stay: the first put wins
    NO_ROOM = m.Status.NO_ROOM
    TOO_LARGE = m.Status.TOO_LARGE  # larger than the agent's largest block
    LIMITED = m.Status.LIMITED  # the tenant exceeds its rate
    LOCAL = m.Status.LOCAL  # stored on this node only, where other nodes do not find it
    UNANSWERED = 255  # the call ended before the pool answered

    @property
    def is_success(self) -> bool:
        """Whether the pool has a value with that key and length now."""
        return self in (KvStatus.STORED, KvStatus.PRESENT, KvStatus.CONFLICT, KvStatus.LOCAL)


@dataclass(frozen=True, slots=True)
class Batch:
    """Some values: their pieces of memory, lengths and names."""

    values: list[list[Bytes]]
    sizes: list[int]
    names: list[bytes]
    option: CcKvOption
    deadline_s: float  # of time.monotonic()
    is_chain: bool = False  # a value is useless without those before it

    @property
    def is_local(self) -> bool:
        return self.option.read_local_only or self.option.timeout == 0


def groups_of(sizes: Sequence[int], max_bytes: int) -> list[range]:
    """Cut a batch into groups of at most _GROUP_KEYS values and, beyond the first value, `max_bytes`. Pure."""
    groups, start, room = [], 0, max_bytes
    for i, size in enumerate(sizes):
        room -= _aligned(size)
        if i > start and (room < 0 or i - start == _GROUP_KEYS):
            groups.append(range(start, i))
            start, room = i, max_bytes - _aligned(size)
    return [*groups, range(start, len(sizes))] if sizes else []


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def put(link: Link, batch: Batch, statuses: list[KvStatus]) -> None:
    """Store the values in order, and record results in `statuses`, which holds one UNANSWERED for each value.

    Values behind one that found no room, or exceeded the rate, are not tried; a chain also ends at one that is too
    large.
    """
    limit = link.welcome.max_block_bytes
    fitting = [i for i, size in enumerate(batch.sizes) if size <= limit]
    if len(fitting) < len(batch.sizes):
        link.complain(_TOO_LARGE % (max(batch.sizes), limit))
        first = next(i for i, size in enumerate(batch.sizes) if size > limit)
        for i, size in enumerate(batch.sizes):
            if size > limit or (batch.is_chain and i > first):
                statuses[i] = KvStatus.TOO_LARGE
        fitting = [i for i in fitting if not batch.is_chain or i < first]
    if fitting and road.is_planned(link):
        _put_natively(link, batch, fitting, statuses)
    elif fitting:
        _put_staged(link, batch, fitting, statuses)


def _put_natively(link: Link, batch: Batch, fitting: list[int], statuses: list[KvStatus]) -> None:
    """As `_put_staged`, in one call."""
    arena, num_regions, region_bytes = _regions(link, batch, fitting)
    found = np.full(len(fitting), KvStatus.UNANSWERED, np.uint8)
    call = WantedSave(
        plan=plan_of_values(batch.values, batch.sizes, batch.names, fitting),
        num_blocks=len(fitting),
        parent=b"",
        arena=arena,
        region_bytes=region_bytes,
        num_regions=num_regions,
        first_bytes=FIRST_BYTES,
        write_rcache=batch.option.write_rcache,
        is_chain=batch.is_chain,
        statuses=found,
    ).call()
    try:
        link.save(call, batch.deadline_s)
    finally:
        for i, status in zip(fitting, found.tolist(), strict=True):
            statuses[i] = KvStatus(status)
    if call.problem >= 0:
        _refuse_rest(fitting, statuses, KvStatus(call.problem))


def _refuse_rest(fitting: list[int], statuses: list[KvStatus], refusal: KvStatus) -> None:
    for i in fitting:
        statuses[i] = refusal if statuses[i] is KvStatus.UNANSWERED else statuses[i]


def _regions(link: Link, batch: Batch, fitting: list[int]) -> tuple[Bytes, int, int]:
    """Staging memory: number of messages that use it in turn, and bytes of each."""
    sizes = [_aligned(batch.sizes[i]) for i in fitting]
    largest = max(sizes)
    region_bytes = max(largest, min(REGION_BYTES, sum(sizes)))
    arena = link.arena(region_bytes * REGIONS, largest, batch.deadline_s)
    num_regions = min(REGIONS, len(arena) // largest)
    return arena, num_regions, len(arena) // num_regions // _ALIGN * _ALIGN


def _put_staged(link: Link, batch: Batch, fitting: list[int], statuses: list[KvStatus]) -> None:
    """Copy group after group into staging memory while the agent processes the groups before."""
    arena, num_regions, region_bytes = _regions(link, batch, fitting)
    sizes = [batch.sizes[i] for i in fitting]
    groups = groups_of(sizes, region_bytes)
    under_way: list[list[int]] = []
    refusal: KvStatus | None = None
    is_ended, parent = False, b""
    for number, group in enumerate(groups):
        if len(under_way) == num_regions:
            refusal = _collect(link, batch, under_way.pop(0), statuses)
            if refusal is not None:
                break
        members = fitting[group.start : group.stop]
        lengths = sizes[group.start : group.stop]
        offsets = list(accumulate(map(_aligned, lengths[:-1]), initial=(number % num_regions) * region_bytes))
        for i, offset, length in zip(members, offsets, lengths, strict=True):
            copy_in(batch.values[i], arena[offset : offset + length])
        is_ended = number == len(groups) - 1
        names = b"".join(batch.names[i] for i in members)
        is_kept = batch.option.write_rcache
        link.begin(m.Save(names, offsets, lengths, parent, is_kept, is_ended, batch.is_chain), batch.deadline_s)
        parent = batch.names[members[-1]] if batch.is_chain else b""
        under_way.append(members)
    if not is_ended:
        link.begin(m.Save(b"", [], []), batch.deadline_s)
        under_way.append([])
    for members in under_way:
        refusal = _collect(link, batch, members, statuses) or refusal
    if refusal is not None:
        _refuse_rest(fitting, statuses, refusal)


def _collect(link: Link, batch: Batch, members: list[int], statuses: list[KvStatus]) -> KvStatus | None:
    """Record the answer for one group. Returns the status that ends the batch, if any."""
    answer = link.finish(m.Saved, batch.deadline_s)
    if len(answer.statuses) != len(members):
        raise WireError("expected the result of a put")
    for i, status in zip(members, answer.statuses, strict=True):
        statuses[i] = KvStatus(status)
    last = statuses[members[-1]] if members else KvStatus.STORED
    return None if last.is_success else last


def get(link: Link, batch: Batch, found: list[bool | None]) -> None:
    """Fill the memory of those values that the pool has, and record for each whether it was there; others are
    unchanged.
    """
    groups = groups_of(batch.sizes, _PICKED_BYTES)
    if groups and road.is_planned(link):
        _get_natively(link, batch, groups, found)
        return
    for group in groups:
        names = b"".join(batch.names[group.start : group.stop])
        answer = link.call(m.Pick(names, batch.is_local), batch.deadline_s)
        if len(answer.segments) != len(group):
            raise WireError("expected the result of a get")
        corrupt = _copy_found(link, batch, group, answer, found)
        if answer.lease:
            link.begin(m.Release(answer.lease, corrupt), max(batch.deadline_s, time.monotonic() + 0.1))


def _get_natively(link: Link, batch: Batch, groups: list[range], found: list[bool | None]) -> None:
    """The same, one call for each group."""
    plan = plan_of_values(batch.values, batch.sizes, batch.names, range(len(batch.sizes)))
    for group in groups:
        known = np.zeros(len(group), np.uint8)
        try:
            link.load(WantedLoad(plan, group.start, group.stop, batch.is_local, known), batch.deadline_s)
        finally:
            for i, what in zip(group, known.tolist(), strict=True):
                found[i] = None if what == UNDECIDED else what == LOADED


def _copy_found(link: Link, batch: Batch, group: range, answer: m.Found, found: list[bool | None]) -> int:
    """Verify each pinned value in place, then copy it. Returns the index of the first damaged one, or -1."""
    link.keep_up(answer.num_given_back)
    is_here = [length > 0 for length in answer.lengths]
    numbers = dict.fromkeys(s for s, is_one in zip(answer.segments, is_here, strict=True) if is_one)
    segments = {number: link.segment(number, batch.deadline_s) for number in numbers}
    blocks = zip(answer.segments, answer.offsets, answer.lengths, m.split_sums(answer.sums), strict=True)
    corrupt, num_here = -1, 0
    for i, (segment, offset, length, checksum) in zip(group, blocks, strict=True):
        found[i] = False
        if not length:
            continue
        if time.monotonic() > batch.deadline_s:
            found[i] = None
            raise TimeoutError("deadline passed")
        source = segments[segment][offset : offset + length]
        if length == batch.sizes[i] and xxhash.xxh3_128_digest(source.data) == checksum:
            copy_out(source, batch.values[i])
            found[i] = True
        elif corrupt < 0:
            corrupt = num_here
        num_here += 1
    return corrupt


def has(link: Link, batch: Batch) -> list[bool]:
    """Which of the values a get would find."""
    found = b""
    for start in range(0, len(batch.names), m.MAX_KEYS):
        names = batch.names[start : start + m.MAX_KEYS]
        answer = link.call(m.Has(b"".join(names), batch.is_local), batch.deadline_s)
        if len(answer.found) != len(names):
            raise WireError("expected which keys are there")
        found += answer.found
    return list(map(bool, found))


def ping(link: Link, batch: Batch) -> None:
    """Returns when the agent has answered."""
    link.call(m.Ping(), batch.deadline_s)
