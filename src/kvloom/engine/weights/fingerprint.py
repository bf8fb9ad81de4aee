"""Which weights are these: a name that two copies of a model share, and two models do not."""

import hashlib
from pathlib import Path

import xxhash

_PIECE_BYTES = 4 << 20


def fingerprint(model: Path) -> str:
    """64 hexadecimal digits over the bytes of a model's files (a folder, or a .gguf file).

    Every byte counts, since one changed tensor makes other keys and values; XXH3 reads as fast as the disk gives.
    """
    files = sorted([*model.glob("config.json"), *model.glob("*.safetensors")]) if model.is_dir() else [model]
    digest = hashlib.sha256()
    for path in files:
        name = path.name if model.is_dir() else ""
        digest.update(f"{name}|{path.stat().st_size}|{_hash_of(path)}|".encode())
    return digest.hexdigest()


def _hash_of(path: Path) -> str:
    hashed = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            hashed.update(piece)
    return hashed.hexdigest()
