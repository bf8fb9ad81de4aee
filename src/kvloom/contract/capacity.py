"""How much memory the KV cache gets, how many blocks that is, how many sequences fit in the blocks. Pure arithmetic.

The formulas are those of the tuning guide (spec 2.3.2), in bytes instead of GB:

  cache bytes        (free - weights / ranks - working memory) * SHARE         cache_bytes
  Total Block Num    floor(cache bytes / bytes of a block)                     total_blocks
  Block Num          ceil(input / block size) + ceil(output / block size)      blocks_per_seq
  maxBatchSize       floor(Total Block Num / Block Num)                        max_batch

Where layers keep a state, each running sequence has one besides its blocks; STATE_SHARE says how both share the cache.
Snapshots of states have a share of their own. Where layers need the tokens of a window only, their blocks are a pool of
their own: see _split.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from kvloom.contract.errors import BadRequest, OutOfMemory


class Ahead(NamedTuple):
    """How far memory is provided beyond the KV blocks in use (rank/pages.py), in bytes."""

    least: int  # bounds while steps run; between them, as much as is in use
    most: int
    at_rest: int  # when no step has run for a while


GIB = 1 << 30
SHARE = 0.8  # of what the weights leave; the rest is a reserve for activations, sampling and other programs
WORKING_BYTES = 128 << 20  # of the server, which still starts, and of steps: where they share the cache's memory
STATE_SHARE = 0.5  # of the cache, for states at most, unless one alone takes more
MAX_SNAPSHOTS = 1024  # more would cost more to manage than they save
AUTO_MAX_CPU_BYTES = 2 * GIB  # default, where the cache shares its memory with the rest of the machine
_LEAST_STEP = 64  # tokens of a prompt for which a window's blocks are there in any case
AHEAD = Ahead(16 << 20, 256 << 20, 512 << 20)
MOST_EMPTY_BLOCKS = 1 << 18  # of a model without keys and values: they take no memory but that of their numbers
AUTO_MAX_HOST_BYTES = 5 * GIB  # default, of the host pool for swapped-out sequences


class Windows(NamedTuple):
    """Keys and values of layers that have blocks of their own, because no step reads more than `reach` tokens back."""

    token_bytes: int  # of one token in these layers of the whole model, which CacheShape.token_bytes counts too
    reach: int


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Keys and values of one model on one rank."""

    token_bytes: int  # of one token's keys and values in all layers of the whole model, scales included
    block_size: int  # tokens a block
    world_size: int = 1  # ranks, which share the heads of every layer evenly
    state_bytes: int = 0  # of one sequence on one rank, whatever its length
    windows: Windows | None = None
    draft_token_bytes: int = 0  # of one token's keys and values in a draft model, which lie beside the model's

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on one rank, of all layers; 0 = no layer has keys and values."""
        return self.host_block_bytes + self.block_size * self.draft_token_bytes

    @property
    def host_block_bytes(self) -> int:
        """Of these, the bytes that are copied to the host when the block is swapped out: the model's own."""
        return self.block_size * self.token_bytes // self.world_size

    @property
    def window_bytes(self) -> int:
        """Of these, the bytes of layers with a window."""
        return self.block_size * self.windows.token_bytes // self.world_size if self.windows else 0

    def num_of(self, num_tokens: int) -> int:
        """Blocks of so many tokens."""
        return -(-num_tokens // self.block_size)

    def pool_bytes(self, num_blocks: int, num_window_blocks: int) -> int:
        """Bytes of both pools on one rank."""
        return num_blocks * (self.block_bytes - self.window_bytes) + num_window_blocks * self.window_bytes

    def seq_bytes(self, num_tokens: int) -> int:
        """Bytes on one rank that a sequence of `num_tokens` tokens holds, between two of its steps."""
        held = min(num_tokens, self.windows.reach + self.block_size) if self.windows else 0
        return self.pool_bytes(self.num_of(num_tokens), self.num_of(held)) + self.state_bytes


def total_blocks(num_bytes: int, shape: CacheShape) -> int:
    """Blocks that `num_bytes` of one rank hold."""
    return num_bytes // shape.block_bytes if shape.block_bytes else MOST_EMPTY_BLOCKS


def blocks_per_seq(num_input: int, num_output: int, block_size: int) -> int:
    """Blocks of one sequence, its prompt and its longest answer rounded up separately."""
    return -(-num_input // block_size) - (-num_output // block_size)


def max_batch(num_blocks: int, num_per_seq: int) -> int:
    """Sequences that run at once without preemption."""
    return num_blocks // num_per_seq


def cache_bytes(free_bytes: int, weight_bytes: int, world_size: int = 1, working_bytes: int = 0) -> int:
    """What a rank may give its cache: SHARE of what weights and working memory leave. 0 when nothing is left."""
    return int(max(0, free_bytes - weight_bytes // world_size - working_bytes) * SHARE)


def bytes_of_gb(size_gb: float) -> int | None:
    """Bytes of a size as configurations give it; None (measured) for -1. Raises BadRequest."""
    if size_gb == -1:
        return None
    if not size_gb >= 0:
        raise BadRequest("memory size", f"must be -1 (automatic) or GB from 0 on, got {size_gb:g}")
    return int(size_gb * GIB)


@dataclass(frozen=True, slots=True)
class Pools:
    """Blocks of the device's pool, and of the host's pool for swapped-out sequences; states of running sequences, and
    those kept besides.
    """

    num_blocks: int
    num_host_blocks: int
    num_states: int = 0
    num_snapshots: int = 0
    num_window_blocks: int = 0  # of layers with a window, where these have their own

    @property
    def num_places(self) -> int:
        """States in memory."""
        return self.num_states + self.num_snapshots


@dataclass(frozen=True, slots=True)
class Machine:
    """Free memory before the weights are loaded, in bytes. is_shared: device and host memory are the same.
    num_sharing: see EngineConfig.
    """

    free_bytes: int
    free_host_bytes: int
    is_shared: bool
    num_sharing: int = 1

    @property
    def working_bytes(self) -> int:
        """Kept free beside weights and cache where sizes are automatic."""
        return WORKING_BYTES if self.is_shared else 0


@dataclass(frozen=True, slots=True)
class CapacityRequest:
    """What the configuration asks for; None = as much as makes sense."""

    num_blocks: int | None
    kv_cache_bytes: int | None
    num_host_blocks: int | None
    host_cache_bytes: int | None
    max_seq_len: int  # tokens; one such sequence must fit
    max_batch: int  # blocks beyond this many such sequences would be useless
    snapshot_share: float = 0.0  # of the cache

    @property
    def is_automatic(self) -> bool:
        """Whether the device's pool is measured."""
        return self.num_blocks is None and self.kv_cache_bytes is None


def plan_pools(wanted: CapacityRequest, shape: CacheShape, machine: Machine, weight_bytes: int) -> Pools:
    """Sizes of both pools. Raises OutOfMemory, one sentence that says which number to lower and to what."""
    left = machine.free_bytes - weight_bytes // shape.world_size
    working = machine.working_bytes if wanted.is_automatic else 0
    if left - working < shape.block_bytes + shape.state_bytes:
        more = f" and work {_gb(working)}" if working else ""
        raise OutOfMemory(
            f"out of memory: {_gb(machine.free_bytes)} are free, the weights take {_gb(weight_bytes)}{more}; "
            "take a smaller model or a smaller weight_format"
        )
    states = _num_states(wanted, shape, machine, weight_bytes)
    wanted = replace(wanted, max_batch=states[0] or wanted.max_batch)
    of_device = _device_windows if shape.windows else _device_blocks
    blocks = of_device(wanted, shape, machine, weight_bytes, sum(states) * shape.state_bytes)
    host_left = machine.free_host_bytes
    if machine.is_shared:
        taken = shape.pool_bytes(*blocks) + sum(states) * shape.state_bytes
        host_left = max(0, left - machine.num_sharing * taken)
    num_host_blocks = _host_blocks(wanted, shape.host_block_bytes, host_left, machine.num_sharing)
    return Pools(blocks[0], num_host_blocks, *states, blocks[1])


def _num_states(wanted: CapacityRequest, shape: CacheShape, machine: Machine, weight_bytes: int) -> tuple[int, int]:
    """States that sequences may have at once, at least one, and snapshots; both leave room for the longest sequence."""
    if not shape.state_bytes:
        return 0, 0
    if wanted.num_blocks is not None:
        budget = cache_bytes(machine.free_bytes, weight_bytes, shape.world_size)
        most = room = budget - wanted.num_blocks * shape.block_bytes
    else:
        budget = _automatic_bytes(shape, machine, weight_bytes)
        most = machine.free_bytes - weight_bytes // shape.world_size - machine.working_bytes
        if wanted.kv_cache_bytes is not None:
            budget = most = wanted.kv_cache_bytes
        longest = -(-wanted.max_seq_len // shape.block_size) * shape.block_bytes
        most -= longest
        room = min(int(budget * STATE_SHARE), most)
    num_states = max(1, min(wanted.max_batch, room // shape.state_bytes))
    room = min(int(budget * wanted.snapshot_share), most - num_states * shape.state_bytes)
    return num_states, max(0, min(MAX_SNAPSHOTS, room // shape.state_bytes))


def _automatic_bytes(shape: CacheShape, machine: Machine, weight_bytes: int) -> int:
    """Bytes of a cache whose size is measured."""
    budget = cache_bytes(machine.free_bytes, weight_bytes, shape.world_size, machine.working_bytes)
    return min(budget // machine.num_sharing, AUTO_MAX_CPU_BYTES) if machine.is_shared else budget


def _device_blocks(
    wanted: CapacityRequest, shape: CacheShape, machine: Machine, weight_bytes: int, states: int
) -> tuple[int, int]:
    """Blocks of all tokens, and 0. `wanted.max_batch`: sequences that run at once. `states`: bytes of all states."""
    block_bytes, per_seq = shape.block_bytes, -(-wanted.max_seq_len // shape.block_size)
    left = machine.free_bytes - weight_bytes // shape.world_size - states
    if wanted.num_blocks is not None:
        _refuse("num_blocks", wanted.num_blocks * block_bytes, left, str(total_blocks(left, shape)))
        return wanted.num_blocks, 0
    if wanted.kv_cache_bytes is not None:
        num_blocks, name = total_blocks(wanted.kv_cache_bytes - states, shape), "kv_cache_bytes (npuMemSize)"
        _refuse(name, wanted.kv_cache_bytes, left + states, _gb(int((left + states) * SHARE)))
        if num_blocks < per_seq:
            raise OutOfMemory(
                f"{name}: {wanted.kv_cache_bytes} bytes hold {max(0, num_blocks) * shape.block_size} tokens, fewer "
                f"than max_seq_len {wanted.max_seq_len}; lower max_seq_len or give at least "
                f"{per_seq * block_bytes + shape.state_bytes}"
            )
        return min(num_blocks, per_seq * wanted.max_batch), 0
    budget = _automatic_bytes(shape, machine, weight_bytes) - states
    left -= machine.working_bytes
    _refuse("max_seq_len", per_seq * block_bytes, left, f"{total_blocks(left, shape) * shape.block_size} tokens")
    return max(per_seq, min(total_blocks(budget, shape), per_seq * wanted.max_batch)), 0


def _device_windows(
    wanted: CapacityRequest, shape: CacheShape, machine: Machine, weight_bytes: int, states: int
) -> tuple[int, int]:
    """The same where layers with a window have their own blocks: blocks of all tokens, and of a window's."""
    least, most = _bounds(wanted, shape)
    left = machine.free_bytes - weight_bytes // shape.world_size - states
    if wanted.num_blocks is not None:
        has_window = shape.block_bytes == shape.window_bytes and wanted.num_blocks >= least[1]
        blocks = most[0] if has_window else wanted.num_blocks, min(wanted.num_blocks, most[1])
        _refuse("num_blocks", shape.pool_bytes(*blocks), left, str(total_blocks(left, shape)))
        return blocks
    if wanted.kv_cache_bytes is not None:
        name, budget = "kv_cache_bytes (npuMemSize)", wanted.kv_cache_bytes - states
        _refuse(name, wanted.kv_cache_bytes, left + states, _gb(int((left + states) * SHARE)))
        if shape.pool_bytes(*least) > budget:
            raise OutOfMemory(
                f"{name}: {wanted.kv_cache_bytes} bytes hold fewer tokens than max_seq_len {wanted.max_seq_len}; lower "
                f"max_seq_len or give at least {shape.pool_bytes(*least) + shape.state_bytes}"
            )
        return _split(budget, shape, least, most)
    left -= machine.working_bytes
    spare = left - shape.pool_bytes(0, least[1])
    own = shape.pool_bytes(1, 0) or 1
    _refuse("max_seq_len", shape.pool_bytes(*least), left, f"{max(0, spare) // own * shape.block_size} tokens")
    return _split(_automatic_bytes(shape, machine, weight_bytes) - states, shape, least, most)


def _bounds(wanted: CapacityRequest, shape: CacheShape) -> tuple[tuple[int, int], tuple[int, int]]:
    """The fewest and the most blocks of all tokens, and of a window's. The longest sequence must fit, with a step of
    its prompt; more than max_batch such sequences would be useless.
    """
    assert shape.windows is not None, "layers have a window"
    longest = shape.num_of(wanted.max_seq_len)
    window = min(longest, shape.num_of(shape.windows.reach) + 1 + 2 * shape.num_of(_LEAST_STEP))
    all_of_them = longest * wanted.max_batch
    if shape.block_bytes == shape.window_bytes:  # there is no other layer: blocks of all tokens are numbers only
        return (longest, window), (max(longest, min(all_of_them, MOST_EMPTY_BLOCKS)), all_of_them)
    return (longest, window), (all_of_them, window * wanted.max_batch)


def _split(num_bytes: int, shape: CacheShape, least: tuple[int, int], most: tuple[int, int]) -> tuple[int, int]:
    """Blocks of all tokens, and of a window's. Half of the bytes are for each: so whatever the length of sequences is,
    no fewer fit than into half of what the longest one leaves, divided as would be best for them. What one pool does
    not need the other one gets.
    """
    own, window_bytes = shape.pool_bytes(1, 0), shape.window_bytes

    def within(side: int, count: int) -> int:
        return max(least[side], min(count, most[side]))

    num_blocks = within(0, num_bytes // 2 // own) if own else most[0]
    num_windows = within(1, (num_bytes - num_blocks * own) // window_bytes)
    return (within(0, (num_bytes - num_windows * window_bytes) // own) if own else num_blocks), num_windows


def _host_blocks(wanted: CapacityRequest, block_bytes: int, left: int, num_sharing: int) -> int:
    if not block_bytes:
        return 0  # there is nothing to swap
    if wanted.num_host_blocks is not None:
        _refuse("num_host_blocks", wanted.num_host_blocks * block_bytes, left, str(left // block_bytes))
        return wanted.num_host_blocks
    if wanted.host_cache_bytes is not None:
        _refuse("host_cache_bytes (cpuMemSize)", wanted.host_cache_bytes, left, _gb(int(left * SHARE)))
        return wanted.host_cache_bytes // block_bytes
    return min(AUTO_MAX_HOST_BYTES, int(left * SHARE / num_sharing)) // block_bytes


def _refuse(name: str, num_bytes: int, left: int, most: str) -> None:
    """Raises OutOfMemory when `num_bytes` are more than what is left."""
    if num_bytes > left:
        raise OutOfMemory(
            f"out of memory: {name} asks for {_gb(num_bytes)} of KV cache and {_gb(left)} are left; "
            f"lower {name} to at most {most}"
        )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GB"
