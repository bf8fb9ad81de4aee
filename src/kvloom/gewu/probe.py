"""What a model path holds, found out without loading it: which model it is, what it will cost, whether it can run."""

import errno
import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvloom.engine.errors import ModelError
from kvloom.engine.models import FAMILIES
from kvloom.engine.weights.metadata import read_shape
from kvloom.gewu.codes import Code, Refused

_WEIGHTS = (".safetensors", ".gguf")
_UNKNOWN_KV_BYTES = 128 << 10  # a token, where the shape is not known: a model of some 4 billion weights
_PACKED_BYTES = 1.04  # of a weight of a matrix in memory: eight bits and its share of the scales
_EMBED_BYTES = 2  # of a weight of the embedding, which is also kept as bfloat16
_VOCAB_SIZE = 152_000  # where the file does not say
_KV_ITEM_BYTES = 4  # the CPU back end may keep keys and values as float32
_MAX_CONFIG_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Found:
    """A model. Two paths to the same unchanged files have the same key."""

    key: str
    path: str  # as opened, for people
    weight_bytes: int
    kv_bytes_per_token: int
    max_seq_len: int | None = None  # tokens; None = not known before loading


def probe(fd: int) -> Found:
    """Look at an open folder or .gguf file. Raises Refused: INVAL when it is no model, NOPERM when
    unreadable, NOSYS when the engine does not know its architecture."""
    path = os.readlink(f"/proc/self/fd/{fd}")
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode):
        try:
            arch, config = read_shape(Path(f"/proc/self/fd/{fd}"))
        except ModelError:
            raise Refused(Code.INVAL, f"{path} is not a whole GGUF file") from None
        return _found(_key(status, [("", status)]), path, arch, config, status.st_size)
    if not stat.S_ISDIR(status.st_mode):
        raise Refused(Code.INVAL, f"{path} is neither a folder nor a file")
    try:
        weights = [(name, os.stat(name, dir_fd=fd)) for name in sorted(os.listdir(fd)) if name.endswith(_WEIGHTS)]
        config = _read_config(fd)
    except PermissionError as error:
        raise Refused(Code.NOPERM, f"{path}: {error}") from None
    except OSError as error:
        raise Refused(Code.INVAL, f"{path} is not a model folder: {error}") from None
    if not weights:
        raise Refused(Code.INVAL, f"{path} holds no .safetensors or .gguf file")
    files = [*weights, ("config.json", os.stat("config.json", dir_fd=fd))]
    names = config.get("architectures")
    of_folder = names[0] if isinstance(names, list) and names else None
    return _found(_key(status, files), path, of_folder, config, sum(file.st_size for _, file in weights))


def _found(key: str, path: str, arch: object, config: dict[str, Any], file_bytes: int) -> Found:
    """What a model of this configuration costs. Raises Refused (NOSYS) when its architecture is not known."""
    if arch is not None and arch not in FAMILIES:
        raise Refused(Code.NOSYS, f"architecture {arch!r} is not known; known are {', '.join(FAMILIES)}")
    shape = _shape(config)
    max_seq_len = _positive(config.get("max_position_embeddings"))
    if shape is None:
        return Found(key, path, file_bytes, _UNKNOWN_KV_BYTES, max_seq_len)
    weight_bytes = _packed_bytes(config, *shape) or file_bytes
    layers, _, _, kv_heads, head_dim = shape
    return Found(key, path, weight_bytes, 2 * layers * kv_heads * head_dim * _KV_ITEM_BYTES, max_seq_len)


def _read_config(fd: int) -> dict[str, Any]:
    config_fd = os.open("config.json", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=fd)
    try:
        config = msgspec.json.decode(os.read(config_fd, _MAX_CONFIG_BYTES))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(Code.INVAL, f"config.json: {error}") from None
    finally:
        os.close(config_fd)
    if not isinstance(config, dict):
        raise Refused(Code.INVAL, "config.json must hold an object")
    return config


def _shape(config: dict[str, Any]) -> tuple[int, int, int, int, int] | None:
    """Layers, width, heads, KV heads, width of a head; None when the configuration does not say."""
    layers, hidden = _positive(config.get("num_hidden_layers")), _positive(config.get("hidden_size"))
    heads = _positive(config.get("num_attention_heads"))
    if not layers or not hidden or not heads:
        return None
    kv_heads = _positive(config.get("num_key_value_heads")) or heads
    return layers, hidden, heads, kv_heads, _positive(config.get("head_dim")) or hidden // heads


def _packed_bytes(
    config: dict[str, Any], layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int
) -> int | None:
    """Memory of the weights as the CPU back end packs them, however the file stores them; None when not known."""
    intermediate = _positive(config.get("intermediate_size"))
    if not intermediate:
        return None
    layer = hidden * (2 * (heads + kv_heads) * head_dim + 3 * intermediate)
    table = hidden * (_positive(config.get("vocab_size")) or _VOCAB_SIZE)  # embedding, and as large a head
    return int(_PACKED_BYTES * (layers * layer + table)) + _EMBED_BYTES * table


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _key(folder: os.stat_result, files: list[tuple[str, os.stat_result]]) -> str:
    digest = hashlib.sha256()
    for name, file in files:
        digest.update(f"{name}\0{file.st_ino}\0{file.st_size}\0{file.st_mtime_ns}\n".encode())
    return f"{folder.st_dev}.{folder.st_ino}.{digest.hexdigest()[:16]}"


def code_of_errno(number: int) -> Code:
    """What Create answers when the client could not open the path."""
    return Code.NOPERM if number in (errno.EACCES, errno.EPERM) else Code.INVAL
