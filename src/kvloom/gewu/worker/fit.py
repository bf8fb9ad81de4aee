"""Sizes that a worker takes from a model's files. Imports back ends, which the fake model runs without."""

from dataclasses import replace

from kvloom.checkpoints import footprint
from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.contract.config import EngineConfig
from kvloom.gewu.modelfiles import NUM_STATES
from kvloom.rank.loading import choose_backend


def fit(config: EngineConfig) -> tuple[EngineConfig, int, int]:
    """`config` with its back end, bytes of a token's keys and values, and the model's maximum length. Raises
    ModelError.
    """
    spec = open_checkpoint(config.model).spec
    config = replace(config, backend=choose_backend(config, spec))
    if spec.state_floats:
        config = replace(config, max_batch=min(config.max_batch, NUM_STATES))
    return config, footprint.kv_token_bytes(config, config.backend, spec), spec.max_seq_len
