"""Blocks of GGUF files as numbers with scales: the values are those that the gguf package reads, none is rounded."""

import gguf
import numpy as np
import pytest

from kvloom.checkpoints.quantized.blocks import KINDS, form_of
from kvloom.checkpoints.quantized.forms import FORM_BITS, number_bits
from kvloom.checkpoints.quantized.numbers import LEVELS, Numbers
from kvloom.checkpoints.source import RawTensor
from kvloom.contract.errors import ModelError
from tests.engine.kernels.models import random_blocks


def values_of(form: str, numbers: Numbers) -> np.ndarray:
    """The values that `numbers` stand for, computed by the definition in numbers.py."""
    scales, minimums = numbers.scales, numbers.minimums
    if numbers.factors is not None:
        of = np.arange(scales.shape[1]) * numbers.run // 256
        scales = scales * numbers.factors.scales[:, of]
        minimums = None if minimums is None else minimums * numbers.factors.minimums[:, of]
    spread = [np.repeat(part, numbers.run, axis=1) for part in (scales, minimums) if part is not None]
    width = numbers.values.shape[1]
    levels = LEVELS[form][numbers.values]
    return levels * spread[0][:, :width] + (spread[1][:, :width] if len(spread) > 1 else 0)


NOT_IN_PACKAGE = {"q1_0", "q2_0"}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NOT_IN_PACKAGE])
def test_every_kind_of_block_keeps_its_values(kind):
    raw = random_blocks("any", (20, 512), kind)
    wanted = gguf.quants.dequantize(raw.data, gguf.GGMLQuantizationType[kind.upper()])
    found = [values_of(raw.form, numbers) for _, numbers in raw.number_pieces()]
    assert np.array_equal(np.concatenate(found), wanted)
    assert np.array_equal(raw.float32(), wanted)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NOT_IN_PACKAGE])
def test_every_byte_of_a_block_may_have_every_value(kind):
    """Blocks of random bytes, scales too, in which llama.cpp and the package find numbers."""
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]
    data = np.random.default_rng(1).integers(0, 256, (256, 4 * num_bytes), np.uint8)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind.upper()])
        found = RawTensor("any", (256, 4 * num_values), kind, data).float32()
    is_finite = np.isfinite(wanted)
    assert is_finite.mean() > 0.5
    assert np.array_equal(found[is_finite], wanted[is_finite])


def test_one_bit_is_a_sign():  # dequantize_row_q1_0 of ggml-quants.c
    data = np.zeros((1, 18), np.uint8)
    data[0, :2] = np.array([0.5], np.float16).view(np.uint8)
    data[0, 2] = 0b101
    wanted = np.full(128, -0.5, np.float32)
    wanted[[0, 2]] = 0.5
    assert np.array_equal(RawTensor("any", (1, 128), "q1_0", data).float32()[0], wanted)


def test_two_bits_are_four_levels():  # dequantize_row_q2_0 of ggml-quants.c
    data = np.zeros((1, 18), np.uint8)
    data[0, :2] = np.array([0.5], np.float16).view(np.uint8)
    data[0, 2] = 0b11_10_01_00
    wanted = np.full(64, -0.5, np.float32)
    wanted[:4] = [-0.5, 0, 0.5, 1]
    assert np.array_equal(RawTensor("any", (1, 64), "q2_0", data).float32()[0], wanted)


@pytest.mark.parametrize("kind", ["q2_k", "q4_k", "q6_k"])
def test_a_long_matrix_comes_in_pieces(kind):
    raw = random_blocks("any", (1025, 1024), kind)
    pieces = list(raw.number_pieces())
    assert [at for at, _ in pieces] == [0, 1024]
    whole = np.concatenate([values_of(raw.form, numbers) for _, numbers in pieces])
    assert np.array_equal(whole, raw.float32())


def test_every_form_has_levels_for_all_its_numbers():
    """Forms whose weights are points of a grid have levels for both signs of three or eight sizes."""
    of_points = {form: 16 if form.startswith("iq3") else 8 for form in FORM_BITS if form[:3] in ("iq1", "iq2", "iq3")}
    assert len(of_points) == 7
    assert {form: len(levels) for form, levels in LEVELS.items()} == {
        form: of_points.get(form, 2 ** number_bits(form)) for form in FORM_BITS
    }
    assert {form_of(kind) for kind in KINDS} == FORM_BITS.keys() - {"int8_min", "int8_channel"}


@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_k"])
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


@pytest.mark.parametrize("kind", ["q2_k", "q4_k", "q8_0"])
def test_rows_and_multiples_of_numbers_are_those_of_their_values(kind):
    raw = random_blocks("any", (6, 512), kind)
    levels, ((_, numbers),) = LEVELS[raw.form], raw.number_pieces()
    wanted = numbers.floats(levels)
    assert np.array_equal(numbers.of_rows([4, 1]).floats(levels), wanted[[4, 1]])
    assert np.array_equal(numbers.scaled(np.float32(0.5)).floats(levels), wanted * np.float32(0.5))
    both = Numbers.joined([numbers.of_rows(slice(0, 2)), numbers.of_rows(slice(2, None))])
    assert np.array_equal(both.floats(levels), wanted)


def test_a_factor_of_a_tensor_is_one_of_all_its_values():
    plain = random_blocks("any", (6, 512), "q2_k")
    doubled = RawTensor("any", plain.shape, "q2_k", plain.data, (2.0,))
    assert np.array_equal(doubled.float32(), plain.float32() * 2)
    (_, numbers), *_ = doubled.number_pieces()
    assert np.array_equal(numbers.floats(LEVELS[doubled.form]), doubled.float32())
