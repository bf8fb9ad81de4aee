"""LoRA adapters as peft saves them (Hu et al. 2021): adapter_config.json and adapter_model.safetensors.

An adapter adds scale * B (A x) to chosen linears: A [rank, in], B [out, rank].
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvloom.checkpoints.fields import unknown_field
from kvloom.checkpoints.tensorfile import FLOATS, LENGTH_BYTES, Damaged, Entry, header_bytes, read_entries
from kvloom.contract.errors import BadRequest
from kvloom.reading import open_file

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
FIELD = "lora_path"  # the caller's field, which errors name
MAX_RANK = 512
_MAX_CONFIG_BYTES, _MAX_HEADER_BYTES = 1 << 20, 16 << 20
_GATED_Q = ("q_gated", "q")
PARTS: Mapping[str, tuple[str, ...]] = {  # the linears of a layer, by the names of checkpoints; the first that it has
    "self_attn.q_proj": _GATED_Q,
    "self_attn.k_proj": ("k",),
    "self_attn.v_proj": ("v",),
    "self_attn.o_proj": ("o",),
    "self_attn.q_a_proj": ("q_down",),
    "self_attn.q_b_proj": ("q_up",),
    "self_attn.kv_a_proj_with_mqa": ("kv_down",),
    "mlp.gate_proj": ("gate",),
    "mlp.up_proj": ("up",),
    "mlp.down_proj": ("down",),
    # Qwen3.5 and Qwen3-Next
    "linear_attn.in_proj_qkv": ("conv_in",),
    "linear_attn.in_proj_z": ("gate_in",),
    "linear_attn.in_proj_b": ("beta_in",),
    "linear_attn.in_proj_a": ("decay_in",),
    "linear_attn.in_proj_qkvz": ("qkvz",),
    "linear_attn.in_proj_ba": ("ba",),
    "linear_attn.out_proj": ("out",),
    # Kimi-Linear; in transformers the gate of decays is a module of its own
    "self_attn.b_proj": ("beta_in",),
    "self_attn.f_a_proj": ("decay_down",),
    "self_attn.f_b_proj": ("decay_up",),
    "self_attn.forget_gate.f_a_proj": ("decay_down",),
    "self_attn.forget_gate.f_b_proj": ("decay_up",),
    "self_attn.g_a_proj": ("out_gate_down",),
    "self_attn.g_b_proj": ("out_gate_up",),
    # LFM2
    "conv.in_proj": ("short_in",),
    "conv.out_proj": ("out",),
    "self_attn.out_proj": ("o",),
    "feed_forward.w1": ("gate",),
    "feed_forward.w3": ("up",),
    "feed_forward.w2": ("down",),
    # Granite 4
    "mamba.in_proj": ("mamba_in",),
    "mamba.out_proj": ("out",),
    "shared_mlp.input_linear": ("gate_up",),
    "shared_mlp.output_linear": ("down",),
    # Nemotron-H and Mamba-2
    "mixer.in_proj": ("mamba_in",),
    "mixer.out_proj": ("out",),
    **{f"mixer.{part}_proj": (part,) for part in "qkvo"},
    "mixer.up_proj": ("up",),
    "mixer.down_proj": ("down",),
}
_TARGETS = tuple(dict.fromkeys(name.rsplit(".", 1)[1] for name in PARTS))
_TEXT_PARTS = ("model.language_model.", "language_model.model.")  # of models that see, as of their old releases
_TENSOR = re.compile(
    rf"base_model\.model\.((model\.|backbone\.|{'|'.join(map(re.escape, _TEXT_PARTS))})layers\.([0-9]+)"
    r"\.(\w+(?:\.\w+)+))\.lora_([AB])\.weight"
)
_OF_PICTURES = re.compile(r"base_model\.model\.(model\.)?(vision_tower|multi_modal_projector)\..*")
_READ = (
    "peft_type",
    "alora_invocation_tokens",
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "target_modules",
)
_INERT = (  # notes, settings of the training, and what the names and shapes of tensors tell as well; peft 0.21.2
    *("auto_mapping", "base_model_name_or_path", "peft_version", "revision", "task_type", "inference_mode"),
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config", "lora_dropout", "megatron_core"),
    *("exclude_modules", "layers_pattern", "layers_to_transform", "ensure_weight_tying", "runtime_config"),
    "qalora_group_size",  # of use_qalora
)
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica"),
}
_CHOICE, _REPEATED_GROUP = re.compile(r"[(*+{]"), re.compile(r"\)[*+{]")
_MAX_PATTERNS, _MAX_CHOICES, _MAX_CHOICES_EACH = 1 << 13, 64, 3
_MOVES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that change the base weights too


@dataclass(frozen=True, slots=True)
class LoraModule:
    """The pair of tensors of one linear, by their names in the file; in, out, rank as in the module's docstring."""

    a: str
    b: str
    rank: int
    scale: float
    in_size: int
    out_size: int


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter read whole. `digest` (hex SHA-256 of both files) is its identity, whatever its name."""

    digest: str
    modules: Mapping[str, LoraModule] = field(repr=False)  # by canonical name: "layers.0.q"
    tensors: Mapping[str, Entry] = field(repr=False)  # by their names in the file
    data: bytes = field(repr=False)  # of the file of tensors
    invocation: tuple[int, ...] = ()  # acts from the last such tokens of a prompt on (Activated LoRA); () = on all
    is_interleaved: bool | None = None  # rotary partners of q and k are side by side; None = as in the family's folders
    is_tiled: bool = False  # order of value heads, see DeltaRule

    @property
    def rank(self) -> int:
        return max(module.rank for module in self.modules.values())


def read_adapter(folder: Path, shapes: Mapping[str, tuple[int, ...]] | None) -> AdapterFile:
    """The adapter in `folder`, for a model whose linears have `shapes` by name, see lora_shapes (None = any).

    Raises BadRequest naming FIELD: what is missing, misshapen or of a kind that is not supported.
    """
    text = _read(folder / CONFIG_FILE, _MAX_CONFIG_BYTES)
    config = _Config(_json_object(text, CONFIG_FILE))
    path = folder / WEIGHTS_FILE
    header, tensors = _header(path)
    modules = _modules(config, tensors, shapes)
    num_bytes = max(tensor.end for tensor in tensors.values())
    data = _read(path, num_bytes)
    if len(data) != num_bytes:
        raise BadRequest(FIELD, f"{WEIGHTS_FILE} is cut short: {len(data)} bytes of {num_bytes}")
    if not data.startswith(header):
        raise BadRequest(FIELD, f"{WEIGHTS_FILE} has changed while it was read")
    digest = hashlib.sha256(hashlib.sha256(text).digest() + hashlib.sha256(data).digest()).hexdigest()
    return AdapterFile(digest, modules, tensors, data, config.invocation)


def read_digest(folder: Path) -> tuple[str, int]:
    """AdapterFile.digest, and the size of the weights, of an adapter that another engine reads. Raises BadRequest."""
    text = _read(folder / CONFIG_FILE, _MAX_CONFIG_BYTES)
    path = folder / WEIGHTS_FILE
    _, tensors = _header(path)
    data = _read(path, max(tensor.end for tensor in tensors.values()))
    digest = hashlib.sha256(hashlib.sha256(text).digest() + hashlib.sha256(data).digest()).hexdigest()
    return digest, len(data)


class _Config:
    """Contents of adapter_config.json. Raises BadRequest for options that would be computed unlike in training."""

    def __init__(self, config: dict[str, Any]) -> None:
        kind = config.get("peft_type")
        if kind != "LORA":
            raise _bad(f'peft_type must be "LORA", got {kind!r:.80}')
        start = config.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_MOVES_BASE):
            raise _bad(
                f"init_lora_weights {start!r:.80} changes the base model; save the adapter converted to plain LoRA"
            )
        key = unknown_field(config, (*_READ, *_INERT), _PLAIN)
        if key is not None:
            raise _bad(f"{key[:80]} is not supported, got {config[key]!r:.80}")
        self.invocation = _tokens(config.get("alora_invocation_tokens"))
        if self.invocation and config.get("task_type", "CAUSAL_LM") != "CAUSAL_LM":
            raise _bad(f'task_type must be "CAUSAL_LM" with alora_invocation_tokens, got {config["task_type"]!r:.80}')
        self._rank = _rank(config.get("r"), "r")
        self._alpha = _number(config.get("lora_alpha", 8), "lora_alpha")
        self._ranks, self._alphas = (_pattern(config, key) for key in ("rank_pattern", "alpha_pattern"))
        self._uses_rslora = config.get("use_rslora") or False
        if not isinstance(self._uses_rslora, bool):
            raise _bad(f"use_rslora must be true or false, got {self._uses_rslora!r:.80}")
        targets = config.get("target_modules")
        self._targets = targets if isinstance(targets, list) else []

    def check_targets(self) -> None:
        """Raises BadRequest for a target that is none of the text layers' linears."""
        for target in self._targets:
            if not isinstance(target, str) or target.rsplit(".", 1)[-1] not in _TARGETS:
                raise _bad(f"target_modules {target!r:.80} is not supported; supported are {', '.join(_TARGETS)}")

    def rank(self, module: str) -> int:
        return _rank(_matching(self._ranks, module, self._rank), "rank_pattern")

    def scale(self, module: str) -> float:
        alpha, rank = _number(_matching(self._alphas, module, self._alpha), "alpha_pattern"), self.rank(module)
        return alpha / math.sqrt(rank) if self._uses_rslora else alpha / rank


