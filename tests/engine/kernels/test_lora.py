"""LoRA in the backends: results are those of merged weights, with the same bits in every batch."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvloom.checkpoints.lora import read_adapter
from kvloom.contract.errors import BadRequest
from kvloom.rank.kernels import build
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions
from kvloom.rank.kernels.reference import ReferenceBackend
from tests.support.models.adapters import make_adapter, merged

from .models import SPECS, MemoryWeights, all_logits, ragged, random_weights

AVAILABLE = [isa for isa, (_, needed) in build.ISAS.items() if needed <= build.cpu_flags()]
LENGTHS = (1, 2, 5, 16, 17, 40)
Merge = Callable[[str, int], tuple[Path, torch.Tensor]]
CASES = [  # rank, parts, configuration, scale by part
    (4, ("q", "k", "v", "o", "gate", "up", "down"), {}, {"": 2.0}),
    (1, ("q", "q_up", "kv_down", "v"), {"lora_alpha": 3}, {"": 3.0}),
    (9, ("k", "up"), {"use_rslora": True, "lora_alpha": 6}, {"": 2.0}),
    (
        2,
        ("o", "down", "gate"),
        {"rank_pattern": {"down_proj": 7}, "alpha_pattern": {"down_proj": 14, "mlp.gate_proj": 1}, "lora_alpha": 2},
        {"": 1.0, "down": 2.0, "gate": 0.5},
    ),
]


def parts_of(lengths=LENGTHS):
    free = torch.randperm(64, generator=torch.Generator().manual_seed(3)).tolist()
    return [
        (
            torch.randint(0, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist(),
            0,
            [free.pop() for _ in range(3)],
        )
        for n in lengths
    ]


def relative_error(got, want):
    return float((got - want).norm() / want.norm())


def open_backend(kind, spec, weights):
    if kind == "reference":
        return ReferenceBackend(spec, weights, 64)
    weight_format, isa = kind.split()
    return CpuBackend(spec, weights, 64, CpuOptions(weight_format, num_threads=2, isa=isa))


KINDS = ["reference", *(f"{weights} {isa}" for weights in ("bf16", "w8a8", "w4a8") for isa in AVAILABLE)]


@functools.cache
def weights_of(name: str) -> MemoryWeights:
    return random_weights(SPECS[name])


@pytest.fixture(scope="module")
def merging(tmp_path_factory) -> Iterator[Merge]:
    """Makes the adapter of a case for a model of SPECS; returns its folder and the logits of the merged weights."""

    @functools.cache
    def merge(name: str, case: int) -> tuple[Path, torch.Tensor]:
        rank, parts, config, scales = CASES[case]
        spec, folder = SPECS[name], tmp_path_factory.mktemp("adapter")
        make_adapter(folder, spec.tensor_shapes(), 5, rank, parts, size=0.5, **config)
        truth = ReferenceBackend(spec, MemoryWeights(merged(weights_of(name).values, folder, scales)), 64)
        return folder, all_logits(truth, *ragged(parts_of())).clone()

    yield merge
    weights_of.cache_clear()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "w4a8" not in kind])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_an_adapter_is_what_its_merged_weights_are(merging, name, kind, case):
    spec, (folder, want) = SPECS[name], merging(name, case)
    backend = open_backend(kind, spec, weights_of(name))
    backend.add_adapter(3, read_adapter(folder, spec.tensor_shapes()))
    args = ragged(parts_of())
    base = all_logits(backend, *args).clone()
    got = all_logits(backend, *ragged(parts_of(), [3] * len(LENGTHS))).clone()
    limit = 1e-4 if kind == "reference" else 0.03 if kind.startswith("bf16") else 0.07
    limit *= 2 if spec.state_floats else 1  # a state sums up what rounding does to each token
    assert relative_error(got, want) < limit
    assert relative_error(base, want) > 0.16  # an adapter without effect would fail the test
    assert torch.equal(all_logits(backend, *args), base)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "smollm2 heads", "gelu, uneven sizes"])
def test_three_adapters_and_the_base_in_one_step_give_the_bits_of_each_alone(tmp_path, name, kind):
    spec = SPECS[name]
    backend = open_backend(kind, spec, random_weights(spec))
    for id, rank in ((1, 3), (2, 8), (7, 16)):
        folder = make_adapter(tmp_path / str(id), spec.tensor_shapes(), id, rank, ("q", "o", "up")[: id + 1])
        backend.add_adapter(id, read_adapter(folder, spec.tensor_shapes()))
    parts, ids = parts_of(), [2, 0, 7, 1, 2, 0]
    base = all_logits(backend, *ragged(parts)).clone()
    together = all_logits(backend, *ragged(parts, ids)).clone()
    start = 0
    for part, id in zip(parts, ids, strict=True):
        rows = slice(start, start + len(part[0]))
        alone = all_logits(backend, *ragged([part], [id])).clone()
        assert torch.equal(alone, together[rows])
        assert torch.equal(alone, base[rows]) == (id == 0)
        start += len(part[0])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reference"])
@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_a_prompt_with_an_adapter_in_chunks_gives_the_same_bits_as_whole(tmp_path, kind, chunk):
    spec = SPECS["smollm2 heads"]
    backend = open_backend(kind, spec, random_weights(spec))
    backend.add_adapter(1, read_adapter(make_adapter(tmp_path, spec.tensor_shapes(), rank=5), spec.tensor_shapes()))
    (tokens, _, blocks), *_ = parts_of((40,))
    whole = all_logits(backend, *ragged([(tokens, 0, blocks)], [1])).clone()
    pieces = [
        all_logits(backend, *ragged([(tokens[at : at + chunk], at, blocks[::-1])], [1])).clone()
        for at in range(0, len(tokens), chunk)
    ]
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("threads", [1, 3, 5])
def test_the_number_of_threads_does_not_change_the_result(tmp_path, threads):
    spec = SPECS["smollm2 heads"]
    folder = make_adapter(tmp_path, spec.tensor_shapes(), rank=6)
    results = []
    for count in (1, threads):
        backend = CpuBackend(spec, random_weights(spec), 64, CpuOptions(num_threads=count))
        backend.add_adapter(1, read_adapter(folder, spec.tensor_shapes()))
        for lengths in ((1,), (1, 1, 1), LENGTHS):
            args = ragged(parts_of(lengths), [1, 0, 1, 1, 0, 1][: len(lengths)])
            results.append(all_logits(backend, *args).clone())
    assert all(torch.equal(one, many) for one, many in zip(results[:3], results[3:], strict=True))


@pytest.mark.parametrize("kind", ["reference", f"w8a8 {AVAILABLE[0]}"])
def test_a_dropped_adapter_leaves_its_place_to_the_next(tmp_path, kind):
    spec = replace(SPECS["llama"], layers=SPECS["llama"].layers[:1])
    backend = open_backend(kind, spec, random_weights(spec))
    found = []
    for id, seed in ((1, 1), (2, 2), (3, 1)):
        folder = make_adapter(tmp_path / str(id), spec.tensor_shapes(), seed)
        assert backend.add_adapter(id, read_adapter(folder, spec.tensor_shapes())) > 0
        args = ragged(parts_of(), [id] * len(LENGTHS))
        found.append(all_logits(backend, *args).clone())
        backend.drop_adapter(id)
        backend.drop_adapter(id)
        with pytest.raises(KeyError):
            all_logits(backend, *args)
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("kind", ["reference", f"w8a8 {AVAILABLE[0]}"])
def test_an_adapter_of_a_model_whose_multipliers_are_in_its_weights_is_refused(tmp_path, kind):
    spec = replace(SPECS["llama"], family="falcon_h1", is_multiplied=True)
    make_adapter(tmp_path, spec.tensor_shapes(), 5, 2, ("q",))
    backend = open_backend(kind, spec, random_weights(spec))
    with pytest.raises(BadRequest, match="adapters of falcon_h1 are not supported: its multipliers are in its weights"):
        backend.add_adapter(1, read_adapter(tmp_path, spec.tensor_shapes()))
