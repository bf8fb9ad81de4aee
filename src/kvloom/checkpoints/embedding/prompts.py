"""Prompts that a checkpoint puts before texts. Imports little, because the command line uses it."""

from pathlib import Path

from kvloom.checkpoints.files import read_object
from kvloom.contract.errors import ModelError


def prompts_of(path: Path) -> dict[str, str]:
    """Prompts of sentence-transformers by name ("query", "document"); none for a GGUF file.

    Raises ModelError when the file is not JSON, or a prompt is not a text.
    """
    file = path / "config_sentence_transformers.json"
    prompts = read_object(file).get("prompts") if file.exists() else None
    if not isinstance(prompts or {}, dict) or not all(isinstance(text, str) for text in (prompts or {}).values()):
        raise ModelError(f"{file}: prompts must be texts by name")
    return prompts or {}
