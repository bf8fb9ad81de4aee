"""What the next step computes: plan_step decides and changes nothing; commit.py carries the plan out.

A step is {sequence: number of tokens}. Prefill chunks, prefix-cache hits, decodes and resumed sequences are all the
same thing: a sequence with tokens whose keys and values are not computed yet.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from kvloom.contract.config import Limits
from kvloom.engine.schedule.blocks import BlockPool
from kvloom.engine.schedule.free import (
    Free,
    Need,
    asked_windows,
    first_step_needs,
    free_of,
    needed,
    owed,
    room_for,
    step_tokens,
    taken,
)
from kvloom.engine.schedule.prefix import Prefix, find_prefix, mark_of
from kvloom.engine.schedule.seq import LoadStep, Plan, Seq, SeqStep, Status, num_blocks_of
from kvloom.engine.schedule.swap import SwapCosts, is_swap_cheaper

Key = Callable[[Seq], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Policy:
    """Which sequence comes first: sort keys for waiting and running sequences. None = order of arrival."""

    waiting: Key | None = None
    running: Key | None = None


FCFS = Policy()
_NOTHING_MEASURED = SwapCosts()


class Circumstances(NamedTuple):
    """Inputs of a plan besides sequences, blocks and limits."""

    policy: Policy = FCFS
    oldest_wait_s: float = float("inf")  # how long the oldest waiting request has waited
    costs: SwapCosts = _NOTHING_MEASURED
    asks_tier: bool = False  # whether the outer KV tier may be asked in this step
    alone: Seq | None = None  # the only sequence that may compute; see suspicion.py


PLAIN = Circumstances()


@dataclass(slots=True)
class _Budget:
    """What a step has left for waiting sequences; every admission takes its part."""

    num_seqs: int  # sequences that may join
    num_tokens: int
    free: Free
    spare: Free  # what is free and not promised to running sequences
    is_shared: bool  # whether running sequences compute in this step


class _Running(NamedTuple):
    """What a step does with the running sequences."""

    seqs: list[Seq]
    steps: list[SeqStep]
    preempted: list[Seq]  # the last of the order comes first
    free: Free  # what is left


class _Coming(NamedTuple):
    """Hashes of blocks that are on their way. A waiting sequence whose next block is among them waits for it."""

    loaded: set[bytes] | None  # from the outer tier; None = the tier is not asked
    computed: set[bytes] | None  # for other sequences; None = nobody waits for those


def plan_step(seqs: Sequence[Seq], pool: BlockPool, limits: Limits, now: Circumstances = PLAIN) -> Plan:
    """What the next model step computes. Reads `seqs` (arrival order) and `pool`, changes nothing.

    Running sequences come first, in the policy's order (arrival by default); then waiting ones in theirs, while blocks
    last. Decodes get their token before prefills share what is left of the budget. A running sequence that finds no
    block preempts the last one; the first is never preempted, so some sequence always advances. A preempted sequence is
    swapped out where `now.costs` say that this is cheaper than computing it again and the host has room. Drafts get
    what budget and blocks are left over.

    With `now.alone` that sequence, running or waiting, is the only one that computes or is admitted; others give up
    blocks for it if they must.

    A sequence that is computed whole (Seq.is_whole) joins a step that has room for all of it; one longer than any step
    gets a step of its own.

    A waiting sequence whose next block is just being computed for another one waits for it; those behind it go on. So
    the answers to one prompt, and prompts that begin alike, are not computed at once several times.

    With `now.asks_tier` a waiting sequence whose next block is not cached first asks the outer tier, once, for all
    blocks that it lacks. Others go on meanwhile, except those that would ask for the same block.
    """
    alone = now.alone
    ordered, waiting = _queues(seqs, now)
    room = step_tokens(pool, len(ordered), limits.block_size)
    share = _share_tokens(ordered if alone is None else [seq for seq in ordered if seq is alone], limits, room)
    running = _plan_running(ordered, share, pool, limits)
    if running.preempted:
        return _preempting(running.steps, running.preempted, pool, now.costs)
    steps, free = running.steps, running.free
    loads: list[LoadStep] = []
    loading = [seq for seq in seqs if seq.status is Status.LOADING]
    if waiting and (alone is not None or may_admit(len(waiting), running.seqs, limits, now.oldest_wait_s)):
        budget = _budget(running, len(loading), pool, limits)
        coming = _Coming(
            {key for seq in loading for key in seq.loading} if now.asks_tier else None,
            _being_computed(running, pool, limits) if may_hold(pool, limits, alone) else None,
        )
        admitted, loads = _plan_waiting(waiting, budget, pool, limits, coming)
        steps, free = steps + admitted, budget.free
    if alone is not None and waiting and ordered and not (steps or loads or loading):
        return _preempting([], ordered[-1:], pool, now.costs)
    num_admitted = len(steps) - len(running.steps)
    num_drafting = pool.snapshots.num_states - len(running.seqs) - num_admitted if pool.states.count else len(steps)
    return Plan(tuple(_with_drafts(steps, free, num_drafting, limits)), loads=tuple(loads))


def _queues(seqs: Sequence[Seq], now: Circumstances) -> tuple[list[Seq], list[Seq]]:
    """Running and waiting sequences in order. One that computes alone is first, and so never preempted."""
    running = _ordered([seq for seq in seqs if seq.status is Status.RUNNING], now.policy.running)
    waiting = _ordered([seq for seq in seqs if seq.status is Status.WAITING], now.policy.waiting)
    if now.alone is not None:
        running.sort(key=lambda seq: seq is not now.alone)
        waiting = [seq for seq in waiting if seq is now.alone]
    return running, waiting


def _preempting(steps: Sequence[SeqStep], preempted: Sequence[Seq], pool: BlockPool, costs: SwapCosts) -> Plan:
    return Plan(tuple(steps), tuple(preempted), tuple(_choose_swapped(preempted, pool, costs)))


def _choose_swapped(preempted: Iterable[Seq], pool: BlockPool, costs: SwapCosts) -> list[Seq]:
    chosen, free = [], pool.host.num_free
    for seq in preempted:
        count = len(seq.block_table) + pool.snapshots.state_host_blocks
        if count <= free and is_swap_cheaper(count, seq.num_computed, costs):
            chosen.append(seq)
            free -= count
    return chosen


def may_admit(num_waiting: int, running: Sequence[Seq], limits: Limits, oldest_wait_s: float) -> bool:
    """Whether waiting sequences may join this step. Always when nothing runs, so that no rule can stop the engine.

    A static batch ends before the next begins. A waiting batch that is not full is held back up to max_queue_delay_s.
    With is_selecting, prefill goes first only while it is the longer of the two queues by the configured times.
    """
    if not running:
        return True
    if not limits.is_continuous:
        return False
    if num_waiting < limits.prefill_slots and oldest_wait_s < limits.max_queue_delay_s:
        return False
    if not limits.is_selecting:
        return True
    return num_waiting * limits.prefill_ms_per_seq >= len(running) * limits.decode_ms_per_seq


def may_hold(pool: BlockPool, limits: Limits, alone: Seq | None) -> bool:
    """Whether sequences may wait for blocks that others compute: they find them, and nothing else then delays them."""
    return pool.is_caching and limits.is_continuous and not limits.is_selecting and alone is None


def _being_computed(running: _Running, pool: BlockPool, limits: Limits) -> set[bytes]:
    """Hashes of blocks that running sequences compute in this step or in those under way; of states, those that they
    will keep.
    """
    if pool.snapshots.most:
        return {mark.key for seq in running.seqs for mark in (*seq.marks, *(keep.mark for keep in seq.keeping))}
    planned = {step.seq.id: step.num_tokens for step in running.steps}
    return {
        key
        for seq in running.seqs
        for key in _block_hashes(seq, seq.num_published, seq.next_start + planned.get(seq.id, 0), limits)
    }


def _block_hashes(seq: Seq, first: int, num_tokens: int, limits: Limits) -> list[bytes]:
    """Hashes of its full blocks from `first` on that hold any of its first `num_tokens` tokens, and of its part."""
    end = num_blocks_of(num_tokens, limits.block_size)
    part = [seq.part_hash] if seq.part_hash and end > seq.part_index(limits.block_size) else []
    return seq.hashes[first:end] + part


def _ordered(seqs: list[Seq], key: Key | None) -> list[Seq]:
    return seqs if key is None else sorted(seqs, key=key)


def _share_tokens(running: Sequence[Seq], limits: Limits, room: int) -> dict[int, int]:
    """Tokens a running sequence may compute: one for each decode, the rest to prefills in order, `room` at most."""
    share: dict[int, int] = {}
    prefills: list[Seq] = []
    for seq in running:
        if seq.num_pending > 1:
            prefills.append(seq)
        elif not seq.is_ending:
            share[seq.id] = 1
    budget = min(limits.max_tokens - len(share), limits.prefill_tokens, room)
    for seq in prefills:
        stop = seq.marks[0].position if seq.marks else 0
        share[seq.id] = seq.reach(seq.next_start, min(seq.num_pending, budget), stop)
        budget -= share[seq.id]
    return share


def _plan_running(running: list[Seq], share: Mapping[int, int], pool: BlockPool, limits: Limits) -> _Running:
    """A step for each running sequence in order, as long as blocks can be had by preempting from the end.

    `share`: tokens that each may compute, by id; a missing one computes nothing.
    """
    steps: list[SeqStep] = []
    preempted: list[Seq] = []
    free = free_of(pool)
    end = len(running)  # running[end:] are preempted
    stop = 1 if limits.max_preempt is None else max(1, end - limits.max_preempt)  # running[:stop] are safe
    i = 0
    while i < end:
        seq = running[i]
        count, start = share.get(seq.id, 0), seq.next_start
        need = num_blocks_of(start + count, limits.block_size) - len(seq.block_table)
        while count and need > free.least and end > stop:
            end -= 1
            preempted.append(running[end])
            free.add_held(running[end], pool)
            if end == i:
                break
        if i < end and count and need <= free.least:
            steps.append(SeqStep(seq, start, count, need))
            if need:
                free.take(Need(need, need))
        i += 1
    return _Running(running, steps, preempted, free)


def _budget(running: _Running, num_loading: int, pool: BlockPool, limits: Limits) -> _Budget:
    """What is left for waiting sequences after the running sequences' steps and the transfers under way."""
    prefills = [step for step in running.steps if step.seq.num_pending > 1]
    num_seqs = min(
        limits.max_batch - len(running.seqs) - num_loading,
        limits.prefill_slots - len(prefills),
    )
    room = step_tokens(pool, len(running.seqs), limits.block_size)
    num_tokens = min(
        limits.max_tokens - sum(step.num_tokens for step in running.steps),
        min(limits.prefill_tokens, room) - sum(step.num_tokens for step in prefills),
    )
    spare = free_of(pool)
    spare.take(owed(running.seqs, [_num_promised(seq, pool, limits) for seq in running.seqs], pool))
    return _Budget(num_seqs, max(0, num_tokens), running.free, spare, bool(running.steps))


