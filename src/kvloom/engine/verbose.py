"""Log lines of logLevel Verbose: the contents of a step, prefix-cache hits, why a request still waits."""

import logging
from collections.abc import Mapping

from kvloom.contract.config import Limits
from kvloom.engine.live import Live
from kvloom.engine.schedule.blocks import BlockPool
from kvloom.engine.schedule.seq import Plan, Seq, Status

log = logging.getLogger(__name__)


def tell_plan(plan: Plan, lives: Mapping[int, Live], pool: BlockPool, limits: Limits) -> None:
    """Log the plan, before it is applied. Does nothing while the log level leaves the lines out."""
    if plan.steps and log.isEnabledFor(logging.DEBUG):
        for line in plan_lines(plan, lives, pool, limits):
            log.debug("%s", line)


def plan_lines(plan: Plan, lives: Mapping[int, Live], pool: BlockPool, limits: Limits) -> list[str]:
    """One line for the step, one for each request that begins, one for the first that waits."""
    num_decoding = sum(step.start >= step.seq.num_prompt for step in plan.steps)
    num_tokens = sum(step.num_tokens for step in plan.steps)
    lines = [
        f"step: {len(plan.steps)} requests, {num_decoding} decoding, {num_tokens} tokens; "
        f"preempted {len(plan.preempted)}, swapped out {len(plan.swapped)}, asked of the outer tier {len(plan.loads)}; "
        f"{pool.num_free} of {pool.num_blocks} blocks are free"
    ]
    for step in plan.steps:
        live = lives[step.seq.id]
        if not live.is_known:
            lines.append(
                f"{live.request.id} begins: {step.seq.num_prompt} prompt tokens, {step.start} of them cached, "
                f"{step.num_tokens} in this step"
            )
    taken = {step.seq.id for step in plan.steps}
    waiting = [live for live in lives.values() if live.seq.status is not Status.RUNNING and live.seq.id not in taken]
    if waiting:
        first = min(waiting, key=lambda live: (live.seq.turn, live.seq.id))
        lines.append(
            f"{first.request.id} waits, and {len(waiting) - 1} behind it: {_reason(first.seq, plan, pool, limits)}"
        )
    return lines


def _reason(seq: Seq, plan: Plan, pool: BlockPool, limits: Limits) -> str:
    """What the sequence lacks, in the order in which admission checks it."""
    num_needed = -(-len(seq.token_ids) // limits.block_size)
    num_prefills = sum(step.start < step.seq.num_prompt for step in plan.steps)
    if seq.status is Status.LOADING:
        return "its prefix comes from the outer tier"
    if len(plan.steps) >= limits.max_batch:
        return f"the batch of {limits.max_batch} is full"
    if not limits.is_continuous:
        return "the batch that runs must end first"
    if _is_next_computed(seq, plan, pool, limits.block_size):
        return "the next part of its prompt is computed for another request"
    if num_needed > pool.num_free:
        return f"it needs {num_needed} blocks and {pool.num_free} are free"
    if num_prefills >= limits.prefill_slots:
        return f"{num_prefills} prompts are in prefill, as many as maxPrefillBatchSize allows"
    if sum(step.num_tokens for step in plan.steps) >= min(limits.max_tokens, limits.prefill_tokens):
        return "the tokens of the step are used up"
    return "decoding goes first, or the batch is held back to fill"


def _is_next_computed(seq: Seq, plan: Plan, pool: BlockPool, block_size: int) -> bool:
    reusable = seq.reusable(block_size)
    lacked = reusable[len(pool.match(reusable)) :]
    return bool(lacked) and any(lacked[0] in step.seq.hashes for step in plan.steps)
