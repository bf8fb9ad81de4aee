"""Experts on the CPU kernels: every weight format, bits independent of other rows, only chosen experts read."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvloom.checkpoints import footprint
from kvloom.checkpoints.families.spec import Experts
from kvloom.checkpoints.fingerprint import stamp
from kvloom.contract.config import EngineConfig
from kvloom.rank.kernels import build
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions
from kvloom.rank.kernels.kept import KeptWeights
from kvloom.rank.kernels.packed import Packed
from kvloom.rank.kernels.reference import ReferenceBackend

from .models import MemoryWeights, Plan, all_logits, ragged, random_blocks, random_weights, rope_of, tiny_spec

AVAILABLE = [isa for isa, (_, needed) in build.ISAS.items() if needed <= build.cpu_flags()]
SPARSE = tiny_spec(
    "qwen3_moe",
    hidden=256,
    head_dim=64,
    layers=(Plan(rope_of(64), has_experts=True),) * 2,
    experts=Experts(6, 2, 256, weighs_chosen=False, has_bias=True),
)
NEVER = 4  # an expert that is never chosen
KINDS = {"gate": "q4_k", "up": "q4_k", "down": "q6_k", "q": "mxfp4", "embed": "q6_k"}
APART = {**KINDS, "gate": "q5_k", "down": "iq4_xs"}
LENGTHS = (1, 2, 3, 7, 8, 33)


def parts() -> list[tuple[list[int], int, list[int]]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randint(0, 96, (n,), generator=generator).tolist(), 0, [3 * n, 3 * n + 1, 3 * n + 2]) for n in LENGTHS
    ]


def weights_of(kinds: dict[str, str]) -> MemoryWeights:
    weights = random_weights(SPARSE)
    for name, value in weights.values.items():
        if name.endswith("router"):
            value /= 4  # the softmax amplifies rounding errors
        if name.endswith("router_bias"):
            value[NEVER] = -1e4
    blocks = {}
    for name, value in weights.values.items():
        if kind := kinds.get(name.rsplit(".", 1)[-1]):
            blocks[name] = random_blocks(name, tuple(value.shape), kind)
    return MemoryWeights(weights.values, blocks)


def backend_of(weights: MemoryWeights, weight_format: str = "stored", **options: object) -> CpuBackend:
    return CpuBackend(SPARSE, weights, 128, CpuOptions(weight_format, **{"num_threads": 2, **options}))


@pytest.mark.parametrize("isa", AVAILABLE)
@pytest.mark.parametrize("kinds", [KINDS, APART], ids=["joint", "apart"])
def test_experts_of_a_file_keep_its_values(kinds, isa):
    weights, args = weights_of(kinds), ragged(parts())
    want = all_logits(ReferenceBackend(SPARSE, weights, 128), *args)
    got = all_logits(backend_of(weights, isa=isa), *args)
    assert float((got - want).norm() / want.norm()) < 0.05


@pytest.mark.parametrize("isa", AVAILABLE)
@pytest.mark.parametrize(("kinds", "weight_format"), [(KINDS, "stored"), (APART, "stored"), ({}, "w8a8"), ({}, "bf16")])
def test_company_chunks_and_threads_change_no_bit(kinds, weight_format, isa):
    weights, seqs = weights_of(kinds), parts()
    backend = backend_of(weights, weight_format, isa=isa)
    together = all_logits(backend, *ragged(seqs)).clone()
    alone = torch.cat([all_logits(backend, *ragged([seq])).clone() for seq in seqs])
    assert torch.equal(alone, together)
    tokens, _, blocks = seqs[-1]
    cuts = [(0, 1), (1, 3), (3, 12), (12, 20), (20, 33)]
    pieces = [all_logits(backend, *ragged([(tokens[at:end], at, blocks)])).clone() for at, end in cuts]
    assert torch.equal(torch.cat(pieces), together[-33:])
    for threads in (1, 3, 5):
        other = backend_of(weights, weight_format, isa=isa, num_threads=threads)
        assert torch.equal(all_logits(other, *ragged(seqs)), together)


@pytest.mark.parametrize("length", LENGTHS)
def test_an_expert_that_nobody_chooses_is_not_read(length):
    weights = weights_of({})
    for name, value in weights.values.items():
        if f".experts.{NEVER}." in name:
            value.fill_(torch.nan)
    part = next(part for part in parts() if len(part[0]) == length)
    assert all_logits(backend_of(weights, "bf16"), *ragged([part])).isfinite().all()


def test_logits_that_are_no_numbers_end_in_some_choice():
    weights = weights_of({})
    weights.values["layers.0.router"].fill_(torch.nan)
    assert len(all_logits(backend_of(weights, "w8a8"), *ragged(parts()))) == sum(LENGTHS)


def test_a_size_that_no_layer_has_takes_no_memory():
    """If all layers have experts, `intermediate_size` has no effect and may have any value."""
    weights, args = weights_of({}), ragged(parts())
    want = all_logits(backend_of(weights), *args).clone()
    odd = CpuBackend(replace(SPARSE, intermediate=10**9), weights, 128, CpuOptions("stored", num_threads=2))
    assert torch.equal(all_logits(odd, *args), want)


def test_packed_experts_are_kept_like_any_other_weights(tmp_path):
    kept, model, weights = KeptWeights(tmp_path / "packed", 10**9), tmp_path / "m.gguf", weights_of(KINDS)
    model.write_bytes(b"GGUF" * 100)
    found = []
    for _ in range(2):
        packed = Packed(kept, model, stamp(str(model)), worth_bytes=0)
        backend = backend_of(weights, packed=packed)
        found.append(all_logits(backend, *ragged(parts())).clone())
        if packed.writing is not None:
            packed.writing.join()
    assert backend._held is not None, "the second start maps what the first has written"
    assert torch.equal(*found)


@pytest.mark.parametrize("kinds", [KINDS, APART])
def test_what_they_take_is_foretold_and_what_a_token_reads_is_told(kinds):
    weights = weights_of(kinds)
    backend = backend_of(weights)
    want = footprint.weight_bytes(EngineConfig(model="m", weight_format="stored"), "cpu", SPARSE, weights.form)
    assert backend.weight_bytes == pytest.approx(want, rel=0.03)
    one = len(SPARSE.layers) * sum(
        np.prod(shape) * footprint.FORM_BITS[weights.form(f"layers.0.experts.0.{part}")] / 8
        for part, shape in (("gate", (256, 256)), ("up", (256, 256)), ("down", (256, 256)))
    )
    assert backend.weight_bytes - backend.streamed_bytes == pytest.approx(4 * one, rel=0.02)
