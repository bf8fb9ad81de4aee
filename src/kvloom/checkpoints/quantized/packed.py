"""Matrices of quantised folders: the tensors of each, and their bits as numbers with scales."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvloom.checkpoints.quantized.forms import CHANNEL_COLS
from kvloom.checkpoints.quantized.layout import Scheme
from kvloom.checkpoints.quantized.numbers import Bytes, Floats, Numbers, rotated
from kvloom.contract.errors import ModelError

FLOATS = ("F32", "F16", "BF16")
_EXPONENTS = ("F8_E8M0", "U8")  # powers of two: byte - 127
_PIECE_VALUES = 1 << 20
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight neighbours: which nibble of the word each is
_WORDS = ("awq", "awq_gemv", "gptq")  # layouts whose numbers and zeros lie in words
_ORDER_OF_BYTES = "weight_format"  # of bitsandbytes: 0 = by rows
_ORDERS = ("g_idx", "weight_g_idx")  # tensors with the group of each column


class Want(NamedTuple):
    """Requirements on a tensor of a matrix. `shapes`: any of them. `other`: a name that it may have instead."""

    kinds: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_optional: bool = False
    other: str = ""


class Part(NamedTuple):
    """A tensor in the file's form."""

    kind: str
    shape: tuple[int, ...]
    data: Bytes


def marks(scheme: Scheme, names: Mapping[str, str], base: str) -> bool:
    """Whether the matrix `base` ("...q_proj") is quantised: others lie beside such. `names`: of tensors -> types."""
    if scheme.layout in ("bytes", "fp8", "pairs"):
        return names.get(scheme.key(base, "weight")) in ("I8", "U8", "F8_E4M3")
    if scheme.layout == "codebook":
        return f"{base}.weight.absmax" in names
    return f"{base}.{'qweight' if scheme.layout in _WORDS else 'weight_packed'}" in names


