"""The tile unit (AMX) beside AVX-512: every step has the same bits; processes that may not use the unit use AVX-512."""

import functools
import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvloom.checkpoints.lora import read_adapter
from kvloom.contract.errors import ModelError
from kvloom.rank.kernels import build, cpu_abi
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions
from tests.support.models.adapters import make_adapter

from .models import (
    MIXED,
    SPECS,
    THIN_KINDS,
    all_logits,
    by_channel,
    four_bit,
    mixed_weights,
    ragged,
    random_weights,
    tiny_spec,
)

needs_tiles = pytest.mark.skipif(build.best_isa(build.cpu_flags()) != build.TILES, reason="needs a tile unit")
MODELS = {
    "a file of many kinds": (MIXED, mixed_weights, "stored"),
    "a file of few bits": (MIXED, lambda: mixed_weights(**THIN_KINDS), "stored"),
    "w8a8": (SPECS["smollm2 heads"], lambda: random_weights(SPECS["smollm2 heads"]), "w8a8"),
    "w4a8, uneven sizes": (
        SPECS["gelu, uneven sizes"],
        lambda: four_bit(random_weights(SPECS["gelu, uneven sizes"]), "q4_1"),
        "w4a8",
    ),
    "a scale a channel": (SPECS["smollm2 heads"], lambda: by_channel(random_weights(SPECS["smollm2 heads"])), "stored"),
    "a scale a channel, uneven sizes": (
        SPECS["gelu, uneven sizes"],
        lambda: by_channel(random_weights(SPECS["gelu, uneven sizes"])),
        "stored",
    ),
    "experts with a scale a channel": (
        SPECS["mixture of experts"],
        lambda: by_channel(random_weights(SPECS["mixture of experts"])),
        "stored",
    ),
    "experts": (SPECS["mixture of experts"], lambda: random_weights(SPECS["mixture of experts"]), "w8a8"),
    "bf16": (SPECS["smollm2 heads"], lambda: random_weights(SPECS["smollm2 heads"]), "bf16"),
    "bf16, uneven sizes": (SPECS["gelu, uneven sizes"], lambda: random_weights(SPECS["gelu, uneven sizes"]), "bf16"),
    "bf16 experts": (SPECS["mixture of experts"], lambda: random_weights(SPECS["mixture of experts"]), "bf16"),
}


def pair(name: str) -> tuple[CpuBackend, CpuBackend]:
    spec, weights, weight_format = MODELS[name]
    of = weights()
    tiles, words = (
        CpuBackend(spec, of, 64, CpuOptions(weight_format, num_threads=2, isa=isa)) for isa in ("amx", "avx512")
    )
    assert (tiles.isa, words.isa) == ("amx", "avx512")
    return tiles, words


kept_pair = functools.cache(pair)


def parts_of(lengths: list[int]) -> list[tuple[list[int], int, list[int]]]:
    tokens = torch.randint(0, 96, (300,), generator=torch.Generator().manual_seed(4)).tolist()
    return [(tokens[i : i + length], 0, [5 * i + at for at in range(5)]) for i, length in enumerate(lengths)]


@needs_tiles
@pytest.mark.parametrize("name", MODELS)
@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=8))
@example(lengths=[70] * 8)  # more rows than one pass takes
def test_a_step_has_the_bits_of_avx512(name, lengths):
    tiles, words = kept_pair(name)
    args = ragged(parts_of(lengths))
    assert torch.equal(all_logits(tiles, *args).clone(), all_logits(words, *args).clone())


@functools.cache
def attending(name: str, kv_dtype: str) -> list[CpuBackend]:
    weights = random_weights(SPECS[name])
    options = [CpuOptions("w8a8", kv_dtype, num_threads=2, isa=isa) for isa in ("amx", "avx512")]
    return [CpuBackend(SPECS[name], weights, 64, each) for each in options]


