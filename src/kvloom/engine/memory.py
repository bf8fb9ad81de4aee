"""How many KV blocks fit in memory and how many sequences fit in the blocks. Pure arithmetic."""

from dataclasses import dataclass

from kvloom.engine.errors import BadRequest

GIB = 1024**3
RESERVE = 0.2  # share of what is left after the weights that is not given to the cache


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The keys and values of one model on one rank."""

    num_layers: int
    num_kv_heads: int  # of the whole model; ranks share them
    head_dim: int
    dtype_bytes: int = 2
    block_size: int = 128
    num_caches: int = 2  # keys and values
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.num_kv_heads % self.world_size:
            raise BadRequest(
                "world_size", f"must divide the {self.num_kv_heads} key-value heads, got {self.world_size}"
            )

    @property
    def block_bytes(self) -> int:
        heads = self.num_kv_heads // self.world_size
        return self.num_layers * self.block_size * heads * self.head_dim * self.dtype_bytes * self.num_caches


def total_blocks(cache_bytes: int, shape: CacheShape) -> int:
    """Total Block Num: blocks that `cache_bytes` of one rank hold."""
    return cache_bytes // shape.block_bytes


def blocks_per_request(num_input: int, num_output: int, block_size: int) -> int:
    """Block Num: blocks of one request, input and answer rounded up separately."""
    return -(-num_input // block_size) + -(-num_output // block_size)


def max_batch(num_blocks: int, per_request: int) -> int:
    """maxBatchSize: requests of `per_request` blocks that run at once without preemption."""
    return num_blocks // per_request


def cache_bytes(size_gb: float, free_bytes: int, weight_bytes: int, world_size: int = 1, used_bytes: int = 0) -> int:
    """Memory for the cache of one rank: `size_gb` as configured, or with -1 what is free.

    Automatic is what remains of `free_bytes` after the rank's part of the weights and `used_bytes` for activations
    and sampling, less RESERVE. Raises BadRequest saying which number to lower.
    """
    left = free_bytes - weight_bytes // world_size - used_bytes
    if size_gb == -1:
        if left <= 0:
            raise BadRequest(
                "npuMemSize", f"nothing is left of {free_bytes / GIB:.2f} GB after the weights: use a smaller model"
            )
        return int(left * (1 - RESERVE))
    if size_gb <= 0:
        raise BadRequest("npuMemSize", f"must be -1 (automatic) or above 0 GB, got {size_gb:g}")
    if size_gb * GIB > left:
        raise BadRequest("npuMemSize", f"{size_gb:g} GB do not fit, lower it to at most {max(left, 0) / GIB:.2f}")
    return int(size_gb * GIB)