def _plan_waiting(
    waiting: Iterable[Seq], budget: _Budget, pool: BlockPool, limits: Limits, coming: _Coming
) -> tuple[list[SeqStep], list[LoadStep]]:
    """Admit waiting sequences in order while `budget`, which shrinks, has room for all their known and promised tokens.

    What they load and compute is added to `coming`. Returns the steps of the admitted sequences, and the loads of those
    that ask the tier first.
    """
    steps: list[SeqStep] = []
    loads: list[LoadStep] = []
    block_size = limits.block_size
    for seq in waiting:
        if len(steps) + len(loads) >= budget.num_seqs or budget.num_tokens == 0:
            break
        length = len(seq.token_ids)
        found = find_prefix(seq, pool, block_size)
        if coming.computed and found.awaited in coming.computed:
            continue
        if not _fits(seq, found, budget, pool, limits):
            found = find_prefix(seq, pool, block_size, may_copy=False)
        if not _fits(seq, found, budget, pool, limits):
            break
        hits, start, begun = found.hits, found.start, taken(found, pool)
        promised = _promised(seq, found, pool, limits)
        if coming.loaded is not None and found.asked and not seq.is_asked:
            if found.asked[0] not in coming.loaded:
                what = tuple(found.known), found.lacked, found.asked, found.least, found.snapshot
                loads.append(load := LoadStep(seq, *what, asked_windows(seq, pool)))
                coming.loaded.update(found.asked)
                more = Need(len(found.known) - len(hits) + len(found.lacked), load.num_windows)
                budget.free.take(begun.plus(more))
                budget.spare.take(promised)
            continue
        most = min(length - start, budget.num_tokens, room_for(found, budget.free, pool, block_size))
        count = seq.reach(start, most, found.marks[0][0] if found.marks else 0)
        if seq.is_whole and count < length - start:
            if steps or budget.is_shared:
                break
            count = length - start  # longer than any step: gets one of its own
        steps.append(step := _admission(seq, found, count, block_size))
        if coming.computed is not None:
            coming.computed.update([mark.key for mark in step.marks])
            coming.computed.update(_block_hashes(seq, len(hits), start + count, limits))
        budget.num_tokens = max(0, budget.num_tokens - count)
        budget.free.take(first_step_needs(found, start + count, pool, block_size))
        budget.spare.take(promised)
    return steps, loads


