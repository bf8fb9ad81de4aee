"""Models opened as a server does: one rank in this process, several in theirs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvloom.contract.config import EngineConfig
from kvloom.engine.link.executor import Executor
from kvloom.rank.main import open_runner
from kvloom.rank.opening import open_ranks
from tests.support.engines import in_process


@contextmanager
def opened(config: EngineConfig) -> Iterator[Executor]:
    """The ranks of `config`; no token ends an answer by itself."""
    if config.world_size > 1:
        executor = open_ranks(config, list)
        try:
            yield executor
        finally:
            executor.close()
        return
    runner = open_runner(config, [], lambda done, total: None)
    torch.set_num_threads(1)  # the reference takes every core, where other tests run beside
    try:
        yield in_process(runner, config)
    finally:
        if config.kv_tier is not None:
            runner.close()
