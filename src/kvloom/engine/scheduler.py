"""What the next step computes: plan_step decides (pure), apply_step and commit_step carry it out on the bookkeeping.

A step is {sequence: number of tokens}. Prefill chunks, prefix-cache hits, decodes and resumed sequences are all the
same thing: a sequence with tokens whose keys and values are not computed yet.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from kvloom.engine.batch import Work
from kvloom.engine.blocks import BlockPool, extend_chain
from kvloom.engine.config import Limits
from kvloom.engine.swap import SwapCosts, is_swap_cheaper


class Status(Enum):
    WAITING = "waiting"  # holds no block
    LOADING = "loading"  # holds no block; a transfer fills some for it from the outer KV tier, then it waits again
    RUNNING = "running"  # holds the blocks of its computed tokens
    FINISHED = "finished"  # holds no block, will never run again


@dataclass(slots=True, eq=False)
class Seq:
    """One sequence. The engine thread owns it; plan_step only reads it."""

    id: int
    token_ids: list[int]  # prompt, then answer
    num_prompt: int
    salt: str = ""
    may_reuse: bool = True  # False: every prompt token must be computed (their log-probabilities are wanted)
    status: Status = Status.WAITING
    num_computed: int = 0  # tokens whose keys and values are in block_table
    block_table: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)  # of the full blocks of token_ids
    num_published: int = 0  # blocks of block_table that the pool knows by hash
    num_cached: int = 0  # prompt tokens found in the cache at first admission
    num_preemptions: int = 0
    host_blocks: list[int] = field(default_factory=list)  # copies of its blocks, while it waits swapped out
    num_swapped: int = 0  # tokens whose keys and values are in host_blocks
    priority: int = 0  # of the request
    max_len: int = 0  # tokens it can reach, answer included; what admission reserves when preemption is off
    is_asked: bool = False  # the outer tier was asked for its blocks since it last waited
    loading: tuple[bytes, ...] = ()  # hashes of the blocks on their way from there
    draft: list[int] = field(default_factory=list)  # tokens guessed to follow token_ids
    turn: float = 0.0  # virtual time of its turn (priority, deadline, fairness); see policies.Turns

    @property
    def num_pending(self) -> int:
        """Tokens known but not computed; 1 while decoding."""
        return len(self.token_ids) - self.num_computed


@dataclass(frozen=True, slots=True)
class SeqStep:
    """`num_tokens` more tokens of `seq`, from position `start`, needing `num_new_blocks` more blocks.

    `hits` are cached blocks that a newly admitted sequence starts with; the blocks from there to `start` are copied
    back from the host. The last len(draft) tokens are guesses.
    """

    seq: Seq
    start: int
    num_tokens: int
    num_new_blocks: int
    hits: tuple[int, ...] = ()
    draft: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadStep:
    """Ask the outer tier for the blocks `keys` of a waiting `seq`; they follow its cached blocks `hits`."""

    seq: Seq
    hits: tuple[int, ...]
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    steps: tuple[SeqStep, ...] = ()
    preempted: tuple[Seq, ...] = ()
    swapped: tuple[Seq, ...] = ()  # those of the preempted whose blocks are copied to the host
    loads: tuple[LoadStep, ...] = ()


Key = Callable[[Seq], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Policy:
    """Who comes first: keys to sort waiting and running sequences by. None = order of arrival."""

    waiting: Key | None = None
    running: Key | None = None


FCFS = Policy()
COPIES = SwapCosts()  # nothing measured


def plan_step(
    seqs: Sequence[Seq],
    pool: BlockPool,
    limits: Limits,
    policy: Policy = FCFS,
    oldest_wait_s: float = float("inf"),
    costs: SwapCosts = COPIES,
    asks_tier: bool = False,
) -> Plan:
    """What the next model step computes. Reads `seqs` (arrival order) and `pool`, changes nothing.

    Running sequences first, in the policy's order (of arrival by default), then waiting ones while blocks last, none
    overtaking another. Decodes get their token before prefills share what is left of the budget. A running one that
    finds no block preempts the last; the first never is, so some sequence always advances. A preempted one is swapped
    out where `costs` say that it is cheaper than computing again, and the host has room. Guesses get what budget and
    blocks are left over.

    With `asks_tier` a waiting sequence whose next block is not cached first asks the outer tier, once, for all that it
    lacks; others go on meanwhile, but for those that would ask for the same block.
    """
    running = _ordered([seq for seq in seqs if seq.status is Status.RUNNING], policy.running)
    share = _share_tokens(running, limits)
    steps, preempted, free = _plan_running(running, share, pool, limits)
    loads: list[LoadStep] = []
    if not preempted:
        waiting = _ordered([seq for seq in seqs if seq.status is Status.WAITING], policy.waiting)
        if may_admit(len(waiting), running, limits, oldest_wait_s):
            loading = [seq for seq in seqs if seq.status is Status.LOADING]
            admitted, loads, free = _plan_waiting(waiting, running, loading, steps, free, pool, limits, asks_tier)
            steps += admitted
        steps = _with_drafts(steps, free, limits)
    return Plan(tuple(steps), tuple(preempted), tuple(_choose_swapped(preempted, pool, costs)), tuple(loads))


def _choose_swapped(preempted: Iterable[Seq], pool: BlockPool, costs: SwapCosts) -> list[Seq]:
    chosen, free = [], pool.host.num_free
    for seq in preempted:
        count = len(seq.block_table)
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
    if num_waiting < limits.prefill_places and oldest_wait_s < limits.max_queue_delay_s:
        return False
    if not limits.is_selecting:
        return True
    return num_waiting * limits.prefill_ms_per_seq >= len(running) * limits.decode_ms_per_seq


def _ordered(seqs: list[Seq], key: Key | None) -> list[Seq]:
    return seqs if key is None else sorted(seqs, key=key)


def _share_tokens(running: Sequence[Seq], limits: Limits) -> dict[int, int]:
    """Tokens a running sequence may compute: one for each decode, the rest to prefills in their order."""
    budget = limits.max_tokens
    share = {seq.id: 1 for seq in running if seq.num_pending == 1}
    budget -= len(share)
    budget = min(budget, limits.prefill_tokens)
    for seq in running:
        if seq.num_pending > 1:
            share[seq.id] = min(seq.num_pending, budget)
            budget -= share[seq.id]
    return share


def _plan_running(
    running: Sequence[Seq], share: dict[int, int], pool: BlockPool, limits: Limits
) -> tuple[list[SeqStep], list[Seq], int]:
    """Steps of the running sequences, the preempted ones (last first), and the blocks left free."""
    steps: list[SeqStep] = []
    preempted: list[Seq] = []
    free = pool.num_free
    end = len(running)  # running[end:] are preempted
    stop = 1 if limits.max_preempt is None else max(1, end - limits.max_preempt)  # running[:stop] are safe
    i = 0
    while i < end:
        seq, count = running[i], share[running[i].id]
        need = _num_blocks(seq.num_computed + count, limits.block_size) - len(seq.block_table)
        while count and need > free and end > stop:
            end -= 1
            preempted.append(running[end])
            free += pool.num_exclusive(running[end].block_table)
            if end == i:
                break
        if i < end and count and need <= free:
            steps.append(SeqStep(seq, seq.num_computed, count, need))
            free -= need
        i += 1
    return steps, preempted, free


def _plan_waiting(
    waiting: Iterable[Seq],
    running: Sequence[Seq],
    loading: Sequence[Seq],
    running_steps: Sequence[SeqStep],
    free: int,
    pool: BlockPool,
    limits: Limits,
    asks_tier: bool,
) -> tuple[list[SeqStep], list[LoadStep], int]:
    """Admit waiting sequences in order while there is a place, budget, and room for all known and promised tokens.

    Returns their steps, the loads of those that ask the outer tier first, and the blocks left free.
    """
    steps: list[SeqStep] = []
    loads: list[LoadStep] = []
    on_the_way = {key for seq in loading for key in seq.loading}
    prefills = [step for step in running_steps if step.seq.num_pending > 1]
    places = limits.max_batch - len(running) - len(loading)
    places = min(places, limits.prefill_places - len(prefills))
    budget = limits.max_tokens - sum(step.num_tokens for step in running_steps)
    budget = min(budget, limits.prefill_tokens - sum(step.num_tokens for step in prefills))
    block_size = limits.block_size
    spare = pool.num_free - sum(_num_promised(seq, pool, limits) - len(seq.block_table) for seq in running)
    for seq in waiting:
        if len(steps) + len(loads) >= places or budget == 0:
            break
        length = len(seq.token_ids)
        reusable = seq.hashes[: (length - 1) // block_size] if seq.may_reuse else []
        hits = pool.match(reusable)
        taken = sum(pool.is_idle(block) for block in hits)  # free blocks that become used
        if taken + _num_blocks(length, block_size) - len(hits) > free:
            break
        promised = taken + max(0, _num_promised(seq, pool, limits) - len(hits))
        if promised > spare:
            break
        missing = reusable[len(hits) :] if asks_tier and not (seq.is_asked or seq.host_blocks) else []
        if missing:
            if missing[0] not in on_the_way:
                loads.append(LoadStep(seq, tuple(hits), tuple(missing)))
                on_the_way.update(missing)
                free -= taken + len(missing)
                spare -= promised
            continue
        start = max(len(hits) * block_size, seq.num_swapped)
        count = min(length - start, budget)
        need = _num_blocks(start + count, block_size) - len(hits)
        steps.append(SeqStep(seq, start, count, need, tuple(hits)))
        budget -= count
        free -= taken + need
        spare -= promised
    return steps, loads, free


def _with_drafts(steps: Sequence[SeqStep], free: int, limits: Limits) -> list[SeqStep]:
    """The steps, those of decoding sequences longer by as much of their drafts as budget and `free` blocks allow."""
    num_guessing = sum(_may_guess(step) for step in steps)
    budget = limits.max_tokens - sum(step.num_tokens for step in steps)
    result = []
    for step in steps:
        if _may_guess(step):
            num_blocks = len(step.seq.block_table) + step.num_new_blocks
            room = (num_blocks + free) * limits.block_size - step.start - step.num_tokens
            draft = step.seq.draft[: min(limits.max_draft_tokens // num_guessing, budget, room)]
            extra = _num_blocks(step.start + step.num_tokens + len(draft), limits.block_size) - num_blocks
            step = replace(
                step,
                num_tokens=step.num_tokens + len(draft),
                num_new_blocks=step.num_new_blocks + extra,
                draft=tuple(draft),
            )
            budget -= len(draft)
            free -= extra
        result.append(step)
    return result


def _may_guess(step: SeqStep) -> bool:
    """A decode with guesses for what follows; a prefill has none of its last token yet."""
    seq = step.seq
    return bool(seq.draft) and seq.status is Status.RUNNING and seq.num_pending == step.num_tokens == 1


def _num_promised(seq: Seq, pool: BlockPool, limits: Limits) -> int:
    """Blocks kept for a sequence from its admission on; all it can ever need when nobody may be preempted."""
    reach = max(seq.max_len, len(seq.token_ids)) if limits.max_preempt == 0 else 0
    promised = max(_num_blocks(reach, limits.block_size), min(limits.prealloc_blocks, pool.num_blocks))
    return max(promised, len(seq.block_table))


def swap_out(plan: Plan, pool: BlockPool) -> list[tuple[int, int]]:
    """Host blocks for the swapped sequences: (block, host block) to copy before the step. Before apply_step."""
    copies: list[tuple[int, int]] = []
    for seq in plan.swapped:
        blocks = pool.host.allocate(len(seq.block_table))
        assert blocks is not None, "the plan promised host blocks that are not free"
        seq.host_blocks, seq.num_swapped = blocks, seq.num_computed
        copies += zip(seq.block_table, blocks, strict=True)
    return copies


def apply_step(plan: Plan, pool: BlockPool) -> list[Work]:
    """Take and give blocks as planned; returns the rank's work. Sequences' counts change in commit_step."""
    for seq in plan.preempted:
        release_seq(seq, pool, Status.WAITING)
        seq.num_preemptions += 1
        seq.is_asked = False
    for hits in (step.hits for steps in (plan.steps, plan.loads) for step in steps):
        pool.retain(hits)  # all of them before any allocation, which could evict one
    return [_admit(step, pool) for step in plan.steps]


def _admit(step: SeqStep, pool: BlockPool) -> Work:
    seq = step.seq
    new = pool.allocate(step.num_new_blocks)
    assert new is not None, "the plan promised blocks that are not free"
    first, loads = 0, []
    if seq.status is Status.WAITING:
        seq.status = Status.RUNNING
        seq.num_computed, seq.block_table = step.start, list(step.hits)
        seq.num_published = len(step.hits)
        if seq.num_preemptions == 0:
            seq.num_cached = step.start
        loads = list(zip(seq.host_blocks[len(step.hits) :], new, strict=False))  # the hits are there already
        forget_swapped(seq, pool)
    else:
        first = len(seq.block_table)
    seq.block_table += new
    return Work(seq.id, step.start, step.num_tokens, first, seq.block_table[first:], list(step.draft), loads)


def forget_swapped(seq: Seq, pool: BlockPool) -> None:
    """Give up the host's copies of `seq`: it has its blocks back, or needs none any more."""
    pool.host.release(seq.host_blocks)
    seq.host_blocks, seq.num_swapped = [], 0


