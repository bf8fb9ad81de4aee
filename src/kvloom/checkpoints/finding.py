"""Which file of a path is the model: folders of GGUF files hold adapters, projectors and other models beside it."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from kvloom.checkpoints.files import MAX_CONFIG_BYTES, read_object
from kvloom.checkpoints.metadata import read_kind
from kvloom.checkpoints.part_names import is_later_part
from kvloom.contract.errors import ModelError

_MODEL, _PROJECTOR = "model", "projector"
_NAMED = {"mmproj": _PROJECTOR}  # general.type -> the word for people; others are their own
_MOST_NAMED = 3
ASSISTANTS = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM", "gemma4-assistant")


def find_weights(path: Path) -> Path:
    """The folder of safetensors or the GGUF file for a path: a folder with one GGUF model stands for that file.

    Raises ModelError when it contains several, or GGUF files but no model.
    """
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return path
    name = only_model({file.name: file for file in path.glob("*.gguf")}, str(path))
    return path if name is None else path / name


def only_model(files: Mapping[str, Path], folder: str) -> str | None:
    """The name of the GGUF model among the files of a folder without safetensors, of several parts the first; None
    without a GGUF file. `files`: by name, where they can be read.

    Raises ModelError when there are several models, none, or later parts of one alone.
    """
    every = sorted(name for name in files if name.endswith(".gguf"))
    first = [name for name in every if not is_later_part(name)]
    if every and not first:
        raise ModelError(f"{folder}: holds {every[0]}, but not the first part of that model")
    kinds = defaultdict(list)
    for name in first:
        kinds[_kind(name, files[name])].append(name)
    models = kinds.get(_MODEL, [])
    if len(models) == 1 or not first:
        return models[0] if models else None
    told = ", ".join(_told(kind, names) for kind, names in sorted(kinds.items(), key=lambda item: item[0] != _MODEL))
    raise ModelError(f"{folder}: holds {told}; {'name one of the models' if models else 'none of them is a model'}")


def _kind(name: str, file: Path) -> str:
    """What a GGUF file is; a model where it does not say, or cannot be read: opening it tells why."""
    if name.startswith("mmproj"):
        return _PROJECTOR
    try:
        arch, kind = read_kind(file)
    except ModelError:
        return _MODEL
    return _PROJECTOR if arch == "clip" else _NAMED.get(kind, kind or _MODEL)


def _told(kind: str, names: list[str]) -> str:
    first = ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
    return f"{len(names)} {kind:.40}{'s' if len(names) > 1 else ''} ({first})"


def is_assistant(path: Path) -> bool:
    """Whether the files say that they are an assistant (assistant.py), without reading more. Raises ModelError."""
    path = find_weights(path)
    if not path.is_dir():
        return path.is_file() and read_kind(path)[0] in ASSISTANTS
    names = read_object(path / "config.json", MAX_CONFIG_BYTES).get("architectures")
    return isinstance(names, list) and any(name in ASSISTANTS for name in names[:1])
