"""Codebook: a matrix of bitsandbytes in 4 bits, of indices into a table of 16 numbers. As of 0.50.

A matrix is a run of indices, two in a byte, the upper half first, without regard to rows; `absmax` has the
factor of each `blocksize` of them. "Double quantisation" stores these factors as indices into a table of 256 numbers,
each times a factor of its own block, plus one number (QLoRA, arXiv 2305.14314, section 3).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvloom.checkpoints.quantized.numbers import Bytes, Floats, Numbers
from kvloom.checkpoints.quantized.settings import LARGEST
from kvloom.contract.errors import ModelError

_PIECE_VALUES = 1 << 20
_STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
PARTS = (  # ends of the names of a matrix's tensors
    *("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
    *_STATES,
)


@dataclass(frozen=True, slots=True)
class Codebook:
    """One matrix [out, in] of 4-bit indices: each is a number of `table` [16] times its block's number of `scales`."""

    name: str
    shape: tuple[int, ...]
    indices: Bytes
    table: Floats
    scales: Floats
    block: int
    form: str = ""  # its numbers have no lossless form

    def number_pieces(self) -> Iterator[tuple[int, Numbers]]:
        raise ModelError(f"tensor {self.name} has no form of whole numbers")

    def float32(self) -> Floats:
        """The values as a new array of `shape`."""
        return np.concatenate([values for _, values in self.float32_pieces()])

    def float32_pieces(self) -> Iterator[tuple[int, Floats]]:
        """(first row, float32 [rows, in]) from top to bottom."""
        rows, cols = self.shape
        step = max(1, _PIECE_VALUES // cols // 2) * 2  # whole bytes
        for at in range(0, rows, step):
            begin, end = at * cols, min(at + step, rows) * cols
            pairs = self.indices[begin // 2 : (end + 1) // 2]
            values = self.table[np.stack([pairs >> np.uint8(4), pairs & np.uint8(15)], axis=1).reshape(-1)]
            found = values[: end - begin] * self.scales[np.arange(begin, end) // self.block]
            yield at, found.reshape(-1, cols)


def codebook(name: str, shape: tuple[int, ...], parts: Mapping[str, Bytes], where: str) -> Codebook:
    """A matrix of `parts`: bytes of its tensors by the ends of their names. `where` begins every message.

    Raises ModelError when they do not belong together.
    """
    own = next((parts[end] for end in _STATES if end in parts), None)
    if own is None:
        raise ModelError(f"{where}.{_STATES[0]} is missing")
    state = _state(own, where)
    if state.get("shape") != list(shape):
        raise ModelError(f"{where}: shape is {state.get('shape')!r:.80}, the configuration asks for {list(shape)}")
    count, block = shape[0] * shape[1], _size(state, "blocksize", where)
    num_blocks = -(-count // block)
    if "weight.nested_absmax" in parts:
        scales = _nested(parts, state, num_blocks, where)
    else:
        scales = _numbers(parts, "weight.absmax", num_blocks, where)
    table = _numbers(parts, "weight.quant_map", 16, where)
    if parts["weight"].size != (count + 1) // 2:
        raise ModelError(f"{where}: weight has {parts['weight'].size} bytes, not {(count + 1) // 2}")
    return Codebook(name, shape, parts["weight"], table, scales, block)


def _nested(parts: Mapping[str, Bytes], state: Mapping[str, Any], num_blocks: int, where: str) -> Floats:
    run, offset = _size(state, "nested_blocksize", where), state.get("nested_offset")
    if not isinstance(offset, float | int) or isinstance(offset, bool):
        raise ModelError(f"{where}: nested_offset must be a number, got {offset!r:.80}")
    indices = parts["weight.absmax"]
    if indices.size != num_blocks:
        raise ModelError(f"{where}: weight.absmax has {indices.size} bytes, not {num_blocks}")
    table = _numbers(parts, "weight.nested_quant_map", 256, where)
    factors = _numbers(parts, "weight.nested_absmax", -(-num_blocks // run), where)
    return table[indices] * factors[np.arange(num_blocks) // run] + np.float32(offset)


def _numbers(parts: Mapping[str, Bytes], end: str, count: int, where: str) -> Floats:
    if end not in parts:
        raise ModelError(f"{where}.{end} is missing")
    if parts[end].size != 4 * count:
        raise ModelError(f"{where}.{end} has {parts[end].size} bytes, not those of {count} numbers of 32 bits")
    return np.ascontiguousarray(parts[end]).view(np.float32)


def _state(data: Bytes, where: str) -> Mapping[str, Any]:
    try:
        state = json.loads(data.tobytes())
    except ValueError:
        state = None
    if not isinstance(state, dict):
        raise ModelError(f"{where}: quant_state is no JSON object")
    return state


def _size(state: Mapping[str, Any], name: str, where: str) -> int:
    value = state.get(name)
    if type(value) is not int or not 0 < value <= LARGEST:
        raise ModelError(f"{where}: {name} must be a positive whole number, got {value!r:.80}")
    return value
