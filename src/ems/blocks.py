"""From the arguments of a call to blocks: names, token counts, and where their tokens lie in the registered cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ems.common.exception import EmsErrorCode, EmsException, invalid_argument
from ems.keys import KEY_BYTES, KeySpace
from ems.native.plan import Planner, native_cut
from ems.runs import SKIPPED, Blocks, Run

Slots = npt.NDArray[np.int64]
_MAX_TOKEN = 2**63
_Names = Callable[[int, int], bytes]


class Request:
    """The blocks of a call, in chain order. A block's bytes are, tensor by tensor, its tokens in order.

    blocks: their positions. tokens: for each layer group, the number of tokens of each block. parent: the key before
    the first block, or empty.
    """

    def __init__(self, blocks: Blocks, tokens: list[list[int]], names: _Names, parent: bytes = b"") -> None:
        self.blocks = blocks
        self.tokens = tokens
        self.parent = parent
        self._names = names

    def __len__(self) -> int:
        return len(self.blocks)

    def keys(self, start: int, end: int) -> bytes:
        """The names of blocks start .. end, packed. Computed on demand, so that the first can be sent before the last
        is known.
        """
        return self._names(start, end)


@dataclass(frozen=True, slots=True)
class Cache:
    """What planning needs of the registered cache: its names, tokens a block, number of slots."""

    keys: KeySpace
    block_size: int
    num_slots: int
    groups: tuple[tuple[int, int], ...] = ()  # tokens a block and number of slots of each layer group, if there are any
    planner: Planner | None = None  # plans calls that are plain

    def names(self, hashes: Sequence[int]) -> bytes:
        """Of full blocks, packed."""
        sizes = [size for size, _slots in self.groups] or [self.block_size]
        return self.keys.of_chunks(hashes, np.array([sizes], np.int64).repeat(len(hashes), 0))


class Arguments(NamedTuple):
    """Unchecked arguments of a save or load. others: keyword arguments beyond the first three."""

    slot_mapping: object
    hashes: object
    offsets: object
    others: dict[str, Any]


def plan(cache: Cache, arguments: Arguments, is_load: bool = False) -> Request:
    """The blocks of a call, under hash semantics (hashes, offsets) or token semantics (token_ids, mask in `others`).

    is_load: tokens that the mask skips are not written if it ends within a block; a save needs whole blocks. Raises
    EmsException(EMS_INVALID_ARGUMENT) that names the argument.
    """
    slot_mapping, hashes, offsets, others = arguments
    unknown = sorted(others.keys() - {"token_ids", "mask", "chunk_descs"})
    if unknown:
        raise invalid_argument(unknown[0], "unknown argument")
    token_ids, mask = others.get("token_ids"), others.get("mask")
    if others.get("chunk_descs") is not None:
        for name, value in (("slot_mapping", slot_mapping), ("offsets", offsets), ("token_ids", token_ids)):
            if value is not None:
                raise invalid_argument(name, "does not go with chunk_descs")
        return _by_chunks(cache, hashes, others["chunk_descs"])
    if cache.groups:
        raise invalid_argument("chunk_descs", "is missing; the cache is registered in layer groups")
    if (hashes is None) == (token_ids is None):
        raise invalid_argument("hashes", "give either hashes and offsets, or token_ids")
    slots = _integers("slot_mapping", slot_mapping)
    if len(slots) == 0:
        raise invalid_argument("slot_mapping", "must not be empty")
    if token_ids is None:
        if mask is not None:
            raise invalid_argument("mask", "belongs to token_ids, not to hashes")
        return _by_hash(cache, slots, hashes, offsets)
    if offsets is not None:
        raise invalid_argument("offsets", "belongs to hashes, not to token_ids")
    return _by_tokens(cache, slots, token_ids, mask, is_load)


def _by_hash(cache: Cache, slots: Slots, hashes: object, offsets: object) -> Request:
    values = plan_hashes(hashes)
    counts = plan_counts(values, offsets)
    if sum(counts) != len(slots):
        raise invalid_argument("offsets", f"sum to {sum(counts)}, slot_mapping has {len(slots)} entries")

    def names(start: int, end: int) -> bytes:
        return cache.keys.of_chunks(values[start:end], np.array(counts[start:end], np.int64)[:, None])

    return Request(_blocks(cache, slots, counts), [counts], names)


def _by_chunks(cache: Cache, hashes: object, chunk_descs: object) -> Request:
    """Chunks of consecutive slots, one a layer group and hash: chunk_descs[group][chunk] = (start_slot, length)."""
    values = plan_hashes(hashes)
    groups = cache.groups or ((cache.block_size, cache.num_slots),)
    if not isinstance(chunk_descs, Sequence) or len(chunk_descs) != len(groups):
        raise invalid_argument("chunk_descs", f"must have one list for each of the {len(groups)} layer groups")
    runs: list[list[tuple[Run, ...]]] = []
    for number, (of_group, (size, num_slots)) in enumerate(zip(chunk_descs, groups, strict=True)):
        name = f"chunk_descs[{number}]"
        if not isinstance(of_group, Sequence) or len(of_group) != len(values):
            raise invalid_argument(name, f"must have one (start_slot, length) for each of {len(values)} hashes")
        runs.append([_runs(name, chunk, size, num_slots) for chunk in of_group])
        _check_apart(name, runs[-1], size)
    tokens = [[sum(count for _block, _start, count in chunk) for chunk in of_group] for of_group in runs]
    lengths = np.array(tokens, np.int64).T

    def names(start: int, end: int) -> bytes:
        return cache.keys.of_chunks(values[start:end], lengths[start:end])

    return Request(Blocks.of(list(zip(*runs, strict=True))), tokens, names)


def _runs(name: str, chunk: object, block_size: int, num_slots: int) -> tuple[Run, ...]:
    """The runs of `length` slots from `start_slot` on."""
    numbers = _integers(name, chunk).tolist()
    if len(numbers) != 2:
        raise invalid_argument(name, "each chunk is (start_slot, length)")
    start, length = numbers
    if length < 1 or start < 0 or start + length > num_slots:
        raise invalid_argument(name, f"({start}, {length}) is not within 0 to {num_slots - 1}")
    runs = []
    while length:
        count = min(length, block_size - start % block_size)
        runs.append((start // block_size, start % block_size, count))
        start, length = start + count, length - count
    return tuple(runs)


def _check_apart(name: str, chunks: list[tuple[Run, ...]], block_size: int) -> None:
    """Refuses chunks that share a slot: after a load the slot would hold the last one's data."""
    spans = sorted((runs[0][0] * block_size + runs[0][1], sum(count for *_where, count in runs)) for runs in chunks)
    for (start, length), (after, _length) in pairwise(spans):
        if after < start + length:
            raise invalid_argument(name, f"slot {after} is named more than once")