def _modules(
    config: _Config, tensors: Mapping[str, Entry], shapes: Mapping[str, tuple[int, ...]] | None
) -> dict[str, LoraModule]:
    pairs: dict[tuple[str, str], dict[str, str]] = {}  # canonical name, name in the checkpoint: "A" or "B" -> tensor
    matches = {key: _TENSOR.fullmatch(key) for key in tensors}
    sees = any(found is not None and found[2] in _TEXT_PARTS for found in matches.values())
    if not sees:
        config.check_targets()
    for key, found in matches.items():
        if sees and _OF_PICTURES.fullmatch(key):
            continue  # the text part of such models is served
        if found is None or found[4] not in PARTS:
            raise _bad_tensor(key, "is none of lora_A, lora_B of " + ", ".join(_TARGETS))
        pairs.setdefault((linear_of(int(found[3]), PARTS[found[4]], shapes), found[1]), {})[found[5]] = key
    if not pairs:
        raise BadRequest(FIELD, f"{WEIGHTS_FILE} holds no tensor")
    modules = {}
    for (name, module), sides in pairs.items():
        if name in modules:
            raise _bad_tensor(next(iter(sides.values())), "is of a linear that another tensor names otherwise")
        if len(sides) < 2:
            raise _bad_tensor(next(iter(sides.values())), "has no partner: lora_A and lora_B come together")
        if shapes is not None and name not in shapes:
            raise _bad_tensor(sides["A"], "is of a layer that the base model does not have")
        rank = config.rank(module)
        (a_rank, in_size), (out_size, b_rank) = (_shape(sides[side], tensors) for side in "AB")
        want_out, want_in = shapes[name] if shapes is not None else (out_size, in_size)
        for key, got, want in (
            (sides["A"], (a_rank, in_size), (rank, want_in)),
            (sides["B"], (out_size, b_rank), (want_out, rank)),
        ):
            if got != want:
                raise _bad_tensor(key, f"has shape {list(got)}; rank and base model ask for {list(want)}")
        modules[name] = LoraModule(sides["A"], sides["B"], rank, config.scale(module), in_size, out_size)
    return modules


