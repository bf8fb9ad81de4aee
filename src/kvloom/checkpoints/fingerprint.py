"""Fingerprints of weights: equal for two copies of a model, different for two models."""

import hashlib
from pathlib import Path

import xxhash

from kvloom.checkpoints.finding import find_weights
from kvloom.checkpoints.part_names import named_parts
from kvloom.contract.errors import ModelError

_PIECE_BYTES = 4 << 20
_RACY_S = 2.0  # the coarsest time resolution of file systems
_DECISIVE = ("config.json", "*.safetensors", "*.safetensors.index.json", "*.gguf")
Stamp = list[tuple[str, int, int, int]]


def fingerprint(model: Path) -> str:
    """64 hexadecimal digits over the bytes of a model's files (a folder, or a .gguf file).

    Every byte counts, because one changed tensor gives other keys and values; XXH3 is as fast as the disk. Raises
    ModelError when there is no file, because all such models would be equal.
    """
    model = find_weights(model)
    files = _files(model)
    if not files:
        raise ModelError(f"{model}: holds no weights")
    digest = hashlib.sha256()
    for path in files:
        name = path.name if model.is_dir() else ""
        digest.update(f"{name}|{path.stat().st_size}|{_hash_of(path)}|".encode())
    return digest.hexdigest()


def stamp(model: str) -> Stamp:
    """Name, inode, size and time of change of the files that `fingerprint` reads: different once they were replaced."""
    about = [(path.name, path.stat()) for path in (_files(Path(model)) if model else ())]
    return [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in about]


def identity(model: Path, now_s: float) -> str | None:
    """Unchanged as long as the files that `fingerprint` reads are not written to, wherever they lie.

    None when one was changed within the last seconds: a further change might leave no trace. `now_s`: since the epoch.
    """
    model = find_weights(model)
    digest = hashlib.sha256()
    for path in _files(model):
        about = path.stat()
        if now_s - max(about.st_ctime, about.st_mtime) < _RACY_S:
            return None
        name = path.name if model.is_dir() else ""
        times = (about.st_mtime_ns, about.st_ctime_ns)
        digest.update(f"{name}|{about.st_dev}|{about.st_ino}|{about.st_size}|{times}|".encode())
    return digest.hexdigest()


def _files(model: Path) -> list[Path]:
    """All files that determine the numbers that the model computes with."""
    if not model.is_dir():
        return [path for path in named_parts(model) if path.is_file()]
    return sorted(path for pattern in _DECISIVE for path in model.glob(pattern) if path.is_file())


def _hash_of(path: Path) -> str:
    hashed = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            hashed.update(piece)
    return hashed.hexdigest()
