"""What a model path holds, found out without loading it: which model it is, what it will cost, whether it can run."""

import errno
import hashlib
import os
import stat
from dataclasses import dataclass
from typing import Any

import msgspec

from kvloom.engine.models import FAMILIES
from kvloom.gewu.codes import Code, Refused

_WEIGHTS = (".safetensors", ".gguf")
_GGUF_KV_BYTES = 128 << 10  # a token, where only the file's name and size are read: a model of some 4 billion weights
_KV_ITEM_BYTES = 4  # the CPU back end may keep keys and values as float32
_MAX_CONFIG_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Found:
    """A model. Two paths to the same unchanged files have the same key."""

    key: str
    path: str  # as opened, for people
    weight_bytes: int
    kv_bytes_per_token: int


def probe(fd: int) -> Found:
    """Look at an open folder or .gguf file. Raises Refused: INVAL when it is no model, NOPERM when
    unreadable, NOSYS when the engine does not know its architecture."""
    path = os.readlink(f"/proc/self/fd/{fd}")
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode):
        if os.pread(fd, 4, 0) != b"GGUF":
            raise Refused(Code.INVAL, f"{path} is not a GGUF file")
        return Found(_key(status, [("", status)]), path, status.st_size, _GGUF_KV_BYTES)
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
    if isinstance(names, list) and names and names[0] not in FAMILIES:
        raise Refused(Code.NOSYS, f"architecture {names[0]!r} is not known; known are {', '.join(FAMILIES)}")
    return Found(
        _key(status, files),
        path,
        sum(file.st_size for _, file in weights),
        _kv_bytes_per_token(config),
    )


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


def _kv_bytes_per_token(config: dict[str, Any]) -> int:
    layers, hidden = _positive(config.get("num_hidden_layers")), _positive(config.get("hidden_size"))
    heads = _positive(config.get("num_attention_heads"))
    if not layers or not hidden or not heads:
        return _GGUF_KV_BYTES
    kv_heads = _positive(config.get("num_key_value_heads")) or heads
    head_dim = _positive(config.get("head_dim")) or hidden // heads
    return 2 * layers * kv_heads * head_dim * _KV_ITEM_BYTES


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
