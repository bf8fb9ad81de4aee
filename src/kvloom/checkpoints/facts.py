"""Facts about a model, for people, from its files' headers only."""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kvloom.checkpoints.files import read_object
from kvloom.checkpoints.gguf_types import GGUF_TYPES
from kvloom.checkpoints.metadata import read_header
from kvloom.checkpoints.part_names import named_parts
from kvloom.checkpoints.tensorfile import LENGTH_BYTES, Damaged, header_bytes, read_entries
from kvloom.contract.errors import ModelError


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`kind`: the type of most weights. Unknown fields are empty or 0."""

    family: str = ""
    format: str = ""
    num_parameters: int = 0
    kind: str = ""
    num_bytes: int = 0  # size of the files with weights
    modified: float = 0.0  # modification time of the newest of them, in seconds since 1970


def facts_of(path: Path) -> ModelFacts:
    """Facts of a GGUF file or a Hugging Face folder. What cannot be read is left out."""
    is_folder = path.is_dir()
    files = sorted(path.glob("*.safetensors")) if is_folder else named_parts(path)
    family, counts = "", Counter[str]()
    try:
        if is_folder:
            family = str(read_object(path / "config.json").get("model_type", ""))
            for file in files:
                counts += _safetensors_counts(file)
        else:
            headers = [read_header(file, has_texts=False) for file in files]
            family = str(headers[0].metadata.get("general.architecture", ""))
            for tensor in (tensor for header in headers for tensor in header.tensors.values()):
                known = GGUF_TYPES.get(tensor.type)
                counts[known.name if known else ""] += math.prod(tensor.shape)
        states = [file.stat() for file in files]
    except (OSError, ValueError, AttributeError, Damaged, ModelError):
        return ModelFacts(family)
    return ModelFacts(
        family,
        "safetensors" if is_folder else "gguf",
        counts.total(),
        max(counts, key=lambda kind: counts[kind], default=""),
        sum(state.st_size for state in states),
        max((state.st_mtime for state in states), default=0.0),
    )


def _safetensors_counts(path: Path) -> Counter[str]:
    """Number of weights of each type. Raises OSError, Damaged."""
    with path.open("rb") as file:
        beginning = file.read(LENGTH_BYTES)
        header = beginning + file.read(header_bytes(beginning) - LENGTH_BYTES)
    counts = Counter[str]()
    for tensor in read_entries(header).values():
        counts[tensor.kind] += math.prod(tensor.shape)
    return counts
