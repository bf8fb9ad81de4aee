"""Steps of many rows fuse what follows a linear or attention into it; their bits are those of steps of few rows."""

import functools
import itertools

import pytest
import torch

from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions

from .models import MIXED_FILE, SPECS, all_logits, model_in, ragged

FEW = 60  # rows of a step that runs one instruction after the other
CASES = [(name, "w8a8", "bf16") for name in SPECS] + [
    ("smollm2 heads", "bf16", "bf16"),
    ("qwen3", "bf16", "int8"),
    ("gemma2", "w8a8", "int8"),
    ("gelu, uneven sizes", "w4a8", "bf16"),
    ("gelu, uneven sizes", "by channel", "bf16"),
    ("smollm2 heads", "by channel", "int8"),
    (MIXED_FILE, "stored", "bf16"),
]


@functools.cache
def backend_of(name: str, weight_format: str, kv_dtype: str, threads: int = 2) -> CpuBackend:
    spec, weights, weight_format = model_in(name, weight_format)
    return CpuBackend(spec, weights, 64, CpuOptions(weight_format, kv_dtype, threads))


def outcome(backend: CpuBackend, parts: list[tuple[list[int], int, list[int]]]) -> torch.Tensor:
    """Logits of all tokens, [tokens, vocab]."""
    return all_logits(backend, *ragged(parts)).clone()


def tokens_of(count: int) -> list[int]:
    return torch.randint(0, 96, (count,), generator=torch.Generator().manual_seed(6)).tolist()


@pytest.mark.parametrize(("name", "weight_format", "kv_dtype"), CASES)
def test_sequences_in_one_step_have_the_bits_of_steps_of_few_rows(name, weight_format, kv_dtype):
    backend = backend_of(name, weight_format, kv_dtype)
    tokens, lengths = tokens_of(200), [FEW, 1, 33, 47]
    parts = [(tokens[i : i + length], 0, list(range(5 * i, 5 * i + 5))) for i, length in enumerate(lengths)]
    together = outcome(backend, parts)
    alone = torch.cat([outcome(backend, [part]) for part in parts])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("weight_format", ["w8a8", "bf16", "by channel"])
@pytest.mark.parametrize("length", [64, 517, 700])  # the fewest that are fused; more rows than one pass takes
@pytest.mark.parametrize("name", ["smollm2 heads", "latents, of queries too"])
def test_a_long_prompt_has_the_bits_of_its_pieces(name, length, weight_format, threads):
    backend = backend_of(name, weight_format, "bf16", threads)
    tokens, blocks = tokens_of(length), list(range(64))
    whole = outcome(backend, [(tokens, 0, blocks)])
    ends = [*range(0, length, FEW), length]
    pieces = [outcome(backend, [(tokens[a:b], a, blocks)]) for a, b in itertools.pairwise(ends)]
    assert torch.equal(torch.cat(pieces), whole)


def test_a_step_after_a_wider_one_finds_nothing_of_it():
    """A step gives the same bits before and after a wider one that used the same scratch memory."""
    backend = backend_of("smollm2 heads", "w8a8", "bf16")
    tokens = tokens_of(300)
    want = outcome(backend, [(tokens[:90], 0, list(range(6)))])
    outcome(backend, [(tokens, 0, list(range(20)))])
    assert torch.equal(outcome(backend, [(tokens[:90], 0, list(range(6)))]), want)
