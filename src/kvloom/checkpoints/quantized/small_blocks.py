"""Blocks of GGUF files with one to three bits a weight, and NVFP4's, as numbers with scales (see ggml-quants.c).

A grid is a list of points: an index in a block stands for the four or eight neighbours that one of them has. Signs of
eight neighbours are a byte, or seven bits of it: the eighth makes the number of minus signs even.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kvloom.checkpoints.quantized.numbers import Bytes, Factors, Floats

_RUN = 16
_SMALL = 32
_ONE, _THREE = np.uint8(1), np.uint8(3)


class Decoded(NamedTuple):
    """Of each block: numbers, scales, minimums, and factors of both; see numbers.Numbers."""

    values: Bytes
    scales: Floats
    minimums: Floats | None = None
    factors: Factors | None = None


class SmallKind(NamedTuple):
    """See blocks.py."""

    form: str
    run: int
    read: Callable[[Bytes], Decoded]


def _halves(data: Bytes) -> Floats:
    """Bytes [blocks, 2] as float16 numbers [blocks, 1]."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _bits(data: Bytes, shifts: range, mask: np.uint8, group: int) -> Bytes:
    """For each `group` bytes all their lowest fields, then all the next ones: [blocks, bytes] -> [blocks, fields]."""
    fields: Bytes = data.reshape(-1, 1, group) >> np.array(shifts, np.uint8)[:, None] & mask
    return fields.reshape(len(data), -1)


def _nibble_pairs(data: Bytes) -> Bytes:
    """The low nibble of each byte, then its high one: [blocks, bytes] -> [blocks, 2 * bytes]."""
    pairs: Bytes = data[:, :, None] >> np.array([0, 4], np.uint8) & np.uint8(15)
    return pairs.reshape(len(data), -1)


def _q2_k(b: Bytes) -> Decoded:
    scales, least = (b[:, :16] & 15).astype(np.float32), (b[:, :16] >> 4).astype(np.float32)
    factors = Factors(_halves(b[:, 80:82]), -_halves(b[:, 82:84]))
    return Decoded(_bits(b[:, 16:80], range(0, 8, 2), _THREE, 32), scales, least, factors)


def _q1_0(b: Bytes) -> Decoded:
    return Decoded(np.unpackbits(b[:, 2:], axis=1, bitorder="little"), _halves(b[:, :2]))


def _q2_0(b: Bytes) -> Decoded:
    values: Bytes = b[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8) & _THREE
    return Decoded(values.reshape(len(b), -1), _halves(b[:, :2]))


def _tq1_0(b: Bytes) -> Decoded:
    """Five digits of base 3 in a byte, which is their fraction of 3^5 in 256ths; four in each of the last bytes."""

    def digits(data: Bytes, count: int, group: int) -> Bytes:
        shifted: Bytes = data.reshape(-1, 1, group) * np.array([1, 3, 9, 27, 81][:count], np.uint8)[:, None]
        return (shifted.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(data), -1)

    parts = digits(b[:, :32], 5, 32), digits(b[:, 32:48], 5, 16), digits(b[:, 48:52], 4, 4)
    return Decoded(np.concatenate(parts, axis=1), _halves(b[:, 52:]))


def _tq2_0(b: Bytes) -> Decoded:
    return Decoded(_bits(b[:, :64], range(0, 8, 2), _THREE, 32), _halves(b[:, 64:]))


def _q3_k(b: Bytes) -> Decoded:
    low, high = _bits(b[:, 32:96], range(0, 8, 2), _THREE, 32), _bits(b[:, :32], range(8), _ONE, 32)
    upper = _bits(b[:, 104:108], range(0, 8, 2), _THREE, 4) << np.uint8(4)
    scales = (_bits(b[:, 96:104], range(0, 8, 4), np.uint8(15), 8) | upper).astype(np.float32) - 32
    return Decoded(low | high << np.uint8(2), scales, None, Factors(_halves(b[:, 108:])))


def _nvfp4(b: Bytes) -> Decoded:
    values = _bits(b[:, 4:], range(0, 8, 4), np.uint8(15), 8)
    return Decoded(values, _UE4M3[b[:, :4]])


def _ue4m3() -> Floats:
    """Half the value of each byte as a scale of NVFP4: E4M3 without sign; its NaN is zero."""
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, np.ldexp(fraction, -10), np.ldexp(8 + fraction, exponent - 11))
    return np.where(codes == 127, 0, size).astype(np.float32)


_UE4M3 = _ue4m3()


@cache
def _grid(name: str) -> Bytes:
    """The points of a type's grid, each coordinate as the number of its level from the smallest: [points, 4 or 8]."""
    gguf: Any = importlib.import_module("gguf")
    kind = getattr(gguf.quants, name)
    kind.init_grid()
    points: Bytes = np.searchsorted(np.array(kind.grid_map), kind.grid[0, 0]).astype(np.uint8)
    return points


def _even_signs(seven: Any) -> Bytes:
    """Seven bits as eight whose sum is even."""
    codes = np.arange(128, dtype=np.uint8)
    odd = np.unpackbits(codes[:, None], axis=1).sum(axis=1).astype(np.uint8) & _ONE
    signs: Bytes = (codes | odd << np.uint8(7))[seven]
    return signs