def plan_counts(hashes: list[int], offsets: object) -> list[int]:
    """The tokens of each block."""
    counts: list[int] = _integers("offsets", offsets).tolist()
    if len(hashes) != len(counts):
        raise invalid_argument("hashes", f"{len(hashes)} hashes for {len(counts)} offsets")
    if counts and min(counts) < 1:
        raise invalid_argument("offsets", "each must be at least 1")
    return counts


def plan_hashes(hashes: object) -> list[int]:
    """The hashes as integers of any size and sign, from a list, array or tensor."""
    if isinstance(hashes, Sequence) and not isinstance(hashes, str | bytes):
        types = set(map(type, hashes))
        if types <= {int}:
            return list(hashes)
        if all(issubclass(t, int | np.integer) and t is not bool for t in types):
            return list(map(int, hashes))
    elif hasattr(hashes, "__array__"):
        array = _array("hashes", hashes)
        if array.ndim == 1 and array.dtype.kind in "iu":
            return [int(value) for value in array]
    raise invalid_argument("hashes", "must be a list of integers")


def _by_tokens(cache: Cache, slots: Slots, token_ids: object, mask: object, is_load: bool) -> Request:
    tokens = _integers("token_ids", token_ids)
    if len(tokens) != len(slots):
        raise invalid_argument("token_ids", f"{len(tokens)} tokens for {len(slots)} entries of slot_mapping")
    skipped = 0
    if mask is not None:
        bits = _integers("mask", mask, has_bools=True)
        if len(bits) != len(slots):
            raise invalid_argument("mask", f"{len(bits)} entries for {len(slots)} entries of slot_mapping")
        if ((bits != 0) & (bits != 1)).any() or (np.diff(bits) < 0).any():
            raise invalid_argument("mask", "must be zeros followed by ones")
        skipped = len(bits) - int(bits.sum())
    size = cache.block_size
    keys = cache.keys.of_sequence(tokens, size)
    counts = [min(size, len(tokens) - start) for start in range(0, len(tokens), size)]
    first = len(counts) if skipped == len(tokens) else skipped // size
    blocks = _blocks(cache, slots[first * size :], counts[first:])
    if is_load and blocks and skipped % size:
        blocks = Blocks.of([(_without(blocks[0][0], skipped % size),), *blocks[1:]])
    before, names = keys[: first * KEY_BYTES], keys[first * KEY_BYTES :]
    parent = before[-KEY_BYTES:]
    return Request(blocks, [counts[first:]], lambda start, end: names[start * KEY_BYTES : end * KEY_BYTES], parent)


