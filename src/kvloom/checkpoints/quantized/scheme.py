"""How a folder's matrices are packed, from its `quantization_config`. Unknown options are refused by name.

Which fields change nothing is as of compressed-tensors 0.20.0, transformers 5.24, AutoRound 0.16.1.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kvloom.checkpoints.quantized.bitsandbytes import bitsandbytes_scheme
from kvloom.checkpoints.quantized.layout import Scheme
from kvloom.checkpoints.quantized.rotations import Rotation
from kvloom.checkpoints.quantized.settings import LARGEST, Settings
from kvloom.checkpoints.quantized.torchao import torchao_scheme
from kvloom.contract.errors import ModelError

_METHODS = ("awq", "gptq", "auto-round", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4", "torchao", "bitsandbytes")
_COMPRESSED = {"pack-quantized": "packed", "int-quantized": "bytes", "naive-quantized": "bytes"}
_COMPRESSED |= {"float-quantized": "fp8", "mxfp8-quantized": "fp8", "mxfp4-pack-quantized": "mxfp4"}
_COMPRESSED |= {"nvfp4-pack-quantized": "nvfp4"}
_MIXED = "mixed-precision"  # each group has a format of its own
_DENSE = "dense"  # weights are not quantised
_GPTQ_FORMATS, _GPTQ_BITS = ("gptq", "gptq_v2"), (2, 3, 4, 8)
_FP8_OF_GPTQMODEL: dict[str, tuple[object, ...]]
_FP8_OF_GPTQMODEL = {"pack_dtype": ("int32",), "method": ("fp8",), "bits": (8,), "group_size": (-1,)}
_AWQ_FORMATS = ("gemm", "GEMM", "gemv", "GEMV")
_OF_GPTQMODEL: dict[str, tuple[object, ...]] = {"pack_dtype": ("int32",), "method": ("gptq", "awq")}
_OWN_SETTINGS = "has settings of its own, which is not supported; all matrices that are quantised must have the same"
# which matrices are quantised (their tensors tell it, too), how activations and the cache may be, and notes
_NOTES = (
    *(
        "quant_method",
        "provider",
        "backend",
        "modules_to_not_convert",
        "modules_to_convert",
        "ignored_layers",
        "ignore",
    ),
    *("lm_head", "dequantize", "activation_scheme", "kv_cache_scheme", "tokenizer", "dataset", "meta", "sym"),
    *("desc_act", "batch_size", "block_name_to_quantize", "modules_in_block_to_quantize", "model_seqlen", "data_type"),
    *("act_bits", "act_data_type", "act_group_size", "act_sym", "act_dynamic", "attention_input_activations"),
)
_OF_MAKERS = (  # settings of the search for the numbers, and of kernels
    *(
        "damp_percent",
        "damp_auto_increment",
        "act_group_aware",
        "true_sequential",
        "static_groups",
        "mse",
        "pad_token_id",
    ),
    *("max_input_length", "cache_block_outputs", "module_name_preceding_first_block", "use_exllama", "exllama_config"),
    *("disable_exllama", "use_cuda_fp16", "do_fuse", "modules_to_fuse", "fuse_max_seq_len", "model_name_or_path"),
    *("model_file_base_name", "amp", "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input"),
    *("gradient_accumulate_steps", "iters", "lr", "low_gpu_mem_usage", "minmax_lr", "nsamples", "scale_dtype"),
    *("seqlen", "supported_types", "quant_block_list", "to_quant_block_names", "autoround_version"),
    *("static_kv_dtype", "static_kv_granularity", "static_attention_dtype", "static_attention_granularity"),
)
_ARGS = (  # of weights and activations of compressed-tensors
    *("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder"),
    *("scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
)


def scheme_of(config: Mapping[str, Any], file: str) -> Scheme | None:
    """The scheme; None when nothing is quantised. Raises ModelError that names the field."""
    key = "quantization_config" if config.get("quantization_config") else "compression_config"
    settings = config.get(key)
    if not settings:
        return None
    if not isinstance(settings, Mapping):
        raise ModelError(f"{file}: {key} must be an object, got {settings!r:.80}")
    method = settings.get("quant_method", "compressed-tensors" if "config_groups" in settings else None)
    fields = Settings(settings, f"{file}: {key}")
    readers: dict[str, Callable[[Settings], Scheme | None]]
    readers = {"awq": _awq, "gptq": _gptq, "auto-round": _auto_round, "fp8": _fp8, "mxfp4": _mxfp4}
    readers |= {"compressed-tensors": _compressed, "fbgemm_fp8": _fbgemm}
    readers |= {"torchao": torchao_scheme, "bitsandbytes": bitsandbytes_scheme}
    if isinstance(method, str) and method in readers:
        return readers[method](fields)
    raise ModelError(
        f"{file}: weights quantised by {method or 'an unnamed method'!r:.80} are not supported; {', '.join(_METHODS)} "
        "and GGUF files are, and weights that are not quantised"
    )


def _awq(fields: Settings) -> Scheme:
    fields.only_known(
        *(*_NOTES, *_OF_MAKERS, "version", "checkpoint_format", "format", "dynamic", "zero_point"),
        *("bits", "group_size"),
        **_OF_GPTQMODEL,
    )
    own = "gemm"
    for name in ("checkpoint_format", "format", "version"):
        own = fields.one_of(name, _AWQ_FORMATS, own)
    fields.one_of("zero_point", (True, False), True)  # the file has zeros in any case; without, all are 8
    layout = "awq_gemv" if own.lower() == "gemv" else "awq"
    whole = Scheme(layout, fields.one_of("bits", (4,), 4), fields.group("group_size", 128), has_zeros=True)
    return _with_rules(whole, fields.inner("dynamic"), (4,))


def _gptq(fields: Settings) -> Scheme:
    fields.only_known(
        *(*_NOTES, *_OF_MAKERS, "dynamic", "checkpoint_format", "format", "bits", "group_size"), **_OF_GPTQMODEL
    )
    version = fields.one_of("checkpoint_format", _GPTQ_FORMATS, fields.one_of("format", _GPTQ_FORMATS, "gptq"))
    shift = 1 if version == "gptq" else 0
    bits = fields.one_of("bits", _GPTQ_BITS, 4)
    whole = Scheme("gptq", bits, fields.group("group_size", 128), True, zero_shift=shift)
    return _with_rules(whole, fields.inner("dynamic"), _GPTQ_BITS)


def _with_rules(whole: Scheme, rules: Settings, bits: tuple[int, ...]) -> Scheme:
    """GPTQModel's `dynamic`: the first rule that matches a name from its beginning on holds. Which matrices are left
    out ("-:") their tensors tell.
    """
    found: list[tuple[str, Scheme]] = []
    last = 0
    for rule, settings in rules.items():
        own = whole
        if settings and not rule.startswith("-:"):
            own, last = _ruled(whole, rules.inner(rule), bits), len(found) + 1
        found.append((rule, own))
    targets = [(rules.target("re:" + rule.removeprefix("-:").removeprefix("+:")), own) for rule, own in found[:last]]
    return replace(whole, by_target=(*targets, ("Linear", whole))) if targets else whole


def _ruled(whole: Scheme, fields: Settings, bits: tuple[int, ...]) -> Scheme:
    fields.only_known(*_NOTES, *_OF_MAKERS, "bits", "group_size")
    group = fields.group("group_size", -1 if whole.group is None else whole.group)
    return replace(whole, bits=fields.one_of("bits", bits, whole.bits), group=group)


def _auto_round(fields: Settings) -> Scheme:
    """Of AutoRound's own format those that have the tensors of AWQ or GPTQ."""
    reader = {"auto_round:auto_gptq": _gptq, "auto_round:auto_awq": _awq}
    for module, settings in fields.inner("extra_config").items():
        if not isinstance(settings, Mapping) or settings.get("bits", 0) < 16:
            raise fields.refused("extra_config:", f"{module!r:.80} {_OWN_SETTINGS}")
    return reader[fields.one_of("packing_format", tuple(reader), None)](
        fields.without("packing_format", "extra_config")
    )


