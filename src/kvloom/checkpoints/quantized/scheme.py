"""How a folder's matrices are packed, from its `quantization_config`. Unknown options are refused by name."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvloom.contract.errors import ModelError

_METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "mxfp4")
_GROUP = 32  # numbers that share a scale in memory: a file's groups are multiples of it
_LARGEST = 1 << 20
_COMPRESSED = {"pack-quantized": "packed", "int-quantized": "bytes", "naive-quantized": "bytes"}
_COMPRESSED |= {"float-quantized": "fp8", "mxfp4-pack-quantized": "mxfp4"}


@dataclass(frozen=True, slots=True)
class Scheme:
    """The layout of numbers in a folder's tensors (packed.py): weight = (number - zero) * scale.

    `layout`: "awq", "gptq", "packed" (compressed-tensors, several in a word), "bytes" (its int8), "fp8", "mxfp4",
    "mxfp4_experts" (gpt-oss's).
    """

    layout: str
    bits: int
    group: int | None  # weights of a row that share a scale; None = all
    has_zeros: bool = False  # the file has a zero for each group; otherwise the zero is the middle
    zero_shift: int = 0  # must be added to the file's zeros
    blocks: tuple[int, int] | None = None  # of fp8: [out, in] weights that share a scale
    per_token: bool = False  # activations are meant to have 8 bits, and one scale a token


def scheme_of(config: Mapping[str, Any], file: str) -> Scheme | None:
    """The scheme; None when nothing is quantised. Raises ModelError that names the field."""
    key = "quantization_config" if config.get("quantization_config") else "compression_config"
    settings = config.get(key)
    if not settings:
        return None
    if not isinstance(settings, Mapping):
        raise ModelError(f"{file}: {key} must be an object, got {settings!r:.80}")
    method = settings.get("quant_method", "compressed-tensors" if "config_groups" in settings else None)
    fields = _Fields(settings, f"{file}: {key}")
    if method == "awq":
        return _awq(fields)
    if method == "gptq":
        return _gptq(fields)
    if method == "compressed-tensors":
        return _compressed(fields)
    if method == "fp8":
        return _fp8(fields)
    if method == "mxfp4":
        return Scheme("mxfp4_experts", 4, 32)
    raise ModelError(
        f"{file}: weights quantised by {method or 'an unnamed method'!r:.80} are not supported; {', '.join(_METHODS)} "
        "and GGUF files are, and weights that are not quantised"
    )


class _Fields:
    """A JSON object; `where` begins every message."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self._where = values, where

    def get(self, name: str, default: object = None) -> Any:
        return self._values.get(name, default)

    def one_of(self, name: str, known: tuple[object, ...], default: object) -> Any:
        value = self._values.get(name, default)
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in known):
            raise ModelError(
                f"{self._where}: {name} {value!r:.80} is not supported; known: {', '.join(map(repr, known))}"
            )
        return value

    def group(self, name: str, default: int) -> int | None:
        value = self._values.get(name, default)
        if value == -1:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _LARGEST or value % _GROUP:
            raise ModelError(f"{self._where}: {name} must be -1 or a multiple of {_GROUP}, got {value!r:.80}")
        return value

    def items(self) -> Iterable[tuple[str, Any]]:
        return self._values.items()

    def inner(self, name: str) -> "_Fields":
        value = self._values.get(name) or {}
        if not isinstance(value, Mapping):
            raise ModelError(f"{self._where}: {name} must be an object, got {value!r:.80}")
        return _Fields(value, f"{self._where}.{name}")

    def only(self, name: str) -> "_Fields":
        """The one object in an object of objects."""
        value = self.inner(name)._values
        if len(value) != 1:
            raise ModelError(f"{self._where}: {name} of {len(value)} groups is not supported; one is")
        return self.inner(name).inner(next(iter(value)))


def _awq(fields: _Fields) -> Scheme:
    fields.one_of("version", ("gemm", "GEMM"), "gemm")
    fields.one_of("zero_point", (True,), True)
    return Scheme("awq", fields.one_of("bits", (4,), 4), fields.group("group_size", 128), has_zeros=True)


def _gptq(fields: _Fields) -> Scheme:
    version = fields.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    bits = fields.one_of("bits", (4, 8), 4)
    for rule, settings in fields.inner("dynamic").items():
        if settings and not rule.startswith("-:"):  # "-:" leaves matrices as they are, which their tensors tell
            raise ModelError(
                f"{fields._where}: dynamic: {rule!r:.80} has settings of its own, which is not supported; all matrices "
                "that are quantised must have the same"
            )
    return Scheme("gptq", bits, fields.group("group_size", 128), True, zero_shift=1 if version == "gptq" else 0)


def _compressed(fields: _Fields) -> Scheme:
    if fields.get("sparsity_config") and fields.inner("sparsity_config").get("format") not in (None, "dense"):
        fields.inner("sparsity_config").one_of("format", ("dense",), "dense")
    layout = _COMPRESSED[fields.one_of("format", tuple(_COMPRESSED), None)]
    settings = fields.only("config_groups")
    weights = settings.inner("weights")
    kind = weights.one_of("type", ("int", "float"), "int")
    if layout == "mxfp4":
        weights.one_of("group_size", (32,), None)
        return Scheme("mxfp4", 4, 32)
    if kind == "float" or layout == "fp8":
        weights.one_of("type", ("float",), kind)
        weights.one_of("num_bits", (8,), 8)
        weights.one_of("strategy", ("tensor", "channel"), "tensor")
        return Scheme("fp8", 8, None)
    bits = weights.one_of("num_bits", (4, 8) if layout == "packed" else (8,), 8)
    strategy = weights.one_of("strategy", ("group", "channel", "tensor"), "channel")
    group = weights.group("group_size", 128) if strategy == "group" else None
    has_zeros = not weights.one_of("symmetric", (True, False), True)
    is_whole = bits == 8 and group is None and not has_zeros
    return Scheme(
        layout, bits, group, has_zeros, per_token=is_whole and _is_per_token(settings.inner("input_activations"))
    )


def _is_per_token(activations: _Fields) -> bool:
    """Whether activations are symmetric 8-bit integers with dynamic scales. Absent fields have compressed-tensors'
    defaults.
    """
    wanted = {"num_bits": (8, 8), "type": ("int", "int"), "symmetric": (True, True)}
    wanted |= {"strategy": ("token", None), "dynamic": (True, False)}
    return all(activations.get(name, absent) == value for name, (value, absent) in wanted.items())


def _fp8(fields: _Fields) -> Scheme:
    fields.one_of("fmt", ("e4m3",), "e4m3")
    return Scheme(
        "fp8", 8, None, blocks=_block(fields, "weight_block_size") if fields.get("weight_block_size") else None
    )


def _block(fields: _Fields, name: str) -> tuple[int, int]:
    value = fields.get(name)
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(size) is int and 0 < size <= _LARGEST for size in value)
    ):
        raise ModelError(f"{fields._where}: {name} must be two sizes, got {value!r:.80}")
    return value[0], value[1]
