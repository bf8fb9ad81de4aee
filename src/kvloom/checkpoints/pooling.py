"""How a checkpoint wants its embeddings made: sentence-transformers' files in a folder, a key in a GGUF file."""

from pathlib import Path
from typing import Any

from kvloom.checkpoints.files import read_json, read_object
from kvloom.contract.errors import ModelError

DEFAULT = "last"  # of a decoder that says nothing: only its last token has seen all others
_PREFIX = "pooling_mode_"
_KEYS = {"lasttoken": "last", "mean_tokens": "mean"}
_GGUF_TYPES = {0: DEFAULT, 1: "mean", 3: "last"}  # llama.cpp's LLAMA_POOLING_TYPE
_PLAIN_MODULES = {"Transformer", "Pooling", "Normalize"}  # answers are normalised anyhow


def folder_pooling(folder: Path) -> str:
    """One of pooling.POOLINGS, or a description of what the model wants instead. Raises ModelError: no JSON."""
    extra = [name for name in _modules(folder / "modules.json") if name not in _PLAIN_MODULES]
    path = folder / "1_Pooling" / "config.json"
    if not path.exists():
        return "+".join((DEFAULT, *extra))
    modes = [key.removeprefix(_PREFIX) for key, value in read_object(path).items() if key.startswith(_PREFIX) and value]
    return "+".join([*(_KEYS.get(mode, mode) for mode in modes), *extra]) or DEFAULT


def prompts_of(path: Path) -> dict[str, str]:
    """What sentence-transformers puts before a text, by name ("query", "document"); none in a GGUF file.

    Raises ModelError: no JSON, or prompts that are no texts.
    """
    file = path / "config_sentence_transformers.json"
    prompts = read_object(file).get("prompts") if file.exists() else None
    if not isinstance(prompts or {}, dict) or not all(isinstance(text, str) for text in (prompts or {}).values()):
        raise ModelError(f"{file}: prompts must be texts by name")
    return prompts or {}


def gguf_pooling(kind: Any) -> str:
    """As folder_pooling, of the key <architecture>.pooling_type; None = it is absent."""
    return DEFAULT if kind is None else _GGUF_TYPES.get(kind, f"pooling_type {kind}")


def _modules(path: Path) -> list[str]:
    """The classes that a text passes through; none where the file is absent. Raises ModelError."""
    if not path.exists():
        return []
    try:
        return [str(module["type"]).rsplit(".", 1)[-1] for module in read_json(path)]
    except (TypeError, LookupError) as error:
        raise ModelError(f"{path}: cannot be read as a list of modules: {error}") from None
