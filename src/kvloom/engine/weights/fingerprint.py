"""Which weights are these: a name that two copies of a model share, and two models do not."""

import hashlib
from pathlib import Path

_PIECE_BYTES = 64 * 1024
_NUM_PIECES = 128


def fingerprint(model: Path) -> str:
    """64 hexadecimal digits over the sizes and a sample of the bytes of a model's files (a folder, or a .gguf file).

    The sample is the first MiB of each file, where names and shapes stand, and 129 pieces spread evenly over the rest:
    training changes every tensor, so it is seen without reading tens of gigabytes.
    """
    files = sorted([*model.glob("config.json"), *model.glob("*.safetensors")]) if model.is_dir() else [model]
    digest = hashlib.sha256()
    for path in files:
        name = path.name if model.is_dir() else ""
        digest.update(f"{name}|{path.stat().st_size}|".encode())
        _sample(path, digest)
    return digest.hexdigest()


def _sample(path: Path, digest: "hashlib._Hash") -> None:
    size, head = path.stat().st_size, 16 * _PIECE_BYTES
    with path.open("rb") as file:
        digest.update(file.read(head))
        rest = max(0, size - head - _PIECE_BYTES)
        for i in range(_NUM_PIECES + 1):
            file.seek(head + rest * i // _NUM_PIECES)
            digest.update(file.read(_PIECE_BYTES))
