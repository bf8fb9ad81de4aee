"""Examines opened model files without loading them: which model it is, what it will take, whether it can run."""

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvloom.checkpoints import footprint
from kvloom.checkpoints.families import FAMILIES, has_head, known_names
from kvloom.checkpoints.files import MAX_CONFIG_BYTES, read_object
from kvloom.checkpoints.finding import only_model
from kvloom.checkpoints.metadata import read_shape
from kvloom.checkpoints.quantized.scheme import scheme_of
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import ModelError
from kvloom.gewu.codes import Code, Refused
from kvloom.gewu.modelfiles import NUM_STATES, ModelFiles

_UNKNOWN_KV_BYTES = 128 << 10  # bytes a token where the shape is unknown: that of a model with about 4 billion weights
_KEPT = 1.15  # memory of a quantised file relative to its size: scales are kept in 16 bits
_LEAST = 0.55  # and to the size in 8 bits: what a file has in fewer than 4 is kept in up to 4.5
_VOCAB_SIZE = 152_000  # tokens, where the file does not say


@dataclass(frozen=True, slots=True)
class Found:
    """A model. Two paths to the same unchanged files have the same key."""

    key: str
    path: str  # as opened, for people
    weight_bytes: int
    kv_bytes_per_token: int
    process_bytes: int  # of its worker besides both
    max_seq_len: int | None = None  # tokens; None = not known before loading


def probe(files: ModelFiles, backend: str = "auto") -> Found:
    """Raises Refused: INVAL when it is not a model, NOSYS when the engine cannot run it. `backend`: of EngineConfig."""
    try:
        arch, config = _configuration(files)
    except ModelError as error:
        raise Refused(Code.INVAL, _with_names(str(error), files)) from None
    key, kept = files.identity(), "reference" if backend == "reference" else "cpu"
    if arch is None:
        longest, process = _positive(config.get("max_position_embeddings")), footprint.process_bytes(kept, _VOCAB_SIZE)
        return Found(key, files.path, _num_bytes(files), _UNKNOWN_KV_BYTES, process, longest)
    if arch not in FAMILIES:
        names = known_names(is_gguf=not any(name.endswith(".safetensors") for name in files.fds))
        raise Refused(Code.NOSYS, f"architecture {arch!r:.80} is not known; known are {names}")
    if not has_head(arch):
        raise Refused(Code.NOSYS, f"{files.path}: {arch} makes embeddings, and a session answers with text")
    try:
        spec = FAMILIES[arch].spec({"vocab_size": _VOCAB_SIZE, **config})
    except ModelError as error:
        raise Refused(Code.INVAL, f"{files.path}: {error}") from None
    if not spec.cached:
        raise Refused(Code.NOSYS, f"{files.path}: {arch} has no keys and values, which memory is counted in here")
    taken = EngineConfig(model=files.path, backend=kept, weight_format=footprint.STORED)
    return Found(
        key,
        files.path,
        _weight_bytes(files, footprint.weight_bytes(taken, kept, spec, lambda name: ""), kept),
        footprint.kv_token_bytes(taken, kept, spec),
        footprint.process_bytes(kept, spec.vocab_size) + NUM_STATES * footprint.state_bytes(spec),
        spec.max_seq_len,
    )


def _weight_bytes(files: ModelFiles, unquantised: int, backend: str) -> int:
    """Bytes of weights in the CPU kernels: 8 bits a weight, `unquantised`, or fewer where the file's own form is
    kept.
    """
    kept = max(int(_KEPT * _num_bytes(files)), int(_LEAST * unquantised))
    return min(unquantised, kept) if backend == "cpu" else unquantised


def _num_bytes(files: ModelFiles) -> int:
    """Total size of the files with weights."""
    return sum(os.fstat(fd).st_size for name, fd in files.fds.items() if not name.endswith((".json", ".jinja")))


def _configuration(files: ModelFiles) -> tuple[str | None, Mapping[str, Any]]:
    """Architecture (None where the files name none) and configuration. Raises ModelError, Refused."""
    name: str | None = ""
    if "" not in files.fds and not any(name.endswith(".safetensors") for name in files.fds):
        name = only_model({name: _path_of(fd) for name, fd in files.fds.items()}, files.path)
    if name is None:
        raise Refused(Code.INVAL, f"{files.path} holds no .safetensors or .gguf file")
    if name in files.fds:
        return read_shape(_path_of(files.fds[name]))
    if "config.json" not in files.fds:
        raise Refused(Code.INVAL, f"{files.path} is not a model folder: it has no config.json")
    config = read_object(_path_of(files.fds["config.json"]), MAX_CONFIG_BYTES)
    try:
        scheme_of(config, "config.json")
    except ModelError as error:
        raise Refused(Code.NOSYS, f"{files.path}: {error}") from None
    names = config.get("architectures") or config.get("model_type")
    arch = names[0] if isinstance(names, list) and names else names
    return None if arch is None else str(arch), config


def _with_names(text: str, files: ModelFiles) -> str:
    """`text` with descriptors' paths replaced by names that the app knows."""
    for name, fd in sorted(files.fds.items(), key=lambda item: -item[1]):  # replace 12 before 1
        text = text.replace(str(_path_of(fd)), os.path.join(files.path, name) if name else files.path)
    return text


def _path_of(fd: int) -> Path:
    return Path(f"/proc/self/fd/{fd}")


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def code_of_errno(number: int) -> Code:
    """The error code of Create when the path could not be opened with this errno."""
    return Code.NOPERM if number in (errno.EACCES, errno.EPERM) else Code.INVAL
