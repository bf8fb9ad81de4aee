"""After the last layer's keys and values a step computes only the tokens whose logits or states are requested. Their
bits are those of a step that computes all tokens.
"""

import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvloom.checkpoints.lora import read_adapter
from kvloom.rank.kernels import build
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions
from tests.support.models.adapters import make_adapter

from .models import SPECS, all_logits, int32, ragged, random_weights, step

AVAILABLE = [isa for isa, (_, needed) in build.ISAS.items() if needed <= build.cpu_flags() and isa != "portable"]
ISAS = itertools.cycle(AVAILABLE or ["portable"])
EACH = [(name, next(ISAS)) for name in SPECS]


@functools.cache
def cpu(name: str, isa: str) -> CpuBackend:
    options = CpuOptions("w8a8", num_threads=2, isa=isa)
    return CpuBackend(SPECS[name], random_weights(SPECS[name]), 96, options)


def parts_of(lengths: list[int]) -> list[tuple[list[int], int, list[int]]]:
    tokens = torch.randint(0, 96, (300,), generator=torch.Generator().manual_seed(6)).tolist()
    return [(tokens[i : i + length], 0, [6 * i + at for at in range(6)]) for i, length in enumerate(lengths)]


@pytest.mark.parametrize(("name", "isa"), EACH)
@given(data=st.data())
def test_who_is_asked_for_has_the_bits_of_a_step_that_asks_for_all(name, isa, data):
    """Rows are requested in any order, more than once, for their logits, their state or both."""
    backend = cpu(name, isa)
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=5))
    batch, every = ragged(parts_of(lengths))
    rows, states = (int32(data.draw(st.lists(st.integers(0, len(every) - 1), max_size=8))) for _ in range(2))
    want = step(backend, batch, every, [0] * len(every), every)
    logits, found = want.full.clone(), want.states.clone()
    got = step(backend, batch, rows, [0] * len(rows), states)
    assert torch.equal(got.full, logits[rows.tolist()])
    assert torch.equal(got.states, found[states.tolist()])


@pytest.mark.parametrize(("name", "isa"), EACH)
@given(cuts=st.lists(st.integers(1, 89), max_size=4, unique=True).map(sorted), is_alone=st.booleans())
@example(cuts=[], is_alone=True)
def test_a_prompt_of_which_nobody_asks_for_anything_yet_leaves_its_keys_and_values(name, isa, cuts, is_alone):
    """The last layer's keys and values are stored too, for a prompt alone or beside a sequence that decodes and
    requests its token's logits in each step.
    """
    backend = cpu(name, isa)
    tokens, others = parts_of([90])[0][0], parts_of([1, 9])[1][0]
    blocks, own = list(range(12, 18)), list(range(20, 26))
    want = all_logits(backend, *ragged([(tokens, 0, blocks), (others, 0, own)])).clone()
    backend.kv.fill(0)
    for i, (start, end) in enumerate(itertools.pairwise([0, *cuts, 89])):
        piece = (tokens[start:end], start, blocks)
        if is_alone:
            all_logits(backend, ragged([piece])[0], int32([]))
            continue
        batch, _ = ragged([piece, ([others[i]], i, own)])
        assert torch.equal(all_logits(backend, batch, int32([end - start]))[0], want[90 + i])
    batch, last = ragged([([tokens[89]], 89, blocks)])
    assert torch.equal(all_logits(backend, batch, last)[0], want[89])


@pytest.mark.parametrize("name", ["smollm2 heads", "mixture of experts"])
def test_those_with_adapters_keep_them(tmp_path, name):
    backend, shapes = cpu(name, AVAILABLE[0]), SPECS[name].tensor_shapes()
    for id, rank in ((1, 3), (2, 8)):
        backend.add_adapter(id, read_adapter(make_adapter(tmp_path / str(id), shapes, id, rank, ("q", "o")), shapes))
    batch, every = ragged(parts_of([40, 3, 30, 70]), [1, 0, 2, 1])
    want = all_logits(backend, batch, every).clone()
    assert not torch.equal(want, all_logits(backend, batch._replace(adapters=()), every))
    rows = np.array([142, 41, 72, 39], np.int32)
    assert torch.equal(all_logits(backend, batch, rows), want[rows.tolist()])
    for id in (1, 2):
        backend.drop_adapter(id)