def linear_of(layer: int, parts: Sequence[str], shapes: Mapping[str, tuple[int, ...]] | None) -> str:
    """The first of a layer's `parts` that are among `shapes`, by its whole name; else the last."""
    names = [f"layers.{layer}.{part}" for part in parts]
    return next((name for name in names if shapes is not None and name in shapes), names[-1])


def _shape(key: str, tensors: Mapping[str, Entry]) -> tuple[int, int]:
    """The shape of a tensor, which must have two dimensions and a floating type."""
    kind, shape = tensors[key].kind, tensors[key].shape
    if kind not in FLOATS:
        raise _bad_tensor(key, f"has type {kind}; supported are {', '.join(FLOATS)}")
    if len(shape) != 2 or not all(shape):
        raise _bad_tensor(key, f"has shape {list(shape)}, not two dimensions")
    return shape[0], shape[1]


def _header(path: Path) -> tuple[bytes, dict[str, Entry]]:
    """The file's header, and the tensors by name."""
    try:
        with open_file(path) as file:
            beginning = file.read(LENGTH_BYTES)
            size = header_bytes(beginning)
            if size > _MAX_HEADER_BYTES:
                raise Damaged("the header is too long")
            header = beginning + file.read(size - LENGTH_BYTES)
        return header, read_entries(header)
    except OSError as error:
        raise BadRequest(FIELD, f"{path.name} cannot be read: {error.strerror}") from None
    except Damaged as error:
        if error.tensor:
            raise _bad_tensor(error.tensor, str(error)) from None
        raise BadRequest(FIELD, f"{path.name} is damaged: {error}") from None


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        with open_file(path) as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise BadRequest(FIELD, f"{path.name} cannot be read: {error.strerror}") from None
    if len(data) > max_bytes:
        raise BadRequest(FIELD, f"{path.name} is larger than the {max_bytes} bytes that it may have")
    return data


