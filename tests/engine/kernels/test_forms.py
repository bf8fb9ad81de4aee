"""Quantised matrices in the kernels' memory: their size beside the file's, and who keeps their form."""

import math

import pytest
import torch

from kvloom.checkpoints.gguf_types import GGUF_TYPES
from kvloom.checkpoints.quantized.blocks import form_of
from kvloom.checkpoints.quantized.forms import FORM_BITS
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions

from .models import MIXED, MIXED_KINDS, all_logits, mixed_weights, ragged

BITS = {name.lower(): 8 * num_bytes / num_values for name, num_values, num_bytes in GGUF_TYPES.values()}
LAYERS = [name for name in MIXED_KINDS if name != "embed"]


@pytest.mark.parametrize("kind", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"])
def test_super_blocks_take_the_bytes_that_they_take_in_the_file(kind):
    assert FORM_BITS[form_of(kind)] == BITS[kind]
    wide, own = (
        CpuBackend(MIXED, mixed_weights(**dict.fromkeys(LAYERS, each)), 4, CpuOptions("stored")).weight_bytes
        for each in ("q8_0", kind)
    )
    num_weights = sum(math.prod(MIXED.tensor_shapes()[name]) for name in LAYERS)
    assert wide - own == num_weights * (BITS["q8_0"] - BITS[kind]) / 8


def test_four_bits_with_scales_of_six_stay_as_they_are_in_w4a8():
    weights = mixed_weights(**dict.fromkeys(LAYERS, "q4_k"), embed="")
    args = ragged([(list(range(20)), 0, [1, 2])])
    stored, four = (CpuBackend(MIXED, weights, 4, CpuOptions(kept)) for kept in ("stored", "w4a8"))
    assert torch.equal(all_logits(stored, *args).clone(), all_logits(four, *args))