def wanted(scheme: Scheme, shape: tuple[int, ...]) -> dict[str, Want]:
    """The required tensors of a matrix [out, in], by suffix of their names."""
    rows, cols = shape
    per, groups = 32 // scheme.bits, 1 if scheme.group is None else cols // scheme.group
    if scheme.layout == "awq":
        words, zeros = (cols, rows // per), (groups, rows // per)
        return _named(("qweight", words), ("qzeros", zeros)) | {"scales": Want(FLOATS, ((groups, rows),))}
    if scheme.layout == "awq_gemv":
        wide = gemv_words(scheme, cols)
        scales = {"scales": Want(FLOATS, ((rows, 8 * wide),))}
        return _named(("qweight", (rows, cols // per)), ("qzeros", (rows, wide))) | scales
    if scheme.layout == "gptq":
        words, zeros = (cols * scheme.bits // 32, rows), (groups, rows * scheme.bits // 32)
        order = {"g_idx": Want(("I32",), ((cols,),), is_optional=True)}
        return _named(("qweight", words), ("qzeros", zeros)) | {"scales": Want(FLOATS, ((groups, rows),))} | order
    if scheme.layout == "pairs":
        part = Want(FLOATS, ((groups, rows),))
        return {"weight": Want(("I8", "U8"), ((rows, cols // 2),)), "weight_scale": part, "weight_zero_point": part}
    own = ((rows, groups), (rows,), (1,), (1, 1), ()) if groups == 1 else ((rows, groups),)
    if scheme.layout == "packed":
        found = _named(("weight_packed", (rows, -(-cols // per)))) | {"weight_scale": Want(FLOATS, own)}
        if scheme.has_zeros:
            found |= _named(("weight_zero_point", (-(-rows // per), groups)))
        return found | {"weight_g_idx": Want(("I32",), ((cols,),), is_optional=True)}
    if scheme.layout == "bytes":
        zeros8 = Want(("I8",), own, is_optional=bool(scheme.ends))
        found = {"weight": Want(("I8",), (shape,)), "weight_scale": Want(FLOATS, own)}
        found |= {"weight_zero_point": zeros8} if scheme.has_zeros else {}
        return found | {end: Want(("U8",), ((),), is_optional=True) for end, _ in scheme.ends if end == _ORDER_OF_BYTES}
    if scheme.layout == "nvfp4":
        return {
            "weight_packed": Want(("U8",), ((rows, cols // 2),)),
            "weight_scale": Want(("F8_E4M3",), ((rows, cols // 16),)),
            "weight_global_scale": Want(("F32",), ((1,), ())),
        }
    if scheme.layout == "mxfp4":
        return {
            "weight_packed": Want(("U8",), ((rows, cols // 2),)),
            "weight_scale": Want(("U8",), ((rows, cols // 32),)),
        }
    if scheme.blocks is not None:
        own = ((-(-rows // scheme.blocks[0]), -(-cols // scheme.blocks[1])),)
    scale = Want((*FLOATS, *_EXPONENTS), own, other="weight_scale_inv")  # a factor under either name
    return {"weight": Want(("F8_E4M3",), (shape,)), "weight_scale": scale}


def gemv_words(scheme: Scheme, cols: int) -> int:
    """Words of a row's zeros in AWQ's GEMV format: a number of them that depends on the group's size."""
    group = scheme.group or cols
    times = max(1, 128 // group)
    return -(-(cols // group) // (8 * times)) * times


def _named(*tensors: tuple[str, tuple[int, ...]]) -> dict[str, Want]:
    return {name: Want(("I32",), (shape,)) for name, shape in tensors}


def check_sizes(scheme: Scheme, tensor: str, shape: tuple[int, ...]) -> None:
    """Raises ModelError when the matrix cannot be divided into the scheme's groups or blocks."""
    rows, cols = shape
    if scheme.group is not None and cols % scheme.group:
        raise ModelError(f"{tensor} has {cols} columns, no multiple of group_size {scheme.group}")
    bits = scheme.bits
    filled = {"awq": (rows,), "awq_gemv": (cols,), "gptq": shape, "pairs": (4 * cols,)}.get(scheme.layout, ())
    if any(size * bits % 32 for size in filled):
        raise ModelError(f"{tensor} of shape {list(shape)} does not fill words of {32 // bits} numbers")


def check_parts(parts: Mapping[str, Part], tensor: str) -> None:
    """Raises ModelError when the numbers of a matrix lie in an order of bitsandbytes' GPU kernels."""
    if _ORDER_OF_BYTES in parts and parts[_ORDER_OF_BYTES].data.any():
        raise ModelError(f"{tensor}.{_ORDER_OF_BYTES} is not supported; known is 0, by rows")


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """One matrix [out, in] of a quantised folder. `parts`: by the ends of their names, each as `wanted` says."""

    name: str
    shape: tuple[int, ...]
    scheme: Scheme
    parts: Mapping[str, Part]
    rotation: int = 0  # inputs that are rotated together; 0 = none

    @property
    def form(self) -> str:
        """The lossless form in memory; "" when it is read as floats: fp8, inputs that are rotated, columns not in order
        of their groups.
        """
        scheme = self.scheme
        if scheme.layout == "fp8" or self.rotation or self._order() is not None:
            return ""
        if scheme.layout in ("mxfp4", "nvfp4"):
            return "fp4" if scheme.layout == "mxfp4" else "fp4_16"
        if scheme.per_token and not self._has_zeros and self.shape[1] <= CHANNEL_COLS:
            return "int8_channel"
        return "int4" if scheme.bits <= 4 else "int8_min" if self._has_zeros else "int8"

    @property
    def _has_zeros(self) -> bool:
        """Whether zeros of the file differ from the middle; torchao writes them in any case."""
        if self.scheme.layout != "bytes":
            return self.scheme.has_zeros
        return "weight_zero_point" in self.parts and bool(self.parts["weight_zero_point"].data.any())

    def number_pieces(self) -> Iterator[tuple[int, Numbers]]:
        """(first row, numbers) from top to bottom, when there is a form. Raises ModelError for scales like NaN."""
        for at, end in self._cuts():
            values, zeros, scales = self._rows(at, end)
            middle = 0 if self.scheme.bits <= 4 else 128  # number of a level of zero, in memory
            has_minimums = self.form in ("int4", "int8_min")
            minimums = ((middle - zeros) * scales).astype(np.float32) if has_minimums else None
            run = self.scheme.group or self.shape[1]
            yield at, Numbers(values, scales, minimums, run).check(self.name)

    def float32(self) -> Floats:
        """The values as a new array of `shape`. Raises ModelError when one is not a number."""
        return np.concatenate([values for _, values in self.float32_pieces()])

    def float32_pieces(self) -> Iterator[tuple[int, Floats]]:
        """(first row, float32 [rows, in]) from top to bottom. Raises ModelError when a value is not a number."""
        for at, end in self._cuts():
            values = self._fp8(at, end) if self.scheme.layout == "fp8" else self._spread(*self._rows(at, end))
            if not np.isfinite(values).all():
                raise ModelError(f"tensor {self.name}: a weight or its scale is no finite number")
            yield at, np.ascontiguousarray(rotated(values, self.rotation) if self.rotation else values)

    def _cuts(self) -> Iterator[tuple[int, int]]:
        """Rows of a few MB, whole words and blocks of zeros."""
        step = max(1, _PIECE_VALUES // self.shape[1] // 32) * 32
        for at in range(0, self.shape[0], step):
            yield at, min(at + step, self.shape[0])

    def _spread(self, values: Bytes, zeros: Floats, scales: Floats) -> Floats:
        if self.scheme.layout in ("mxfp4", "nvfp4"):
            return _E2M1[values] * np.repeat(scales, self.scheme.group or 1, axis=1)
        order = self._order()
        of = np.arange(self.shape[1]) // (self.scheme.group or self.shape[1]) if order is None else order
        return np.asarray((values - zeros[:, of]) * scales[:, of], np.float32)

    def _order(self) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """The group of each column where they are not in order (desc_act, actorder), else None. Raises ModelError."""
        name = next((name for name in _ORDERS if name in self.parts), None)
        if name is None:
            return None
        group = self.scheme.group or self.shape[1]
        order = self.parts[name].data.view(np.int32).astype(np.int64)
        if np.array_equal(order, np.arange(self.shape[1]) // group):
            return None
        if order.min() < 0 or order.max() >= self.shape[1] // group:
            raise ModelError(f"tensor {self.name}: {name} names a group that there is not")
        return order

    def _rows(self, at: int, end: int) -> tuple[Bytes, Floats, Floats]:
        """Numbers [rows, in], and zeros and scales [rows, groups]; of a scheme that is not fp8."""
        if self.scheme.layout in ("awq", "gptq"):
            return self._columns_of_words(at, end)
        if self.scheme.layout == "awq_gemv":
            return self._rows_of_words(at, end)
        if self.scheme.layout == "pairs":
            return self._signed_pairs(at, end)
        if self.scheme.layout in ("mxfp4", "nvfp4"):
            return self._pairs(at, end)
        bits, has_zeros = self.scheme.bits, self._has_zeros
        scales = self._per_row("weight_scale", at, end) / np.float32(self.scheme.divisor)
        middle = np.full_like(scales, 1 << (bits - 1))
        if self.scheme.layout == "bytes":
            zeros = middle + self._per_row("weight_zero_point", at, end) if has_zeros else middle
            values = self._bytes("weight")[at:end] + np.uint8(1 << (bits - 1))
            if bits < 8 and values.max(initial=0) >> bits:
                raise ModelError(f"tensor {self.name}: a number is outside of those of {bits} bits")
            return values, zeros, scales
        stored = _unpacked(self._words("weight_zero_point"), bits, axis=0)[at:end] if has_zeros else middle
        values = _unpacked(self._words("weight_packed")[at:end], bits)[:, : self.shape[1]]
        return values, stored.astype(np.float32), scales

    def _pairs(self, at: int, end: int) -> tuple[Bytes, Floats, Floats]:
        """Of MXFP4, whose scales are powers of two, and NVFP4, whose scales are divided by one number of the matrix."""
        pairs, scales = self._bytes("weight_packed")[at:end], self._bytes("weight_scale")[at:end]
        values = np.stack([pairs & np.uint8(15), pairs >> np.uint8(4)], axis=2).reshape(end - at, -1)
        if self.scheme.layout == "mxfp4":
            halves = np.ldexp(1.0, scales.astype(np.int32) - 128).astype(np.float32)  # the levels are doubled
        else:
            (whole,) = _floats(self.parts["weight_global_scale"]).reshape(-1)
            with np.errstate(divide="ignore", invalid="ignore"):  # who reads them looks for what is no number
                halves = _E4M3[scales] / whole * np.float32(0.5)
        return values, np.zeros_like(halves), halves

    def _rows_of_words(self, at: int, end: int) -> tuple[Bytes, Floats, Floats]:
        """Of AWQ's GEMV format, which holds [out, in] in order; zeros and scales are padded."""
        groups = 1 if self.scheme.group is None else self.shape[1] // self.scheme.group
        zeros = _unpacked(self._words("qzeros")[at:end], 4)[:, :groups].astype(np.float32)
        return _unpacked(self._words("qweight")[at:end], 4), zeros, _floats(self.parts["scales"])[at:end, :groups]

    def _signed_pairs(self, at: int, end: int) -> tuple[Bytes, Floats, Floats]:
        """Of torchao's int4: weight = number * scale + zero point, numbers from -8 on."""
        pairs, scales, least = (self.parts[f"weight{end}"] for end in ("", "_scale", "_zero_point"))
        own = pairs.data.view(np.uint8).reshape(self.shape[0], -1)[at:end]
        values = np.stack([own & np.uint8(15), own >> np.uint8(4)], axis=2).reshape(end - at, -1) ^ np.uint8(8)
        each, start = _floats(scales)[:, at:end].T, _floats(least)[:, at:end].T
        with np.errstate(divide="ignore", invalid="ignore"):  # who reads them looks for what is no number
            zeros = 8 - start.astype(np.float64) / each
        return values, zeros, each  # type: ignore[return-value]  # float64: products are exact

    def _columns_of_words(self, at: int, end: int) -> tuple[Bytes, Floats, Floats]:
        """Of AWQ and GPTQ, which hold [in, out]: AWQ packs neighbours in out, GPTQ in in; zeros in out."""
        bits = self.scheme.bits
        per = 32 // bits
        scales = _floats(self.parts["scales"])[:, at:end].T
        words = self._words("qweight")
        zeros = _unpacked(self._words("qzeros")[:, at * bits // 32 : end * bits // 32], bits).astype(np.float32)
        if self.scheme.layout == "gptq":
            return _unpacked(words[:, at:end], bits, axis=0).T, zeros.T + np.float32(self.scheme.zero_shift), scales
        order = np.arange(end - at).reshape(-1, per)[:, _AWQ_ORDER].reshape(-1)
        return _unpacked(words[:, at // per : end // per], bits)[:, order].T, zeros[:, order].T, scales

    def _fp8(self, at: int, end: int) -> Floats:
        values = _E4M3[self._bytes("weight")[at:end]]
        if self.scheme.blocks is None:
            scales = self._per_row("weight_scale", at, end)
        else:
            high, wide = self.scheme.blocks
            scales = _floats(self.parts["weight_scale"])[np.arange(at, end) // high]
            scales = np.repeat(scales, wide, axis=1)[:, : self.shape[1]]
        with np.errstate(divide="ignore", invalid="ignore"):  # who reads them looks for what is no number
            return np.asarray(values / scales if self.scheme.divides else values * scales, np.float32)

    def _words(self, name: str) -> np.ndarray[Any, np.dtype[np.uint32]]:
        part = self.parts[name]
        return part.data.view(np.uint32).reshape(part.shape)

    def _bytes(self, name: str) -> Bytes:
        part = self.parts[name]
        return part.data.reshape(part.shape)

    def _per_row(self, name: str, at: int, end: int) -> Floats:
        """[rows, groups], of a tensor with as many, or with one number for all."""
        part = self.parts[name]
        values = part.data.view(np.int8).astype(np.float32) if part.kind == "I8" else _floats(part)
        if values.size == 1:
            return np.full((end - at, 1), values.reshape(-1)[0], np.float32)
        return values.reshape(part.shape[0], -1)[at:end]


def _floats(part: Part) -> Floats:
    flat = np.ascontiguousarray(part.data)
    if part.kind in _EXPONENTS:
        values = np.where(flat == 255, np.nan, np.ldexp(np.float32(1), flat.astype(np.int32) - 127)).astype(np.float32)
    elif part.kind == "BF16":
        values = (flat.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = flat.view(np.float16 if part.kind == "F16" else np.float32).astype(np.float32)
    return values.reshape(part.shape)


def _unpacked(words: np.ndarray[Any, np.dtype[np.uint32]], bits: int, axis: int = 1) -> Bytes:
    """The numbers in words [rows, words], lowest bits first, along an axis. Those of 3 bits go on in the next word."""
    if axis == 0:
        return _unpacked(np.ascontiguousarray(words.T), bits).T
    if 32 % bits:
        stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
        each = stream.reshape(len(words), -1, bits)
        return np.packbits(each, axis=2, bitorder="little")[:, :, 0]
    shifts, mask = np.arange(0, 32, bits, dtype=np.uint32), np.uint32((1 << bits) - 1)
    across: Bytes = (words[:, :, None] >> shifts & mask).astype(np.uint8)
    return across.reshape(len(words), -1)


def _e4m3() -> Floats:
    """The value of each byte (OCP FP8): no infinities, two NaN."""
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, np.ldexp(fraction / 8, -6), np.ldexp(1 + fraction / 8, exponent - 7))
    size[codes & 127 == 127] = np.nan
    return np.where(codes < 128, size, -size).astype(np.float32)


_E4M3 = _e4m3()
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