def commit_step(plan: Plan, sampled: Mapping[int, Sequence[int]], pool: BlockPool, block_size: int) -> list[list[int]]:
    """After the rank has run: advance the sequences, append sampled tokens (id -> tokens), publish full blocks.

    All sampled tokens but the last were guessed; blocks of guesses that were wrong are given back. A sequence that
    finished while the step ran (abort, stop string) stays as it is: its blocks are already gone. Returns the blocks
    that the pool now knows and did not know before, in chain order, a list a sequence.
    """
    fresh = []
    for step in plan.steps:
        seq = step.seq
        if seq.status is not Status.RUNNING:
            continue
        tokens = sampled.get(seq.id, ())
        seq.num_computed = step.start + step.num_tokens - len(step.draft) + max(0, len(tokens) - 1)
        seq.token_ids += tokens
        seq.draft = []
        num_used = _num_blocks(seq.num_computed, block_size)
        pool.release(seq.block_table[num_used:])
        del seq.block_table[num_used:]
        extend_chain(seq.hashes, seq.token_ids, block_size, seq.salt)
        full = range(seq.num_published, seq.num_computed // block_size)
        fresh.append([seq.block_table[i] for i in full if pool.publish(seq.block_table[i], seq.hashes[i])])
        seq.num_published = seq.num_computed // block_size
    return [blocks for blocks in fresh if blocks]


def release_seq(seq: Seq, pool: BlockPool, status: Status) -> None:
    """Give up all blocks of `seq`: finished, or waiting to be copied back or computed again."""
    if status is Status.FINISHED:
        forget_swapped(seq, pool)
    pool.release(seq.block_table)
    seq.block_table = []
    seq.num_computed = seq.num_published = 0
    seq.status, seq.loading = status, ()


def check(seqs: Sequence[Seq], pool: BlockPool, block_size: int, transferred: Sequence[int] = ()) -> None:
    """Assert what must hold between steps. `transferred`: blocks held for transfers, once a transfer."""
    pool.check()
    held = dict(Counter(transferred))
    for seq in seqs:
        assert (seq.status is Status.LOADING) == bool(seq.loading)
        assert (seq.status is Status.RUNNING) == bool(seq.block_table)
        assert len(seq.block_table) == _num_blocks(seq.num_computed, block_size)
        assert 0 <= seq.num_computed <= len(seq.token_ids)
        assert len(seq.host_blocks) == _num_blocks(seq.num_swapped, block_size)
        assert not (seq.host_blocks and seq.block_table), "swapped out and running"
        for block in seq.block_table:
            held[block] = held.get(block, 0) + 1
    pool.host.check([block for seq in seqs for block in seq.host_blocks])
    for block in range(pool.num_blocks):
        assert pool.num_holders(block) == held.get(block, 0), f"block {block}: holders and block tables differ"


def _num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
