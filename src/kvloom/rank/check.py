"""`python -m kvloom.rank.check`: whether a rank could load the model of the EngineConfig on stdin, without loading it.

Exit code 0, and on stdout the bytes of host memory that its weights and KV pools would take; or 1 and a line on stderr.
"""

import functools
import sys
from dataclasses import replace

import msgspec

from kvloom.checkpoints import footprint
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import ServingError
from kvloom.rank.loading import (
    BLOCK_SIZE,
    cache_shape,
    check_backend,
    check_device,
    check_sharing,
    open_files,
    pools_for,
    weight_bytes,
)
from kvloom.rank.opening import check_draft_model, model_tokenizer


def check(config: EngineConfig) -> int:
    """Checks the model's files, the device, how ranks share the heads, and memory. Returns the bytes of host memory
    that weights and KV pools of all ranks would take. Raises ServingError.
    """
    check_device(config.device)
    checkpoint, max_seq_len = open_files(config)
    spec = checkpoint.spec
    check_draft_model(config, functools.partial(model_tokenizer, config.model))
    check_sharing(config, spec)
    backend, block_size = check_backend(config, spec), config.block_size or BLOCK_SIZE
    pools = pools_for(config, backend, checkpoint, max_seq_len, block_size)
    whole = replace(
        cache_shape(config, backend, checkpoint, max_seq_len, block_size), world_size=1
    )  # all ranks together
    num_bytes = pools.num_host_blocks * whole.host_block_bytes
    if config.device == "cpu":
        num_bytes += whole.pool_bytes(pools.num_blocks, pools.num_window_blocks)
        num_bytes += weight_bytes(config, backend, checkpoint)
        num_bytes += pools.num_states * footprint.state_bytes(spec)
    return num_bytes


def main() -> None:
    """See the module."""
    try:
        print(check(msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)))
    except ServingError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