def _without(runs: tuple[Run, ...], count: int) -> tuple[Run, ...]:
    """The runs with the first `count` tokens skipped."""
    left, kept = count, []
    for number, start, length in runs:
        skipped = min(left, length)
        left -= skipped
        if length > skipped:
            kept.append((number, start + skipped, length - skipped))
    return ((SKIPPED, 0, count), *kept)


def _blocks(cache: Cache, slots: Slots, counts: list[int]) -> Blocks:
    """Cuts the slots into blocks, and each block into runs of consecutive slots within one block of the cache."""
    cut = native_cut(slots, counts, cache.block_size, cache.num_slots)
    if cut is not None:
        return cut
    if len(slots) and (slots.min() < 0 or slots.max() >= cache.num_slots):
        raise invalid_argument("slot_mapping", f"slots must be 0 to {cache.num_slots - 1}")
    size = cache.block_size
    starts = list(accumulate(counts, initial=0))
    is_first = np.ones(len(slots), np.bool_)
    is_first[1:] = (slots[1:] != slots[:-1] + 1) | (slots[1:] % size == 0)
    is_first[starts[:-1]] = True
    cuts = np.flatnonzero(is_first)
    runs = np.empty((len(cuts), 3), np.int64)
    runs[:, 0], runs[:, 1] = np.divmod(slots[cuts], size)
    runs[:-1, 2], runs[-1:, 2] = cuts[1:] - cuts[:-1], len(slots) - cuts[-1:]
    if len(set(runs[:, 0].tolist())) < len(runs):  # several runs in one block may overlap
        once, times = np.unique(slots, return_counts=True)
        if len(once) < len(slots):
            raise invalid_argument("slot_mapping", f"slot {once[times.argmax()]} is named more than once")
    return Blocks(runs, cuts.searchsorted(starts))


def _array(name: str, values: object) -> npt.NDArray[np.generic]:
    try:
        if hasattr(values, "detach"):
            values = values.detach().cpu().numpy()
        return np.asarray(values)
    except (ValueError, OverflowError, TypeError, RuntimeError):  # torch: a type or layout that numpy lacks, no data
        raise invalid_argument(name, "must be a flat list of integers") from None


def _integers(name: str, values: object, has_bools: bool = False) -> Slots:
    """An array of integers from a list, tuple, array or tensor; has_bools: or of bools. Raises an error that names
    `name`.
    """
    if values is None:
        raise invalid_argument(name, "is missing")
    array = _array(name, values)
    if has_bools and array.dtype.kind == "b":
        array = array.astype(np.int64)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise invalid_argument(name, "must be a flat list of integers")
    if array.dtype.kind == "u" and array.size and int(array.max()) >= _MAX_TOKEN:
        raise EmsException(EmsErrorCode.EMS_INVALID_ARGUMENT, f"{name}: must fit into 64 bits")
    return array.astype(np.int64)
