"""LoRA adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them: general.type is `adapter`.

A pair is NAME.lora_a [rank, in] and NAME.lora_b [out, rank], NAME that of the linear in files of models. The scale is
adapter.lora.alpha over the rank, and 1 where alpha is 0.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvloom.checkpoints.families import family_of
from kvloom.checkpoints.families.known.qwen_hybrid import tiled
from kvloom.checkpoints.files import open_file
from kvloom.checkpoints.gguf import KINDS, LAYER_NAMES
from kvloom.checkpoints.gguf_parts import tensor_bytes
from kvloom.checkpoints.gguf_types import GGUF_TYPES
from kvloom.checkpoints.lora import FIELD, MAX_RANK, PARTS, AdapterFile, LoraModule, linear_of, read_adapter
from kvloom.checkpoints.metadata import Header, TensorInfo, read_header
from kvloom.checkpoints.tensorfile import Entry
from kvloom.contract.errors import BadRequest, ModelError

SUFFIX = ".gguf"
_KNOWN = [parts for parts in PARTS.values() if parts[-1] in LAYER_NAMES]
_PARTS = {LAYER_NAMES[parts[-1]].removesuffix(".weight"): parts for parts in reversed(_KNOWN)}  # the first counts
_PARTS |= {"shortconv.out_proj": ("out",), "ffn_up": ("up",)}
_TENSOR = re.compile(r"blk\.([0-9]{1,5})\.([\w.]+)\.weight\.lora_([ab])")
_MAX_BYTES = 16 << 30


def open_adapter(path: Path, shapes: Mapping[str, tuple[int, ...]] | None) -> AdapterFile:
    """The adapter at `path`: a folder as peft saves it, a GGUF file, or a folder that holds one such file; see
    read_adapter. Raises BadRequest naming FIELD.
    """
    if path.suffix == SUFFIX and not path.is_dir():
        return read_gguf_adapter(path, shapes)
    files = [] if any(path.glob("adapter_*")) else sorted(path.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:3])
        raise BadRequest(FIELD, f"holds {len(files)} {SUFFIX} files ({names}); name one of them")
    return read_gguf_adapter(files[0], shapes) if files else read_adapter(path, shapes)


def read_gguf_adapter(path: Path, shapes: Mapping[str, tuple[int, ...]] | None) -> AdapterFile:
    """Raises BadRequest naming FIELD: what is missing, misshapen or of a kind that is not supported."""
    try:
        header = read_header(path, has_texts=False)
        tensors = {name: _entry(info, path) for name, info in header.tensors.items()}
        family = family_of(_text(header.metadata, "general.architecture", ""), path.name)
    except ModelError as error:
        raise BadRequest(FIELD, str(error).replace(str(path), path.name)) from None
    metadata = header.metadata
    _text(metadata, "general.type", "adapter")
    _text(metadata, "adapter.type", "lora")
    alpha = metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, float) or not abs(alpha) < 1e9:
        raise BadRequest(FIELD, f"adapter.lora.alpha must be a number, got {alpha!r:.80}")
    invocation = metadata.get("adapter.alora.invocation_tokens") or []
    if not isinstance(invocation, list) or not all(type(token) is int and 0 <= token < 1 << 31 for token in invocation):
        raise BadRequest(FIELD, f"adapter.alora.invocation_tokens must be token ids, got {invocation!r:.80}")
    modules = _modules(header, shapes, alpha)
    data = _whole(path, max(tensor.end for tensor in tensors.values()))
    digest = hashlib.sha256(data).hexdigest()
    is_interleaved = family.interleaved or family.permuted_gguf
    return AdapterFile(digest, modules, tensors, data, tuple(invocation), is_interleaved, family.recurrent is tiled)


def _text(metadata: Mapping[str, Any], key: str, wanted: str) -> str:
    """The text of a key, `wanted` if that is not empty. Raises BadRequest."""
    found = metadata.get(key)
    if not isinstance(found, str) or (wanted and found != wanted):
        raise BadRequest(FIELD, f"{key} must be {wanted or 'a name'!r}, got {found!r:.80}")
    return found


def _entry(info: TensorInfo, path: Path) -> Entry:
    """Raises ModelError for types that are not known."""
    size = tensor_bytes(info, path)
    kind = GGUF_TYPES[info.type].name
    if kind.lower() not in KINDS:
        raise ModelError(f"{path}: tensor {info.name:.200} is {kind}; known are {', '.join(KINDS).upper()}")
    return Entry(kind, info.shape, info.offset, info.offset + size)


def _modules(header: Header, shapes: Mapping[str, tuple[int, ...]] | None, alpha: float) -> dict[str, LoraModule]:
    pairs: dict[str, dict[str, TensorInfo]] = {}  # canonical name: "a" or "b" -> tensor
    for key, info in header.tensors.items():
        found = _TENSOR.fullmatch(key)
        if found is None or found[2] not in _PARTS:
            raise BadRequest(FIELD, f"{key[:200]} is none of lora_a, lora_b of {', '.join(_PARTS)}")
        pairs.setdefault(linear_of(int(found[1]), _PARTS[found[2]], shapes), {})[found[3]] = info
    if not pairs:
        raise BadRequest(FIELD, "the file holds no tensor")
    modules = {}
    for name, sides in pairs.items():
        if len(sides) < 2:
            key = next(iter(sides.values())).name
            raise BadRequest(FIELD, f"{key} has no partner: lora_a and lora_b come together")
        a, b = sides["a"], sides["b"]
        rank = a.shape[0]
        if shapes is not None and name not in shapes:
            raise BadRequest(FIELD, f"{a.name} is of a layer that the base model does not have")
        wanted = (b.shape[0], a.shape[-1]) if shapes is None else shapes[name]
        for info, shape in ((a, (rank, wanted[1])), (b, (wanted[0], rank))):
            if info.shape != shape or not 1 <= rank <= MAX_RANK:
                problem = f"has shape {list(info.shape)}; the base model asks for {list(shape)}"
                raise BadRequest(FIELD, f"{info.name} {problem} with a rank of 1 to {MAX_RANK}")
        scale = alpha / rank if alpha else 1.0
        modules[name] = LoraModule(a.name, b.name, rank, scale, a.shape[1], b.shape[0])
    return modules


def _whole(path: Path, num_bytes: int) -> bytes:
    try:
        with open_file(path) as file:
            data = file.read(min(num_bytes, _MAX_BYTES))
    except (OSError, ModelError) as error:
        raise BadRequest(FIELD, f"{path.name} cannot be read: {error}") from None
    if len(data) != num_bytes:
        raise BadRequest(FIELD, f"{path.name} is cut short: {len(data)} bytes of {num_bytes}")
    return data