@needs_tiles
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("name", ["smollm2 heads", "mistral", "gemma2", "qwen3", "gelu, uneven sizes", "gpt-oss"])
@given(data=st.data())
def test_a_prompt_cut_anywhere_attends_with_the_bits_of_avx512(name, kv_dtype, data):
    """Models with 1, 2 or 4 query heads per key head, windows, soft caps and sinks; beside a sequence that decodes."""
    length = data.draw(st.integers(1, 290))
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=3))})
    tokens = torch.randint(0, 96, (290,), generator=torch.Generator().manual_seed(5)).tolist()
    blocks, others = list(range(30, 50)), list(range(20))
    found = []
    for backend in attending(name, kv_dtype):
        pieces = []
        for i, (start, end) in enumerate(itertools.pairwise(cuts)):
            parts = [(tokens[start:end], start, blocks), ([tokens[i]], i, others)]
            pieces.append(all_logits(backend, *ragged(parts)).clone())
        found.append(torch.cat(pieces))
    assert torch.equal(*found)


@needs_tiles
@pytest.mark.parametrize("name", ["w8a8", "a scale a channel", "bf16"])
@pytest.mark.parametrize("lengths", [(40, 3, 30), (70, 70, 70, 70, 9)])
def test_a_step_with_adapters_has_the_bits_of_avx512(tmp_path, name, lengths):
    backends = pair(name)
    shapes = backends[0].spec.tensor_shapes()
    for id, rank in ((1, 3), (2, 8)):
        folder = make_adapter(tmp_path / str(id), shapes, id, rank, ("q", "o", "down"))
        for backend in backends:
            backend.add_adapter(id, read_adapter(folder, shapes))
    ids = [1, 0, 2, 1, 2][: len(lengths)]
    with_tiles, with_words = (all_logits(backend, *ragged(parts_of(lengths), ids)).clone() for backend in backends)
    assert torch.equal(with_tiles, with_words)
    assert not torch.equal(with_tiles, all_logits(backends[0], *ragged(parts_of(lengths))).clone())


def test_neither_the_tile_unit_nor_pairs_have_a_library_of_their_own():
    assert build.file_name("amx") == build.file_name("avx512-pairs") == build.file_name("avx512")
    assert build.best_isa(build.ISAS["amx"][1]) == "amx"
    assert build.best_isa(build.ISAS["amx"][1] - {"amx_int8"}) == "avx512"
    assert build.best_isa(build.ISAS["avx512-pairs"][1]) == "avx512-pairs"


@pytest.mark.skipif(build.best_isa(build.cpu_flags()) != build.PAIRS, reason="needs quick products of bf16 pairs")
@pytest.mark.parametrize(
    ("weight_format", "kv_dtype", "is_same"), [("w8a8", "int8", True), ("w8a8", "bf16", False), ("bf16", "int8", False)]
)
def test_pairs_add_bf16_products_in_another_order_and_say_so(weight_format, kv_dtype, is_same):
    """Results differ if weights or the cache are bfloat16. The KV layout always differs: blocks are never shared."""
    weights = random_weights(SPECS["smollm2 heads"])
    pairs, words = (
        CpuBackend(SPECS["smollm2 heads"], weights, 64, CpuOptions(weight_format, kv_dtype, num_threads=2, isa=isa))
        for isa in ("avx512-pairs", "avx512")
    )
    args = ragged(parts_of([70, 3, 70]))
    found, want = all_logits(pairs, *args).clone(), all_logits(words, *args).clone()
    assert torch.equal(found, want) == is_same
    assert (found - want).abs().max() < 0.02 * want.abs().max()
    assert pairs.kv_layout != words.kv_layout


@pytest.mark.skipif(not build.ISAS["avx512"][1] <= build.cpu_flags(), reason="needs AVX-512")
def test_where_the_system_refuses_the_tile_unit_avx512_is_used(monkeypatch):
    """The test declares the unit present on any processor with AVX-512; both use the same library."""

    class Refused:
        """The library in a process that the system does not let use the tile unit."""

        def __init__(self, lib):
            self._lib = lib

        def __getattr__(self, name):
            return (lambda model, unit: 0) if name == "kvl_use" else getattr(self._lib, name)

    monkeypatch.setattr(build, "cpu_flags", lambda: build.ISAS["amx"][1])
    library = Refused(cpu_abi.load(build.library()))
    monkeypatch.setattr(cpu_abi, "load", lambda path: library)
    spec = tiny_spec()
    assert CpuBackend(spec, random_weights(spec), 4, CpuOptions(num_threads=1)).isa == "avx512"
    with pytest.raises(ModelError, match="instruction set amx: the system does not let this process use the tile unit"):
        CpuBackend(spec, random_weights(spec), 4, CpuOptions(num_threads=1, isa="amx"))
