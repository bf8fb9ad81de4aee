"""Sampling parameters that a model's makers recommend: generation_config.json of a folder, general.sampling.* of a GGUF
file.

vLLM uses the first as defaults of its requests, llama.cpp the second.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvloom.checkpoints.files import read_object
from kvloom.checkpoints.finding import find_weights
from kvloom.checkpoints.metadata import read_header
from kvloom.contract.errors import BadRequest, ModelError
from kvloom.contract.sampling import OFF, ROWS, SamplingParams

log = logging.getLogger(__name__)

FOLDER_FILE = "generation_config.json"
_GGUF_KEYS = {name: f"general.sampling.{row.gguf}" for name, row in ROWS.items() if row.gguf}


def sampling_advice(model: str) -> Mapping[str, float]:
    """The advice of a Hugging Face folder or a GGUF file, by SamplingParams' names; empty for anything else, and for
    files without any.

    Values that no request could have are dropped, which is logged.
    """
    try:
        path = find_weights(Path(model))
        if path.is_file():
            metadata = read_header(path, has_texts=False).metadata
            stated = {name: metadata.get(key) for name, key in _GGUF_KEYS.items()}
        elif (path / FOLDER_FILE).is_file():
            path = path / FOLDER_FILE
            stated = read_object(path)
        else:
            return {}
    except ModelError as problem:
        log.warning("%s", problem)
        return {}
    return _usable(stated, path)


def _usable(stated: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The stated values that are valid, by SamplingParams' names."""
    found: dict[str, Any] = {}
    for name in _GGUF_KEYS:
        value = stated.get(name)
        if name == "top_k" and value == -1:
            value = 0  # off, as in transformers
        if value is None:
            continue
        if isinstance(value, float):
            value = float(f"{value:.7g}")  # GGUF's floats have 32 bits
        given: dict[str, Any] = {name: value}
        try:
            if isinstance(value, bool) or not isinstance(value, int | type(OFF[name])):
                raise BadRequest(name, "must be a number")
            SamplingParams(**given)
        except BadRequest as problem:
            log.warning("%s: its advice on sampling is left out: %s, got %r", path, problem, value)
            continue
        found |= given
    return found
