"""A step for which the system has no memory: the kernels say so, and these are a rank's last words."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kvloom.contract.config import EngineConfig
from kvloom.contract.messages import Batch, NewSeq, Work
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.link.executor import RankDied
from kvloom.rank import main as rank
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions
from kvloom.rank.opening import open_ranks
from tests.engine.kernels.models import SPECS, all_logits, ragged, random_weights
from tests.support.models.checkpoints import save, tiny_model

LEFT_BYTES = 1 << 20  # less than the scratch memory of any step
PROMPT = [5, *range(3, 90), 7]


@contextmanager
def short_of_memory(pid: int) -> Iterator[None]:
    """A process whose address space has LEFT_BYTES more to give."""
    taken = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (taken + LEFT_BYTES, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", ["llama", "mixture of experts"])
def test_a_step_that_finds_no_memory_fails_and_the_next_ones_are_right(name):
    def opened() -> CpuBackend:
        return CpuBackend(SPECS[name], random_weights(SPECS[name]), 64, CpuOptions("w8a8", num_threads=2))

    backend, small, large = opened(), ragged([(PROMPT[:3], 0, [6])]), ragged([(PROMPT, 0, list(range(6)))])
    wanted = all_logits(backend, *small).clone()
    with short_of_memory(os.getpid()), pytest.raises(MemoryError):
        all_logits(backend, *large)
    assert torch.equal(all_logits(backend, *small), wanted)
    assert torch.equal(all_logits(backend, *large), all_logits(opened(), *large))


def test_a_rank_whose_step_finds_no_memory_ends_with_these_words(tmp_path):
    path = save(tiny_model("llama", head_dim=32), tmp_path)
    executor = open_ranks(EngineConfig(model=str(path), backend="cpu", num_blocks=64))
    try:
        prompt = NewSeq(1, PROMPT, SamplingParams(), 1)
        with short_of_memory(executor.pids[0]):
            executor.submit(Batch([prompt], [Work(1, 0, len(PROMPT), 0, list(range(6)))], []))
            with pytest.raises(RankDied, match=r"^the model ran out of memory in a step; lower kv_cache_bytes"):
                executor.collect()
    finally:
        executor.close()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "the model ran out of memory in a step"),
        (OSError(12, "Cannot allocate memory"), "the model ran out of memory in a step"),
        (RuntimeError("DefaultCPUAllocator: not enough memory"), "the model ran out of memory in a step"),
        (ValueError("shapes differ"), "the model failed in a step: ValueError: shapes differ"),
    ],
)
def test_what_a_failed_step_is_told_as(error, words):
    assert rank._last_words(error).startswith(words)
