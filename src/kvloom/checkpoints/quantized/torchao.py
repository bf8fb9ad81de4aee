"""torchao's folders, as transformers saves them: a matrix's tensors by its `quant_type`. As of torchao 0.18.

A configuration is an object of `_type`, `_version` and its fields in `_data`; enumerations and dtypes are such, too.
"""

from collections.abc import Callable

from kvloom.checkpoints.quantized.layout import Scheme
from kvloom.checkpoints.quantized.settings import Settings

_ENDS = (("weight", "._weight_qdata"), ("weight_scale", "._weight_scale"), ("weight_zero_point", "._weight_zero_point"))
PRE_SCALE = "._weight_act_pre_scale"  # what activations are multiplied by before the linear (its AWQ and SmoothQuant)
_BITS = ("int1", "int2", "int3", "int4", "int5", "int6", "int7", "int8")
_PLAIN = (  # about activations, kernels, and how the numbers were found
    *("set_inductor_config", "act_mapping_type", "reduce_range", "weight_only_decode", "activation_dtype", "mm_config"),
    *("activation_value_lb", "activation_value_ub", "kernel_preference", "mapping_type", "weight_mapping_type"),
    *("intx_choose_qparams_algorithm", "int4_choose_qparams_algorithm", "scale_dtype", "weight_scale_dtype"),
)


def torchao_scheme(fields: Settings) -> Scheme | None:
    """Raises ModelError that names the field."""
    fields.only_known(
        *("quant_method", "modules_to_not_convert", "include_input_output_embeddings", "untie_embedding_weights"),
        *("quant_type", "quant_type_kwargs"),
    )
    kind = fields.inner("quant_type").inner("default")
    if kind.get("_type") in ("FqnToConfig", "ModuleFqnToConfig"):
        return _by_name(kind.inner("_data"))
    return _scheme(kind)


def _by_name(data: Settings) -> Scheme | None:
    """Names hold before expressions, in their order, and these before "_default". null leaves a matrix as it is."""
    data.only_known("fqn_to_config", "module_fqn_to_config", "version")
    key = "fqn_to_config" if data.get("fqn_to_config") else "module_fqn_to_config"
    rules = data.inner(key)
    named, matched, other = [], [], []
    for rule, value in rules.items():
        if not value:
            continue
        target = "Linear" if rule == "_default" else rules.target(rule)
        target = target.removesuffix("$").removesuffix(".weight").removesuffix("\\")
        own = _scheme(rules.inner(rule))
        if rule == "_default":
            other.append((target, own))
        elif target.startswith("re:"):
            matched.append((f"{target}$", own))
        else:
            named.append((target, own))
    found = (*named, *matched, *other)
    return Scheme(found[0][1].layout, found[0][1].bits, None, by_target=found) if found else None


def _scheme(kind: Settings) -> Scheme:
    readers: dict[str, Callable[[Settings], Scheme]] = {
        "Int8WeightOnlyConfig": _int8,
        "Int8DynamicActivationInt8WeightConfig": _int8_per_token,
        "IntxWeightOnlyConfig": _intx,
        "Int8DynamicActivationIntxWeightConfig": _intx,
        "Int4WeightOnlyConfig": _int4,
        "Float8WeightOnlyConfig": _float8,
        "Float8DynamicActivationFloat8WeightConfig": _float8,
    }
    kind.only_known("_type", "_version", "_data")
    reader = readers[kind.one_of("_type", tuple(readers), None)]
    kind.one_of("_version", (2,), None)
    return reader(kind.inner("_data"))


def _int8(data: Settings) -> Scheme:
    data.only_known(*_PLAIN, "granularity", "group_size")
    return Scheme("bytes", 8, _group(data), has_zeros=True, ends=_ENDS)


def _int8_per_token(data: Settings) -> Scheme:
    scheme = _int8(data)
    is_symmetric = data.inner("act_mapping_type").get("_data", "SYMMETRIC") == "SYMMETRIC"
    return Scheme("bytes", 8, scheme.group, True, per_token=is_symmetric and scheme.group is None, ends=_ENDS)


def _intx(data: Settings) -> Scheme:
    data.only_known(*_PLAIN, "weight_dtype", "granularity", "weight_granularity", "intx_packing_format", "layout")
    data.inner("intx_packing_format").one_of("_data", ("UNPACKED_TO_INT8",), "UNPACKED_TO_INT8")
    bits = _BITS.index(data.inner("weight_dtype").one_of("_data", _BITS, "int8")) + 1
    name = "weight_granularity" if data.get("weight_granularity") else "granularity"
    return Scheme("bytes", 4 if bits <= 4 else 8, _group(data, name), has_zeros=True, ends=_ENDS)


def _int4(data: Settings) -> Scheme:
    data.only_known(*_PLAIN, "group_size", "int4_packing_format", "int4_tile_packed_ntile")
    data.inner("int4_packing_format").one_of("_data", ("PLAIN",), "PLAIN")
    return Scheme("pairs", 4, data.group("group_size", 128), has_zeros=True, ends=_ENDS)


def _float8(data: Settings) -> Scheme:
    data.only_known(*_PLAIN, "weight_dtype", "granularity", "packing_format", "version")
    data.inner("weight_dtype").one_of("_data", ("float8_e4m3fn",), "float8_e4m3fn")
    data.inner("packing_format").one_of("_data", ("PLAIN",), "PLAIN")
    granularity = data.get("granularity")
    kinds = data.listed("granularity") if isinstance(granularity, list) else (data.inner("granularity"),)
    for kind in kinds:  # of activations and weights
        kind.one_of("_type", ("PerRow", "PerTensor"), "PerTensor")
    return Scheme("fp8", 8, None, ends=_ENDS)


def _group(data: Settings, name: str = "granularity") -> int | None:
    granularity = data.inner(name)
    kind = granularity.one_of("_type", ("PerRow", "PerTensor", "PerAxis", "PerGroup"), "PerRow")
    if kind == "PerGroup":
        return granularity.inner("_data").group("group_size", 128)
    if kind == "PerAxis":
        granularity.inner("_data").one_of("axis", (0,), 0)
    return data.group("group_size", -1)
