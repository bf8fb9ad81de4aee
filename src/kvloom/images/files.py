"""Checks which pipeline a diffusers folder holds, and whether it is supported. Reads JSON and names, no weights."""

from pathlib import Path
from typing import Any

from kvloom.checkpoints.files import read_object
from kvloom.contract.errors import ModelError

INDEX = "model_index.json"
PIPELINES = ("StableDiffusionPipeline", "StableDiffusionXLPipeline", "StableDiffusion3Pipeline", "FluxPipeline")
_LIBRARIES = ("diffusers", "transformers", "stable_diffusion")  # the last is a module of diffusers, of safety checkers
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_WEIGHTS = ".safetensors"
VARIANT = "fp16"  # weights of half the size, in addition to the full ones or alone


def is_pipeline(path: Path) -> bool:
    """Whether a model's path is a text-to-image model's."""
    return (path / INDEX).is_file()


def check_pipeline(path: Path) -> str:
    """Which of PIPELINES it is. Raises ModelError for other pipelines, those with code, and pickled weights."""
    index = read_object(path / INDEX)
    name = index.get("_class_name")
    if name not in PIPELINES:
        raise ModelError(f"{path}: {name} of diffusers is not known; this server has {', '.join(PIPELINES)}")
    for part, value in _parts(path, index):
        library, kind = value
        if library is None and kind is None:
            continue
        if library not in _LIBRARIES or not isinstance(kind, str) or not kind.isidentifier():
            raise ModelError(
                f"{path / INDEX}: {part} is {library}.{kind}; only parts of diffusers and transformers load"
            )
        _check_part(path / part)
    return str(name)


def variant_of(path: Path) -> str | None:
    """VARIANT when a part has its weights in that form only; None when all have the full ones."""
    for part, _ in _parts(path, read_object(path / INDEX)):
        names = [file.name for file in (path / part).glob(f"*{_WEIGHTS}")]
        if names and all(f".{VARIANT}." in name or f".{VARIANT}-" in name for name in names):
            return VARIANT
    return None


def _parts(path: Path, index: dict[str, Any]) -> list[tuple[str, tuple[Any, Any]]]:
    """Name, library and class of each part of a pipeline. Raises ModelError."""
    found = []
    for name, value in index.items():
        if name.startswith("_") or not isinstance(value, list):
            continue  # a setting
        if len(value) != 2 or not name.isidentifier():
            raise ModelError(f"{path / INDEX}: {name} must name a library and a class")
        found.append((name, (value[0], value[1])))
    return found


def _check_part(folder: Path) -> None:
    if not folder.is_dir():
        raise ModelError(f"{folder} is missing; {INDEX} names it")
    names = sorted(file.name for file in folder.iterdir())
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles and not any(name.endswith(_WEIGHTS) for name in names):
        raise ModelError(f"{folder / pickles[0]} is a pickle, which may run code; only {_WEIGHTS} is read")
    for index in sorted(folder.glob(f"*{_WEIGHTS}.index*.json")):
        _check_shards(index)


def _check_shards(index: Path) -> None:
    """Checks the files that an index names, because libraries choose by a name which file to read and how."""
    files = read_object(index).get("weight_map")
    for file in files.values() if isinstance(files, dict) else (None,):
        if not isinstance(file, str) or not file.endswith(_WEIGHTS) or Path(file).name != file:
            raise ModelError(f"{index}: names {file!r}; only {_WEIGHTS} files of its folder are read")
