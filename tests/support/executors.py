"""Models opened as a server does: one rank in this process, several in theirs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kvloom.contract.config import EngineConfig
from kvloom.engine.link.executor import Executor
from kvloom.engine.link.ranks import RankExecutor
from kvloom.rank.main import open_runner
from tests.support.engines import in_process
from tests.support.forked_ranks import program


@contextmanager
def opened(config: EngineConfig, command: Sequence[str] = ()) -> Iterator[Executor]:
    """The ranks of `config`, by default forked; no token ends an answer by itself."""
    if config.world_size > 1:
        executor = RankExecutor(command or program(), config, list)
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
