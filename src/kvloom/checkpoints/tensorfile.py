"""Files of named tensors in the safetensors format: a length in 8 bytes, a JSON header of that length, the tensors.

Own code, because numpy has no bfloat16: tensors are returned as bytes.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

MAX_HEADER_BYTES = 100 << 20  # the format's own limit
LENGTH_BYTES = 8
FLOATS = ("F32", "F16", "BF16")  # types whose bytes are the numbers themselves
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E8M0": 1}  # of types read


class Damaged(Exception):
    """The file's contents are impossible. `tensor`: the one concerned, "" = all; the message is the reason."""

    def __init__(self, problem: str, tensor: str = "") -> None:
        super().__init__(problem)
        self.tensor = tensor


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor. `kind`: its type, as the format spells it; start, end: its bytes, counted from the file's first."""

    kind: str
    shape: tuple[int, ...]
    start: int
    end: int


def header_bytes(beginning: bytes) -> int:
    """The offset of the tensors' bytes, from a file's first bytes. Raises Damaged."""
    length = int.from_bytes(beginning[:LENGTH_BYTES], "little")
    if len(beginning) < LENGTH_BYTES or length > MAX_HEADER_BYTES:
        raise Damaged("the header is cut short or too long")
    return LENGTH_BYTES + length


def read_entries(header: bytes) -> dict[str, Entry]:
    """The tensors by name, from the first header_bytes of a file. Raises Damaged.

    They lie side by side, so the largest `end` is the size of the file.
    """
    try:
        found = json.loads(header[LENGTH_BYTES:])
    except (ValueError, RecursionError):
        raise Damaged("no valid JSON") from None
    if not isinstance(found, dict):
        raise Damaged("holds no JSON object")
    found.pop("__metadata__", None)
    entries = {name: _entry(name, value, len(header)) for name, value in found.items()}
    at = len(header)
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != at:
            raise Damaged("does not begin where the tensor before it ends", name)
        at = entry.end
    return entries


def _entry(name: str, value: Any, base: int) -> Entry:
    fields = value if isinstance(value, dict) else {}
    kind, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(kind, str):
        raise Damaged(f"has type {kind!s:.80}", name)
    if shape is None or not _are_sizes(shape):
        raise Damaged(f"has shape {shape!s:.80}", name)
    if offsets is None or not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise Damaged("has no data_offsets", name)
    if kind in ITEM_BYTES and offsets[1] - offsets[0] != math.prod(shape) * ITEM_BYTES[kind]:
        raise Damaged("has data_offsets that do not fit its shape", name)
    return Entry(kind, tuple(shape), base + offsets[0], base + offsets[1])


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 1 << 62 for number in value)
