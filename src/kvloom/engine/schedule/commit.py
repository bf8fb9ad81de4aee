"""Carrying a plan out on sequences and blocks: apply_step before the model computes it, commit_step after that."""

from collections import Counter
from collections.abc import Mapping, Sequence

from kvloom.contract.messages import Work
from kvloom.engine.schedule.blocks import BlockPool, WindowPool
from kvloom.engine.schedule.keeping import (
    begin_keep,
    give_up_kept,
    leave_part,
    leave_state,
    publish_block,
    publish_kept,
)
from kvloom.engine.schedule.seq import Plan, Seq, SeqStep, Status, num_blocks_of


def swap_out(plan: Plan, pool: BlockPool) -> list[tuple[int, int]]:
    """Give host blocks to the sequences that are swapped out. Returns (block, host block) pairs to copy before the
    step.

    Call it before apply_step.
    """
    copies: list[tuple[int, int]] = []
    for seq in plan.swapped:
        blocks = pool.host.allocate(len(seq.block_table))
        assert blocks is not None, "the plan promised host blocks that are not free"
        seq.host_blocks, seq.num_swapped = blocks, seq.num_computed
        copies += zip(seq.block_table, blocks, strict=True)
    return copies


def swap_out_states(plan: Plan, pool: BlockPool) -> list[tuple[int, list[int]]]:
    """The same of states: (place, the host blocks that it gets). Call it between swap_out and apply_step."""
    for seq in plan.swapped:
        found = pool.host.allocate(pool.snapshots.state_host_blocks)
        assert found is not None, "the plan promised host blocks that are not free"
        seq.host_state = found
    return [(seq.states[0], seq.host_state) for seq in plan.swapped if seq.host_state]


def swap_out_windows(plan: Plan) -> list[tuple[int, int]]:
    """The same of a window's blocks, which go to the same host blocks. Call it between swap_out and apply_step."""
    return [
        pair
        for seq in plan.swapped
        for pair in zip(seq.held_windows, seq.host_blocks[seq.num_dropped :], strict=bool(seq.window_table))
    ]


def apply_step(plan: Plan, pool: BlockPool) -> list[Work]:
    """Take and give blocks as planned. Returns the rank's work. Counts of the sequences change only in commit_step."""
    for seq in plan.preempted:
        release_seq(seq, pool, Status.WAITING)
        seq.num_preemptions += 1
        seq.is_asked = False
    for hits in (step.hits for steps in (plan.steps, plan.loads) for step in steps):
        pool.retain(hits)  # all of them before any allocation, which could evict one
    copied = [step.part for step in plan.steps if step.part >= 0]
    pool.retain(copied)  # until nothing is allocated: the rank copies them before it computes
    copied_windows = _retain_windows(plan, pool.windows)
    works = [_admit(step, pool) for step in plan.steps]
    pool.release(copied)
    if pool.windows is not None:
        pool.windows.release(copied_windows)
    for step, work in zip(plan.steps, works, strict=True):  # behind admissions: a place is read before it is written
        begin_keep(step, work, pool)
    return works


def _retain_windows(plan: Plan, windows: WindowPool | None) -> list[int]:
    """The same of a window's blocks. Returns those that are copied."""
    copied = [step.part_window for step in plan.steps if step.part_window >= 0]
    if windows is not None:
        windows.retain(copied)
        for step in plan.steps:
            windows.retain(step.windows)
    return copied


def _admit(step: SeqStep, pool: BlockPool) -> Work:
    seq = step.seq
    new = pool.allocate(step.num_new_blocks)
    assert new is not None, "the plan promised blocks that are not free"
    first, loads, state, begun = 0, [], -1, -1
    host_blocks: list[int] = []
    state_loads: list[int] = []
    if seq.status is Status.WAITING:
        seq.status = Status.RUNNING
        seq.num_computed, seq.block_table = step.start, list(step.hits)
        seq.window_table, seq.num_dropped = [-1] * step.num_dropped + list(step.windows), step.num_dropped
        seq.num_published = len(step.hits)
        if seq.num_preemptions == 0:
            seq.num_cached = min(step.start, seq.num_prompt)
        if step.snapshot is None:  # the cached blocks are not copied back
            loads, state_loads = list(zip(seq.host_blocks[len(step.hits) :], new, strict=False)), seq.host_state
        host_blocks = seq.host_blocks
        forget_swapped(seq, pool)
        state = _take_state(seq, pool)
        seq.base, seq.marks = seq.base if state_loads else step.snapshot, list(step.marks)
        pool.snapshots.back = max(pool.snapshots.back, step.num_passed)
        if step.snapshot is not None:
            pool.snapshots.touch(step.snapshot)
            begun = step.snapshot.place
    else:
        first = len(seq.block_table)
        if seq.states and step.draft:
            begun = seq.states[0]
            seq.states = [_take_place(pool), begun]
        if seq.has_gone_back or begun >= 0:
            state, seq.has_gone_back = seq.states[0], False
    seq.block_table += new
    seq.num_computing += step.num_tokens
    blocks, draft = seq.block_table[first:], list(step.draft)
    work = Work(seq.id, step.start, step.num_tokens, first, blocks, draft, loads, state, step.part, begun)
    work.state_loads = state_loads
    if pool.windows is not None and len(seq.window_table) < len(seq.block_table):
        _add_windows(work, step, host_blocks, pool.windows)
    return work


