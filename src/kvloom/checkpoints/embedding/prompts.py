"""What a checkpoint puts around texts to embed. Imports little, because the command line uses it."""

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


def message_form(path: Path) -> str:
    """How a text to embed is a message of the chat template: "flat", "structured" (in parts); "" when it is none.

    sentence-transformers 6 has this for every tokenizer with a template. Raises ModelError.
    """
    file = path / "sentence_bert_config.json"
    config = read_object(file).get("modality_config") if file.exists() else None
    message = config.get("message") if isinstance(config, dict) else None
    if message is None:
        return ""
    form = message.get("format", "flat") if isinstance(message, dict) else message
    if form not in ("flat", "structured"):
        raise ModelError(f"{file}: format of message must be flat or structured, got {form!r:.80}")
    return str(form)
