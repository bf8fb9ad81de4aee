"""Quantised matrices in the kernels' memory: their size beside the file's, and who keeps their form."""

import math
import re

import gguf
import numpy as np
import pytest
import torch

from kvloom.checkpoints.gguf_types import GGUF_TYPES
from kvloom.checkpoints.quantized.blocks import form_of
from kvloom.checkpoints.quantized.forms import FORM_BITS
from kvloom.rank.kernels import build
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


@pytest.mark.parametrize("kind", ["iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s"])
def test_points_of_a_grid_take_little_more_than_in_the_file(kind):
    """A sign for each of eight neighbours instead of seven, four bits for a scale instead of three."""
    extra = {"iq1_m": 0.0625, "iq2_s": 0}.get(kind, 0.125)
    assert FORM_BITS[form_of(kind)] == BITS[kind] + extra
    wide, own = (
        CpuBackend(MIXED, mixed_weights(**dict.fromkeys(LAYERS, each)), 4, CpuOptions("stored")).weight_bytes
        for each in ("q8_0", kind)
    )
    num_weights = sum(math.prod(MIXED.tensor_shapes()[name]) for name in LAYERS)
    assert wide - own == num_weights * (BITS["q8_0"] - FORM_BITS[form_of(kind)]) / 8


@pytest.mark.parametrize("name", ["Iq1", "Iq2Xxs", "Iq2Xs", "Iq2S"])
def test_the_points_of_a_grid_are_those_of_the_package(name):
    (listed,) = re.findall(rf"k{name}Points\[\d+\] = {{(.*?)}}", (build.SOURCES / "grids.hpp").read_text(), re.DOTALL)
    points = np.array([int(word, 16) for word in re.findall(r"\w+", listed)])
    kind = getattr(gguf.quants, {"Iq1": "IQ1_S", "Iq2Xxs": "IQ2_XXS", "Iq2Xs": "IQ2_XS", "Iq2S": "IQ2_S"}[name])
    kind.init_grid()
    assert np.array_equal(np.array(kind.grid_map)[points[:, None] >> np.arange(0, 16, 2) & 3], kind.grid[0, 0])
    assert np.all(np.diff(points) > 0)  # they are found by halving


def test_four_bits_with_scales_of_six_stay_as_they_are_in_w4a8():
    weights = mixed_weights(**dict.fromkeys(LAYERS, "q4_k"), embed="")
    args = ragged([(list(range(20)), 0, [1, 2])])
    stored, four = (CpuBackend(MIXED, weights, 4, CpuOptions(kept)) for kept in ("stored", "w4a8"))
    assert torch.equal(all_logits(stored, *args).clone(), all_logits(four, *args))
