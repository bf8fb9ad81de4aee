"""What the scheduler works within: the budget of a step, and the pools, of the configuration and what a rank has."""

from dataclasses import replace

from kvloom.contract.config import EngineConfig, Limits
from kvloom.contract.messages import RankInfo
from kvloom.engine.schedule.blocks import BlockPool, WindowPool
from kvloom.engine.schedule.snapshots import Snapshots


def limits_of(config: EngineConfig, info: RankInfo) -> Limits:
    """The budget of a step. Where layers keep a state, no more sequences run than there are states."""
    limits = config.limits(info.block_size)
    most = min(limits.max_batch, info.num_states or limits.max_batch)
    preempt = None if limits.max_preempt is None else min(limits.max_preempt, most)
    return replace(limits, max_batch=most, max_prefill_batch=min(limits.max_prefill_batch, most), max_preempt=preempt)


def pool_of(config: EngineConfig, info: RankInfo) -> BlockPool:
    """The pools, without a prefix cache where layers keep a state and there is no room for snapshots: of a prefix only
    the blocks would be kept.
    """
    is_caching = config.enable_prefix_cache and bool(info.num_snapshots or not info.num_states)
    most = info.num_snapshots if is_caching else 0
    snapshots = Snapshots(info.num_states, most, info.block_size, info.state_host_blocks)
    windows = None
    if info.num_window_blocks:
        windows = WindowPool(info.num_window_blocks, info.reach, info.block_size, is_caching)
    return BlockPool(info.num_blocks, is_caching, info.num_host_blocks, snapshots, windows)
