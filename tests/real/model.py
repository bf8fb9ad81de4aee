"""The real small model in this process: one runner of each kind, over which tests make engines as they need."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from msgspec import structs

from kvloom.contract.config import EngineConfig
from kvloom.engine.engine import Engine
from kvloom.engine.text.tokenizer import Tokenizer
from kvloom.rank.loading import open_runner
from kvloom.rank.runner import ModelRunner
from tests.support.engine.engines import in_process


@dataclass(frozen=True, slots=True)
class RealModel:
    config: EngineConfig
    runner: ModelRunner
    tokenizer: Tokenizer

    def engine(self, num_blocks: int | None = None, **fields: object) -> Engine:
        """A new engine without the state of earlier ones. `num_blocks`: how many of the runner's blocks it may use."""
        config = replace(self.config, **fields)
        executor = in_process(self.runner, config)
        if num_blocks is not None:
            executor.info = structs.replace(executor.info, num_blocks=num_blocks)
        return Engine(config, executor, self.tokenizer)

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text))

    def forget(self) -> None:
        """Zero the KV cache, as in a runner that has just been opened."""
        for parts in self.runner.kv_layers:
            for part in parts:
                part[:] = 0


def open_real(path: Path, tokenizer: Tokenizer, kind: str) -> RealModel:
    """`kind`: back end and type of keys and values, as in "cpu, int8"; the reference computes in float32."""
    backend, kv_dtype = kind.split(", ")
    config = EngineConfig(model=str(path), backend=backend, kv_dtype=kv_dtype, num_blocks=160, max_seq_len=1024)
    runner = open_runner(config, sorted(tokenizer.eos_ids), lambda done, total: None)
    torch.set_num_threads(1)  # torch would take every core, though other tests run
    return RealModel(config, runner, tokenizer)