def _compressed(fields: Settings) -> Scheme | None:
    fields.only_known(
        *(*_NOTES, "version", "config_groups", "format", "quantization_status", "global_compression_ratio"),
        *("sparsity_config", "transform_config", "run_compressed", "use_optimized_inference"),
    )
    if fields.get("sparsity_config") and fields.inner("sparsity_config").get("format") not in (None, "dense"):
        fields.inner("sparsity_config").one_of("format", ("dense",), "dense")
    rotations = tuple(_rotations(fields.inner("transform_config")))
    if fields.get("format") == _DENSE and not fields.get("config_groups"):
        return None  # the cache alone is quantised
    format = fields.one_of("format", (*_COMPRESSED, _MIXED), None)
    found = []
    for group in fields.each("config_groups"):
        group.only_known("targets", "weights", "input_activations", "output_activations", "format")
        if group.get("weights"):
            own = group.one_of("format", tuple(_COMPRESSED), None if format == _MIXED else format)
            found.append((group, replace(_compressed_group(group, _COMPRESSED[own]), rotations=rotations)))
    if not found:
        raise fields.refused("config_groups", "has no group with weights")
    first = found[0][1]
    return first if all(scheme == first for _, scheme in found) else replace(first, by_target=_by_target(found))


def _by_target(groups: Iterable[tuple[Settings, Scheme]]) -> tuple[tuple[str, Scheme], ...]:
    """In compressed-tensors' order: names, expressions, all linears; of equal targets the last group's."""
    found = {target: scheme for group, scheme in groups for target in group.targets("targets")}
    order = sorted(found, key=lambda target: (target == "Linear", target.startswith("re:"), target))
    return tuple((target, found[target]) for target in order)