def _signed(grid: str, indices: Any, signs: Bytes, sign_bit: int) -> Bytes:
    """Levels of the grid's points, and above them, from `sign_bit` on, one of the bits of `signs` for each."""
    count = len(signs)
    minus = np.unpackbits(np.ascontiguousarray(signs), axis=1, bitorder="little")
    numbers: Bytes = _grid(grid)[indices].reshape(count, -1) | minus << np.uint8(sign_bit)
    return numbers


def _odd(steps: Any) -> Floats:
    """Each step doubled, and one more: a scale is an odd multiple of its block's factor."""
    return np.asarray(steps, np.float32) * 2 + 1


def _points(numbers: Bytes, steps: Any, half: Bytes, unit: float) -> Decoded:
    """Numbers with the steps of their scales, and the factor of the block, a float16 number times `unit`."""
    return Decoded(numbers, _odd(steps), None, Factors(_halves(half) * np.float32(unit)))


def _iq2_xxs(b: Bytes) -> Decoded:
    words = np.ascontiguousarray(b[:, 2:]).view(np.uint32).reshape(len(b), 8, 2)
    indices = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    above = words[:, :, 1]
    signs = _even_signs(above[:, :, None] >> np.array([0, 7, 14, 21], np.uint32) & 127).reshape(len(b), -1)
    return _points(_signed("IQ2_XXS", indices, signs, 2), above >> 28, b[:, :2], 0.125)


def _iq2_xs(b: Bytes) -> Decoded:
    words = np.ascontiguousarray(b[:, 2:66]).view(np.uint16)
    numbers = _signed("IQ2_XS", words & 511, _even_signs(words >> 9), 2)
    return _points(numbers, _nibble_pairs(b[:, 66:]), b[:, :2], 0.125)


def _iq2_s(b: Bytes) -> Decoded:
    upper: Bytes = b[:, 66:74, None] >> np.array([0, 2, 4, 6], np.uint8) & _THREE
    indices = b[:, 2:34] | upper.reshape(len(b), -1).astype(np.uint16) << 8
    return _points(_signed("IQ2_S", indices, b[:, 34:66], 2), _nibble_pairs(b[:, 74:]), b[:, :2], 0.125)


def _iq3_xxs(b: Bytes) -> Decoded:
    words = np.ascontiguousarray(b[:, 66:]).view(np.uint32)
    signs = _even_signs(words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32) & 127).reshape(len(b), -1)
    return _points(_signed("IQ3_XXS", b[:, 2:66], signs, 3), words >> 28, b[:, :2], 0.25)


def _iq3_s(b: Bytes) -> Decoded:
    upper = np.unpackbits(b[:, 66:74], axis=1, bitorder="little").astype(np.uint16)
    numbers = _signed("IQ3_S", b[:, 2:66] | upper << 8, b[:, 74:106], 3)
    return _points(numbers, _nibble_pairs(b[:, 106:]), b[:, :2], 1)


def _iq1(indices: Any, is_less: Any) -> Bytes:
    """Numbers of IQ1; is_less: whether the eight neighbours are moved down, for each index."""
    numbers: Bytes = _grid("IQ1_S")[indices] | np.asarray(is_less, np.uint8)[:, :, None] << np.uint8(2)
    return numbers.reshape(len(indices), -1)


def _iq1_s(b: Bytes) -> Decoded:
    words = np.ascontiguousarray(b[:, 34:]).view(np.uint16)
    upper = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(b), -1)
    numbers = _iq1(b[:, 2:34] | upper << 8, np.repeat(words >> 15, 4, axis=1))
    return _points(numbers, words >> 12 & 7, b[:, :2], 0.125)


def _iq1_m(b: Bytes) -> Decoded:
    words = np.ascontiguousarray(b[:, 48:]).view(np.uint16)
    half = np.bitwise_or.reduce((words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16), axis=1)
    steps = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(b), -1)
    upper = _nibble_pairs(b[:, 32:48])
    numbers = _iq1(b[:, :32] | (upper & 7).astype(np.uint16) << 8, upper >> 3)
    return _points(numbers, steps, half.astype(np.uint16).view(np.uint8).reshape(-1, 2), 0.125)


SMALL_KINDS: Mapping[str, SmallKind] = {
    "q1_0": SmallKind("int1", 128, _q1_0),
    "q2_0": SmallKind("int2", 64, _q2_0),
    "q2_k": SmallKind("int2_k", _RUN, _q2_k),
    "tq1_0": SmallKind("int2_256", 256, _tq1_0),
    "tq2_0": SmallKind("int2_256", 256, _tq2_0),
    "q3_k": SmallKind("int3_k", _RUN, _q3_k),
    "iq1_s": SmallKind("iq1_s", _SMALL, _iq1_s),
    "iq1_m": SmallKind("iq1_m", _RUN, _iq1_m),
    "iq2_xxs": SmallKind("iq2_xxs", _SMALL, _iq2_xxs),
    "iq2_xs": SmallKind("iq2_xs", _RUN, _iq2_xs),
    "iq2_s": SmallKind("iq2_s", _RUN, _iq2_s),
    "iq3_xxs": SmallKind("iq3_xxs", _SMALL, _iq3_xxs),
    "iq3_s": SmallKind("iq3_s", _SMALL, _iq3_s),
    "nvfp4": SmallKind("fp4_16", _RUN, _nvfp4),
}
