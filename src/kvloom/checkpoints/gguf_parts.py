"""GGUF models in several files (part_names.py): the first has the metadata, each has tensors.

The format is that of llama.cpp's gguf-split: every part says its number and how many there are, and the first one how
many tensors all of them hold.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvloom.checkpoints.gguf_types import GGUF_TYPES
from kvloom.checkpoints.mapped import MappedFile
from kvloom.checkpoints.metadata import Header, TensorInfo, read_header
from kvloom.checkpoints.part_names import first_part, named_parts
from kvloom.checkpoints.quantized.numbers import Bytes
from kvloom.contract.errors import ModelError


class Part(NamedTuple):
    """One file: the tensors that lie in it, and its bytes."""

    path: Path
    header: Header
    mapped: MappedFile

    def data(self, info: TensorInfo) -> Bytes:
        """The bytes of one of its tensors; see MappedFile.part."""
        return self.mapped.part(info.offset, info.offset + tensor_bytes(info, self.path))


def open_parts(path: Path) -> list[Part]:
    """All files of a model, of which `path` is the first, each checked to hold its tensors. Raises ModelError that says
    which file is missing, in the wrong place, or at odds with another one.
    """
    first = _open(path)
    number, count = _place(first)
    if count <= 1:
        return [first]
    if number:
        begin = first_part(path) or "whose split.no is 0"
        raise ModelError(f"{path}: is part {number + 1} of {count} of a model; name the first one, {begin}")
    names = named_parts(path)
    if len(names) != count:
        raise ModelError(f"{path}: is the first of {count} parts, so its name must end in -00001-of-{count:05}.gguf")
    parts = [first]
    for index, name in enumerate(names[1:], 1):
        if not name.exists():
            raise ModelError(f"{path}: is the first of {count} parts, of which {name.name} is missing")
        parts.append(_open(name))
        own_number, own_count = _place(parts[-1])
        if (own_number, own_count) != (index, count):
            raise ModelError(f"{path}: its part {name.name} says that it is part {own_number + 1} of {own_count}")
    _check_tensors(parts)
    return parts


def tensor_bytes(info: TensorInfo, path: Path) -> int:
    """Raises ModelError when the type is not known, or rows do not fill its blocks."""
    if info.type not in GGUF_TYPES:
        raise ModelError(f"{path}: tensor {info.name} has the unknown type {info.type}")
    _, block, size = GGUF_TYPES[info.type]
    if not info.shape or info.shape[-1] % block:
        raise ModelError(f"{path}: tensor {info.name} of shape {list(info.shape)} does not fill blocks of {block}")
    return info.shape[-1] // block * size * math.prod(info.shape[:-1])


def _place(part: Part) -> tuple[int, int]:
    """(number from 0, number of parts) as the part says. Raises ModelError."""
    metadata: Mapping[str, Any] = part.header.metadata
    number, count = metadata.get("split.no", 0), metadata.get("split.count", 1)
    for key, value in (("split.no", number), ("split.count", count)):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 16:
            raise ModelError(f"{part.path}: {key} must be a number of parts, got {value!r:.80}")
    return number, count


def _open(path: Path) -> Part:
    part = Part(path, read_header(path, has_texts=False), MappedFile(path))
    _check_places(part.header.tensors.values(), part)
    return part


def _check_places(tensors: Iterable[TensorInfo], part: Part) -> None:
    """Raises ModelError when a tensor lies behind the file's end, or where another one does."""
    before, end = "", 0
    for info in sorted(tensors, key=lambda info: info.offset):
        size = tensor_bytes(info, part.path)
        if info.offset + size > part.mapped.num_bytes:
            raise ModelError(f"{part.path}: cut short: tensor {info.name} lies behind the end of the file")
        if size and info.offset < end:
            raise ModelError(f"{part.path}: tensor {info.name} begins inside of tensor {before}")
        before, end = info.name, info.offset + size


def _check_tensors(parts: list[Part]) -> None:
    """Raises ModelError when a tensor is in two parts, or their number is another one than the first part says."""
    first, held = parts[0], dict[str, str]()
    for part in parts:
        for name in part.header.tensors:
            if name in held:
                raise ModelError(f"{first.path}: tensor {name} is in {held[name]} and in {part.path.name}")
            held[name] = part.path.name
    wanted = first.header.metadata.get("split.tensors.count", len(held))
    if wanted != len(held):
        raise ModelError(
            f"{first.path}: its parts hold {len(held)} tensors, it says {wanted}; they are of different models"
        )
