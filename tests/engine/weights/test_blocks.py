"""Blocks of GGUF files as numbers with scales: the values are those that the gguf package reads, none is rounded."""

import gguf
import numpy as np
import pytest

from kvloom.checkpoints.quantized.blocks import KINDS, form_of
from kvloom.checkpoints.quantized.forms import FORM_BITS, number_bits
from kvloom.checkpoints.quantized.numbers import Numbers
from kvloom.checkpoints.source import RawTensor
from kvloom.contract.errors import ModelError
from tests.engine.kernels.models import random_blocks

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
LEVELS = {
    "int4": range(16),
    "int5": range(32),
    "int6": range(-32, 32),
    "int8": range(-128, 128),
    "int8_min": range(-128, 128),
    "int8_channel": range(-128, 128),
    "iq4": IQ4,
    "fp4": E2M1,
}


def values_of(form: str, numbers: Numbers) -> np.ndarray:
    """The values that `numbers` stand for, computed by the definition in numbers.py."""
    spread = [np.repeat(part, numbers.run, axis=1) for part in (numbers.scales, numbers.minimums) if part is not None]
    width = numbers.values.shape[1]
    levels = np.array(LEVELS[form], np.float32)[numbers.values]
    return levels * spread[0][:, :width] + (spread[1][:, :width] if len(spread) > 1 else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_block_keeps_its_values(kind):
    raw = random_blocks("any", (20, 512), kind)
    wanted = gguf.quants.dequantize(raw.data, gguf.GGMLQuantizationType[kind.upper()])
    found = [values_of(raw.form, numbers) for _, numbers in raw.number_pieces()]
    assert np.array_equal(np.concatenate(found), wanted)
    assert np.array_equal(raw.float32(), wanted)


@pytest.mark.parametrize("kind", ["q4_k", "q6_k"])
def test_a_long_matrix_comes_in_pieces(kind):
    raw = random_blocks("any", (1025, 1024), kind)
    pieces = list(raw.number_pieces())
    assert [at for at, _ in pieces] == [0, 1024]
    whole = np.concatenate([values_of(raw.form, numbers) for _, numbers in pieces])
    assert np.array_equal(whole, raw.float32())


def test_every_form_has_levels_for_all_its_numbers():
    assert {form: len(levels) for form, levels in LEVELS.items()} == {
        form: 2 ** number_bits(form) for form in FORM_BITS
    }
    assert {form_of(kind) for kind in KINDS} == FORM_BITS.keys() - {"int8_min", "int8_channel"}


@pytest.mark.parametrize("kind", ["f32", "bf16", "q2_k"])
def test_what_is_no_such_block_has_no_form(kind):
    assert form_of(kind) == ""


@pytest.mark.parametrize(
    ("kind", "at"), [("q4_0", 0), ("q4_1", 2), ("q4_k", 0), ("q4_k", 2), ("q6_k", 208), ("q8_0", 0)]
)
@pytest.mark.parametrize("half", [0x7E00, 0x7C00, 0xFC00], ids=["NaN", "infinity", "minus infinity"])
def test_scales_that_are_no_numbers_are_refused(kind, at, half):
    raw = random_blocks("layers.0.up", (4, 512), kind)
    num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]][1]
    raw.data.reshape(-1, num_bytes)[1, at : at + 2] = np.frombuffer(half.to_bytes(2, "little"), np.uint8)
    with pytest.raises(ModelError, match=r"tensor layers\.0\.up: a scale is no number below 65504"):
        list(raw.number_pieces())


def test_scales_beyond_float16_are_refused():
    data = np.zeros((1, 17), np.uint8)
    data[0, 0] = 254  # 2 ** 126
    with pytest.raises(ModelError, match="a scale is no number below 65504"):
        list(RawTensor("up", (1, 32), "mxfp4", data).number_pieces())
