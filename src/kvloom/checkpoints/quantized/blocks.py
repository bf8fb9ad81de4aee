"""Blocks of GGUF files as numbers with scales (their format is defined in ggml-quants.c); nothing is rounded here."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvloom.checkpoints.gguf_types import GGUF_TYPES
from kvloom.checkpoints.quantized.numbers import Bytes, Factors, Floats, Numbers
from kvloom.checkpoints.quantized.small_blocks import SMALL_KINDS, Decoded

_SMALL = 32  # weights that share a scale, in all kinds here except Q6_K
_U4 = np.uint8(15)
_Blocks = tuple[Bytes, Floats, Floats | None]  # of each block: numbers, scales, minimums


class _Kind(NamedTuple):
    form: str  # numbers.py
    run: int
    read: Callable[[Bytes], _Blocks | Decoded]


def form_of(kind: str) -> str:
    """The form that stores blocks of this kind unchanged; "" when it is not a kind of block."""
    return _KINDS[kind].form if kind in _KINDS else ""


def read_blocks(kind: str, rows: Bytes) -> Numbers:
    """`rows`: uint8 [rows, bytes a row]."""
    _, run, read = _KINDS[kind]
    block_bytes = next(size for name, _, size in GGUF_TYPES.values() if name == kind.upper())
    values, scales, minimums, factors = Decoded(*read(np.ascontiguousarray(rows).reshape(-1, block_bytes)))
    count = len(rows)
    least = None if minimums is None else minimums.reshape(count, -1)
    both = factors and factors.each(lambda of: of.reshape(count, -1))
    return Numbers(values.reshape(count, -1), scales.reshape(count, -1), least, run, both)


def _halves(data: Bytes) -> Floats:
    """Bytes [blocks, 2] as float16 numbers [blocks, 1]."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _shifted(data: Bytes, *shifts: int) -> Bytes:
    """[blocks, n] -> [blocks, shifts, n]."""
    return data[:, None, :] >> np.array(shifts, np.uint8)[:, None]


def _nibbles(data: Bytes, group: int = 16) -> Bytes:
    """For each `group` bytes all low nibbles, then all high ones: [blocks, bytes] -> [blocks, 2 * bytes]."""
    return (_shifted(data.reshape(-1, group), 0, 4) & _U4).reshape(len(data), -1)


def _fifth_bits(data: Bytes) -> Bytes:
    return np.unpackbits(data, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(b: Bytes) -> _Blocks:
    scale = _halves(b[:, :2])
    return _nibbles(b[:, 2:]), scale, -8 * scale


def _q4_1(b: Bytes) -> _Blocks:
    return _nibbles(b[:, 4:]), _halves(b[:, :2]), _halves(b[:, 2:4])


def _q5_0(b: Bytes) -> _Blocks:
    scale = _halves(b[:, :2])
    return _nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6]), scale, -16 * scale


def _q5_1(b: Bytes) -> _Blocks:
    return _nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8]), _halves(b[:, :2]), _halves(b[:, 2:4])


def _q8_0(b: Bytes) -> _Blocks:
    return b[:, 2:] ^ np.uint8(0x80), _halves(b[:, :2]), None


def _six_bits(b: Bytes) -> tuple[Floats, Floats, Factors]:
    """Scales, minimums and their factors of Q4_K and Q5_K: two float16 factors, then eight pairs of 6 bits in 12
    bytes.
    """
    first, second, mixed = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = np.concatenate([first & 63, (mixed & 15) | (first >> 6 << 4)], axis=1)
    minimums = np.concatenate([second & 63, (mixed >> 4) | (second >> 6 << 4)], axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32), Factors(_halves(b[:, :2]), -_halves(b[:, 2:4]))


def _q4_k(b: Bytes) -> Decoded:
    return Decoded(_nibbles(b[:, 16:], 32), *_six_bits(b))


def _q5_k(b: Bytes) -> Decoded:
    fifth = (_shifted(b[:, 16:48], *range(8)) & np.uint8(1)).reshape(len(b), -1) << np.uint8(4)
    return Decoded(_nibbles(b[:, 48:], 32) | fifth, *_six_bits(b))


def _q6_k(b: Bytes) -> Decoded:
    low = _nibbles(b[:, :128], 64)
    high = _shifted(b[:, 128:192].reshape(-1, 32), 0, 2, 4, 6) & np.uint8(3)
    scales = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32)
    numbers = low | high.reshape(len(b), -1) << np.uint8(4)
    return Decoded(numbers, scales, None, Factors(_halves(b[:, 208:])))


def _iq4_nl(b: Bytes) -> _Blocks:
    return _nibbles(b[:, 2:]), _halves(b[:, :2]), None


def _iq4_xs(b: Bytes) -> _Blocks:
    high = np.ascontiguousarray(b[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = (b[:, 4:8, None] >> np.array([0, 4], np.uint8)).reshape(len(b), -1) & 15
    return _nibbles(b[:, 8:]), _halves(b[:, :2]) * (low + 16.0 * high - 32).astype(np.float32), None


def _mxfp4(b: Bytes) -> _Blocks:
    return _nibbles(b[:, 1:]), np.ldexp(1.0, b[:, :1].astype(np.int32) - 128).astype(np.float32), None


_KINDS = {
    "q4_0": _Kind("int4", _SMALL, _q4_0),
    "q4_1": _Kind("int4", _SMALL, _q4_1),
    "q4_k": _Kind("int4_k", _SMALL, _q4_k),
    "q5_0": _Kind("int5", _SMALL, _q5_0),
    "q5_1": _Kind("int5", _SMALL, _q5_1),
    "q5_k": _Kind("int5_k", _SMALL, _q5_k),
    "q6_k": _Kind("int6_k", 16, _q6_k),
    "q8_0": _Kind("int8", _SMALL, _q8_0),
    "iq4_nl": _Kind("iq4", _SMALL, _iq4_nl),
    "iq4_xs": _Kind("iq4", _SMALL, _iq4_xs),
    "mxfp4": _Kind("fp4", _SMALL, _mxfp4),
    **{kind: _Kind(*small) for kind, small in SMALL_KINDS.items()},
}
KINDS = tuple(_KINDS)
