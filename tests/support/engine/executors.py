"""Models opened as a server opens them: one rank in this process, several in rank processes."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from kvloom.contract.config import EngineConfig
from kvloom.engine.link.executor import Executor
from kvloom.engine.link.ranks import RankExecutor
from kvloom.processes import kinds
from kvloom.rank.main import open_runner
from tests.support.engine.engines import in_process
from tests.support.forks import WITH_TORCH

FORKED = replace(kinds.RANK, command=(sys.executable, *WITH_TORCH, "-m", "kvloom.rank.main"))


@contextmanager
def opened(config: EngineConfig) -> Iterator[Executor]:
    """The ranks of `config`, forked by default; no end token ends an answer."""
    if config.world_size > 1:
        executor = RankExecutor(FORKED, config, list)
        try:
            yield executor
        finally:
            executor.close()
        return
    runner = open_runner(config, [], lambda done, total: None)
    torch.set_num_threads(1)  # the reference backend would use all cores, while other tests run
    try:
        yield in_process(runner, config)
    finally:
        if config.kv_tier is not None:
            runner.close()
