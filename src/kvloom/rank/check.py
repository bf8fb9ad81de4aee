"""`python -m kvloom.rank.check`: whether a rank could load the model of the EngineConfig on stdin, without loading it.

Exit code 0, or 1 and one line on stderr.
"""

import sys
from pathlib import Path

import msgspec

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import ServingError
from kvloom.rank.loading import BLOCK_SIZE, check_backend, check_device, pools_for
from kvloom.rank.parallel.shard import shard_spec


def check(config: EngineConfig) -> None:
    """Checks the model's files, the device, how ranks share the heads, and memory. Raises ServingError."""
    check_device(config.device)
    checkpoint = open_checkpoint(Path(config.model))
    spec = checkpoint.spec
    max_seq_len = min(spec.max_seq_len, config.max_seq_len or spec.max_seq_len)
    shard_spec(spec, config.world_size)
    pools_for(config, check_backend(config, spec), checkpoint, max_seq_len, config.block_size or BLOCK_SIZE)


def main() -> None:
    """See the module."""
    try:
        check(msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig))
    except ServingError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