def _json_object(text: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise BadRequest(FIELD, f"{name} is damaged: no valid JSON") from None
    if not isinstance(value, dict):
        raise BadRequest(FIELD, f"{name} holds no JSON object")
    return value


def _rank(value: Any, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
        raise _bad(f"{key} must be a whole number from 1 to {MAX_RANK}, got {value!r:.80}")
    return value


def _tokens(value: Any) -> tuple[int, ...]:
    tokens = [] if value is None else value
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 1 << 31 for token in tokens):
        raise _bad(f"alora_invocation_tokens must be a list of token ids, got {value!r:.80}")
    return tuple(tokens)


def _number(value: Any, key: str) -> float:
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:  # JSON's whole numbers have any length
        number = math.inf
    if not math.isfinite(number):
        raise _bad(f"{key} must be a number, got {value!r:.80}")
    return number


def _pattern(config: Mapping[str, Any], key: str) -> dict[re.Pattern[str], Any]:
    """Regular expressions of the ends of module names -> values. Matching holds up a model's process, so what could
    take long is refused: a repeated group, and many choices (groups, repetitions), whose ways multiply.
    """
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise _bad(f"{key} must be an object, got {value!r:.80}")
    if len(value) > _MAX_PATTERNS:
        raise _bad(f"{key} has {len(value)} patterns, more than {_MAX_PATTERNS}")
    found, num_choices = {}, 0
    for pattern, own in value.items():
        try:
            found[re.compile(rf"(.*\.)?({pattern})")] = own
        except (re.error, OverflowError, RecursionError) as error:
            raise _bad(f"{key} has {pattern[:80]!r}, which is no regular expression: {error}") from None
        num_choices += (choices := len(_CHOICE.findall(pattern)))
        if choices > _MAX_CHOICES_EACH or _REPEATED_GROUP.search(pattern):
            each = f"a repeated group, or more than {_MAX_CHOICES_EACH} groups and repetitions"
            raise _bad(f"{key} has {pattern[:80]!r}, with {each}, which could take for ever")
    if num_choices > _MAX_CHOICES:
        raise _bad(f"{key} has {num_choices} groups and repetitions, more than {_MAX_CHOICES}")
    return found


def _matching(patterns: Mapping[re.Pattern[str], Any], module: str, default: Any) -> Any:
    """The value of the first pattern that fits the end of the module's name."""
    for pattern, value in patterns.items():
        if pattern.fullmatch(module):
            return value
    return default


def _bad(problem: str) -> BadRequest:
    return BadRequest(FIELD, f"{CONFIG_FILE}: {problem}")


def _bad_tensor(key: str, problem: str) -> BadRequest:
    return BadRequest(FIELD, f"{WEIGHTS_FILE}: {key[:200]} {problem}")