def _rotations(config: Settings) -> Iterator[Rotation]:
    """Rotations of inputs; those that the weights were stored with leave nothing to do."""
    config.only_known("config_groups")
    for group in config.each("config_groups"):
        group.only_known("type", "apply", "randomize", "requires_grad", "head_dim", "precision")
        for use in group.listed("apply"):
            use.only_known("targets", "location", "inverse", "ignore")
            if use.one_of("location", ("weight_input", "weight_output", "input"), None) == "input":
                group.one_of("type", ("hadamard",), None)
                group.one_of("randomize", (False,), False)
                size = group.group("head_dim", -1)
                yield Rotation(group.name, use.targets("targets"), use.targets("ignore"), size)


def _compressed_group(group: Settings, layout: str) -> Scheme:
    weights, activations = group.inner("weights"), group.inner("input_activations")
    for args in (weights, activations, group.inner("output_activations")):
        args.only_known(*_ARGS)
    weights.one_of("dynamic", (False,), False)
    kind = weights.one_of("type", ("int", "float"), "int")
    if layout == "mxfp4":
        weights.one_of("group_size", (32,), None)
        return Scheme("mxfp4", 4, 32)
    if layout == "nvfp4":
        weights.one_of("group_size", (16,), None)
        return Scheme("nvfp4", 4, 16)
    if kind == "float" or layout == "fp8":
        return _compressed_fp8(weights, kind)
    bits = weights.one_of("num_bits", (4, 8), 8)
    bits = bits if layout == "packed" else 8  # numbers of 4 bits have a byte each, too
    strategy = weights.one_of("strategy", ("group", "channel", "tensor"), "channel")
    run = weights.group("group_size", 128) if strategy == "group" else None
    has_zeros = not weights.one_of("symmetric", (True, False), True)
    is_whole = bits == 8 and run is None and not has_zeros
    return Scheme(layout, bits, run, has_zeros, per_token=is_whole and _is_per_token(activations))


def _compressed_fp8(weights: Settings, kind: str) -> Scheme:
    weights.one_of("type", ("float",), kind)
    weights.one_of("num_bits", (8,), 8)
    strategy = weights.one_of("strategy", ("tensor", "channel", "block", "group"), "tensor")
    if strategy == "block":
        return Scheme("fp8", 8, None, blocks=_block(weights, "block_structure"))
    if strategy == "group":
        group = weights.group("group_size", 128)
        return Scheme("fp8", 8, None, blocks=None if group is None else (1, group))
    return Scheme("fp8", 8, None)


def _is_per_token(activations: Settings) -> bool:
    """Whether activations are symmetric 8-bit integers with dynamic scales. Absent fields have compressed-tensors'
    defaults.
    """
    wanted = {"num_bits": (8, 8), "type": ("int", "int"), "symmetric": (True, True)}
    wanted |= {"strategy": ("token", None), "dynamic": (True, False)}
    return all(activations.get(name, absent) == value for name, (value, absent) in wanted.items())


def _fp8(fields: Settings) -> Scheme:
    fields.only_known(
        *(*_NOTES, *_OF_MAKERS, "fmt", "format", "checkpoint_format", "weight_block_size", "weight_scale_method"),
        *("scale_fmt", "weight_scale_semantics"),
        expert_dtype=("fp8",),
        **_FP8_OF_GPTQMODEL,
    )
    fields.one_of("fmt", ("e4m3",), "e4m3")
    for name in ("format", "checkpoint_format"):
        fields.one_of(name, ("float8_e4m3fn",), "float8_e4m3fn")
    fields.one_of("weight_scale_semantics", ("inverse",), "inverse")
    divides = fields.get("weight_scale_semantics") is not None  # only GPTQModel's folders have it
    blocks = _block(fields, "weight_block_size") if fields.get("weight_block_size") else None
    return Scheme("fp8", 8, None, blocks=blocks, divides=divides)


def _fbgemm(fields: Settings) -> Scheme:
    fields.only_known(*_NOTES, "activation_scale_ub")
    return Scheme("fp8", 8, None)


def _mxfp4(fields: Settings) -> Scheme:
    fields.only_known(*_NOTES)
    return Scheme("mxfp4_experts", 4, 32)


def _block(fields: Settings, name: str) -> tuple[int, int]:
    value = fields.get(name)
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(size) is int and 0 < size <= LARGEST for size in value)
    ):
        raise ModelError(f"{fields.where}: {name} must be two sizes, got {value!r:.80}")
    return value[0], value[1]