def _add_windows(work: Work, step: SeqStep, host_blocks: list[int], windows: WindowPool) -> None:
    """Give the sequence as many of a window's blocks. `host_blocks`: those that it comes back from."""
    seq, known = step.seq, len(step.seq.window_table)
    new = windows.allocate(len(seq.block_table) - known)
    assert new is not None, "the plan promised a window's blocks that are not free"
    seq.window_table += new
    work.windows, work.copied_window = seq.window_table[work.first_block :], step.part_window
    work.window_loads = list(zip(host_blocks[known:], new, strict=False))


def _take_state(seq: Seq, pool: BlockPool) -> int:
    """Give a state to a sequence that is admitted: its first step begins at position 0 and reads no old contents, or
    with a copy of a snapshot.
    """
    if pool.states.count == 0:
        return -1
    seq.states = [_take_place(pool)]
    return seq.states[0]


def _take_place(pool: BlockPool) -> int:
    found = pool.states.allocate(1)
    assert found is not None, "more sequences were admitted, or draft, than states are there"
    return found[0]


def forget_swapped(seq: Seq, pool: BlockPool) -> None:
    """Release the host copies of `seq`, because it has its blocks back or has ended."""
    pool.host.release([*seq.host_blocks, *seq.host_state])
    seq.host_blocks, seq.host_state, seq.num_swapped = [], [], 0


def commit_step(plan: Plan, sampled: Mapping[int, Sequence[int]], pool: BlockPool, block_size: int) -> list[list[int]]:
    """After the rank has run the step: advance sequences, append sampled tokens (id -> tokens), publish full blocks.

    All sampled tokens but the last were drafts; blocks of rejected drafts are given back. A sequence that ended while
    the step ran (abort, stop string) is left alone: its blocks are already free. A sequence that got no token computes
    its last token again, and what was planned behind it is void. Blocks of sequences that are computed whole are not
    published.

    A window's blocks that no later step reads are given back; they stay cached.

    Returns the blocks that are newly published, a list a sequence in chain order, except those of prompts that are
    given away.
    """
    fresh = []
    for step in plan.steps:
        seq = step.seq
        if is_stale(step):
            continue
        tokens, seq.draft = sampled.get(seq.id), []
        is_void = tokens is None and step.start + step.num_tokens >= len(seq.token_ids)
        assert not (seq.states and is_void), "a state does not go back to compute a token again"
        seq.num_computing = 0 if is_void else seq.num_computing - step.num_tokens
        known = len(seq.token_ids) - (tokens is None)  # without a sampled token the last known one is computed again
        seq.num_computed = min(known, step.start + step.num_tokens - len(step.draft)) + max(0, len(tokens or ()) - 1)
        if seq.states and step.draft:
            _settle_state(seq, step, len(tokens or ()) > len(step.draft), pool)
        seq.token_ids += tokens or ()
        num_used = num_blocks_of(seq.next_start, block_size)
        if num_used < len(seq.block_table):
            pool.release(seq.block_table[num_used:])
            del seq.block_table[num_used:]
            if pool.windows is not None:
                pool.windows.release(seq.window_table[num_used:])
                del seq.window_table[num_used:]
        if seq.is_whole:
            continue
        if len(seq.hashes) < len(seq.token_ids) // block_size:
            seq.extend_hashes(block_size)
        num_full = seq.num_computed // block_size
        if num_full > seq.num_published:
            full = range(seq.num_published, num_full)
            new = [i for i in full if publish_block(seq, i, pool, block_size)]
            num_given = seq.giving.num_blocks if seq.giving else 0
            fresh.append([seq.block_table[i] for i in new if i >= num_given])
        seq.num_published = num_full
        if seq.states:
            publish_kept(seq, pool)
        elif seq.part_hash:
            _leave_part(seq, pool, block_size)
        if pool.windows is not None:
            _drop_passed(seq, pool.windows)
    return [blocks for blocks in fresh if blocks]


def _settle_state(seq: Seq, step: SeqStep, is_accepted: bool, pool: BlockPool) -> None:
    """After drafts: their state holds if all were right. Otherwise the sequence goes back to the state before the step,
    and computes the tokens that it accepted again with its next one.
    """
    after, before = seq.states
    pool.states.release([before if is_accepted else after])
    seq.states = [after if is_accepted else before]
    if not is_accepted:
        seq.num_computed, seq.has_gone_back = step.start, True


