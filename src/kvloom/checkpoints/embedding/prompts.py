"""What a checkpoint wants put before its texts. Loads no more than that takes: a command line asks."""

from pathlib import Path

from kvloom.checkpoints.files import read_object
from kvloom.contract.errors import ModelError


def prompts_of(path: Path) -> dict[str, str]:
    """What sentence-transformers puts before a text, by name ("query", "document"); none in a GGUF file.

    Raises ModelError: no JSON, or prompts that are no texts.
    """
    file = path / "config_sentence_transformers.json"
    prompts = read_object(file).get("prompts") if file.exists() else None
    if not isinstance(prompts or {}, dict) or not all(isinstance(text, str) for text in (prompts or {}).values()):
        raise ModelError(f"{file}: prompts must be texts by name")
    return prompts or {}