def _fits(seq: Seq, found: Prefix, budget: _Budget, pool: BlockPool, limits: Limits) -> bool:
    """Whether there is room for all that the sequence knows and is promised, if it begins so."""
    known = needed(found, num_blocks_of(len(seq.token_ids), limits.block_size), pool)
    return budget.free.has(taken(found, pool).plus(known)) and budget.spare.has(_promised(seq, found, pool, limits))


def _promised(seq: Seq, found: Prefix, pool: BlockPool, limits: Limits) -> Need:
    return taken(found, pool).plus(needed(found, _num_promised(seq, pool, limits), pool))


def _admission(seq: Seq, found: Prefix, count: int, block_size: int) -> SeqStep:
    """The first step of a sequence, of `count` tokens."""
    need = num_blocks_of(found.start + count, block_size) - len(found.hits)
    marks = tuple(mark_of(seq, *mark, block_size) for mark in found.marks)
    return SeqStep(
        seq,
        found.start,
        count,
        need,
        tuple(found.hits),
        part=found.part,
        snapshot=found.snapshot,
        marks=marks,
        num_passed=found.num_passed,
        num_unusable=found.num_unusable,
        windows=found.windows,
        num_dropped=found.num_dropped,
        part_window=found.part_window,
    )


def _with_drafts(steps: Sequence[SeqStep], free: Free, num_drafting: int, limits: Limits) -> list[SeqStep]:
    """The steps with drafts added to decoding sequences, at most `num_drafting`, as far as the budget and `free` blocks
    allow.
    """
    num_guessing = sum(bool(step.seq.draft) and _may_guess(step) for step in steps)
    if not num_guessing:
        return list(steps)
    budget = limits.max_tokens - sum(step.num_tokens for step in steps)
    result = []
    for step in steps:
        if _may_guess(step) and num_drafting > 0:
            num_drafting -= 1
            num_blocks = len(step.seq.block_table) + step.num_new_blocks
            room = (num_blocks + free.least) * limits.block_size - step.start - step.num_tokens
            draft = step.seq.draft[: min(limits.max_draft_tokens // num_guessing, budget, room)]
            extra = num_blocks_of(step.start + step.num_tokens + len(draft), limits.block_size) - num_blocks
            step = replace(
                step,
                num_tokens=step.num_tokens + len(draft),
                num_new_blocks=step.num_new_blocks + extra,
                draft=tuple(draft),
            )
            budget -= len(draft)
            free.take(Need(extra, extra))
        result.append(step)
    return result


def _may_guess(step: SeqStep) -> bool:
    """Whether drafts may follow: the step decodes. During a prefill the last token is not known yet."""
    seq = step.seq
    return bool(seq.draft) and seq.status is Status.RUNNING and seq.num_pending == step.num_tokens == 1


def _num_promised(seq: Seq, pool: BlockPool, limits: Limits) -> int:
    """Blocks reserved for a sequence at admission: all it can ever need where preemption is off."""
    reach = max(seq.max_len, len(seq.token_ids)) if limits.max_preempt == 0 else 0
    promised = max(num_blocks_of(reach, limits.block_size), min(limits.prealloc_blocks, pool.num_blocks))
    return max(promised, len(seq.block_table))