def _leave_part(seq: Seq, pool: BlockPool, block_size: int) -> None:
    """Let those who wait for it begin with a copy of the block that holds the tokens of its part_hash, once these are
    computed.
    """
    index = seq.part_index(block_size)
    end = index * block_size + seq.num_in_part(block_size)
    if end <= seq.num_computed < (index + 1) * block_size and seq.block_table[index] not in pool.known:
        leave_part(seq, pool, block_size, end)


def _drop_passed(seq: Seq, windows: WindowPool) -> None:
    """Give back blocks behind the window. Steps under way begin at num_computed or later, and read no further back."""
    num_passed = windows.first_of(seq.num_computed)
    if num_passed > seq.num_dropped:
        windows.release(seq.window_table[seq.num_dropped : num_passed])
        seq.num_dropped = num_passed


def is_stale(step: SeqStep) -> bool:
    """Whether the result of this step must be ignored: its sequence has ended, or got no token in the step before."""
    return step.seq.status is not Status.RUNNING or step.start != step.seq.num_computed


def is_void(step: SeqStep) -> bool:
    """Whether the rank has skipped this step, because its sequence got no token in the step before."""
    return step.seq.status is Status.RUNNING and is_stale(step)


def release_seq(seq: Seq, pool: BlockPool, status: Status) -> None:
    """Release all blocks of `seq`, which has ended or waits to be copied back or computed again."""
    if status is Status.FINISHED:
        forget_swapped(seq, pool)
    else:
        leave_state(seq, pool)
    if not pool.states.count and pool.snapshots.block_size:
        leave_part(seq, pool, pool.snapshots.block_size, seq.num_computed)
    give_up_kept(seq, pool)
    pool.release(seq.block_table)
    if pool.windows is not None:
        pool.windows.release(seq.held_windows)
    pool.states.release(seq.states)
    seq.block_table, seq.window_table, seq.states = [], [], []
    seq.has_gone_back = False
    seq.num_computed = seq.num_computing = seq.num_published = seq.num_dropped = 0
    seq.status, seq.loading = status, ()


def end_seq(seq: Seq, pool: BlockPool) -> None:
    """`seq` has its whole answer: release all it has, but for what others may begin with."""
    leave_state(seq, pool, is_lasting=True)
    release_seq(seq, pool, Status.FINISHED)


def forget_rank(seq: Seq) -> None:
    """The rank is gone, and with it all blocks on device and host: `seq` waits to be computed again."""
    if seq.giving is not None:
        seq.giving.lose(is_computed=False)
    seq.num_preemptions += seq.status is Status.RUNNING
    seq.status, seq.loading, seq.is_asked = Status.WAITING, (), False
    seq.block_table, seq.window_table, seq.states = [], [], []
    seq.host_blocks, seq.host_state = [], []
    seq.has_gone_back = False
    seq.marks, seq.keeping, seq.base = [], [], None
    seq.num_computed = seq.num_computing = seq.num_published = seq.num_dropped = seq.num_swapped = 0


def check(
    seqs: Sequence[Seq],
    pool: BlockPool,
    block_size: int,
    transferred: Sequence[int] = (),
    transferred_windows: Sequence[int] = (),
) -> None:
    """Assert the invariants between steps. `transferred`: blocks that transfers hold, listed once a transfer;
    `transferred_windows` the same of a window's.
    """
    pool.check()
    held = dict(Counter(transferred))
    for seq in seqs:
        assert (seq.status is Status.LOADING) == bool(seq.loading)
        assert seq.status is Status.RUNNING or not seq.block_table
        assert len(seq.block_table) == num_blocks_of(seq.next_start, block_size)
        assert 0 <= seq.num_computed <= len(seq.token_ids)
        assert len(seq.host_blocks) == num_blocks_of(seq.num_swapped, block_size)
        assert not (seq.host_blocks and seq.block_table), "swapped out and running"
        assert len(seq.host_state) == (pool.snapshots.state_host_blocks if seq.host_blocks else 0)
        assert 0 <= seq.num_dropped <= len(seq.window_table)
        assert len(seq.window_table) == (len(seq.block_table) if pool.windows is not None else 0)
        assert bool(seq.states) == (seq.status is Status.RUNNING and pool.states.count > 0)
        assert seq.status is Status.RUNNING or not (seq.marks or seq.keeping)
        for block in seq.block_table:
            held[block] = held.get(block, 0) + 1
    pool.host.check([block for seq in seqs for block in (*seq.host_blocks, *seq.host_state)])
    coming = [keep.place for seq in seqs for keep in seq.keeping]
    pool.snapshots.check(coming)
    kept = [snapshot.place for snapshot in pool.snapshots]
    pool.states.check([*(state for seq in seqs for state in seq.states), *kept, *coming])
    for block in range(pool.num_blocks):
        assert pool.num_holders(block) == held.get(block, 0), f"block {block}: holders and block tables differ"
    if pool.windows is not None:
        pool.windows.check()
        held = Counter([*transferred_windows, *(block for seq in seqs for block in seq.held_windows)])
        for block in range(pool.windows.num_blocks):
            assert pool.windows.num_holders(block) == held[block], f"window's block {block}: holders and tables differ"
