"""The tensors of a LoRA adapter."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvloom.checkpoints.families.adapted import WHOLES, Shapes, parts_of
from kvloom.checkpoints.families.interleaved import row_order
from kvloom.checkpoints.families.mixers import DeltaRule
from kvloom.checkpoints.families.spec import DecoderSpec
from kvloom.checkpoints.lora import FIELD, WEIGHTS_FILE, AdapterFile
from kvloom.checkpoints.source import RawTensor, as_rows
from kvloom.contract.errors import BadRequest


@dataclass(frozen=True, slots=True)
class LoraPair:
    """y += scale * B (A x); float32, contiguous, a [rank, in], b [out, rank]."""

    a: npt.NDArray[np.float32]
    b: npt.NDArray[np.float32]
    scale: float


def lora_shapes(spec: DecoderSpec) -> Shapes:
    """Shapes of the tensors that adapters may name: those of the spec, and those that files hold as one."""
    shapes = spec.tensor_shapes()
    for layer in range(spec.num_layers):
        for whole, parts in WHOLES.items():
            own = [shapes[name] for name in (f"layers.{layer}.{part}" for part in parts) if name in shapes]
            if len(own) == len(parts):
                shapes[f"layers.{layer}.{whole}"] = sum(rows for rows, _ in own), own[0][1]
    return shapes


def pairs_of(adapter: AdapterFile, spec: DecoderSpec) -> Iterator[tuple[str, LoraPair]]:
    """(canonical name of the linear, its pair), for the whole model. Raises BadRequest when a value is not finite."""
    if spec.is_multiplied:
        raise BadRequest(FIELD, f"adapters of {spec.family} are not supported: its multipliers are in its weights")
    for name, module in adapter.modules.items():
        a, b = _values(adapter, module.a), _values(adapter, module.b)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise BadRequest(FIELD, f"{WEIGHTS_FILE}: {module.a} or its lora_B holds values that are not finite")
        layer, _, part = name.removeprefix("layers.").partition(".")
        whole = {name: np.arange(len(b))} if part not in WHOLES else parts_of(part, int(layer), spec)
        for own, rows in whole.items():
            yield own, _in_order(own, LoraPair(a, b[rows], module.scale), adapter, spec)


def _in_order(name: str, pair: LoraPair, adapter: AdapterFile, spec: DecoderSpec) -> LoraPair:
    """The pair with heads and their dimensions in the order that the model has them in."""
    is_interleaved = spec.interleaved if adapter.is_interleaved is None else adapter.is_interleaved
    order = row_order(spec, name) if is_interleaved else None
    if order is not None:
        return replace(pair, b=pair.b[order])
    layer, _, part = name.removeprefix("layers.").partition(".")
    mixer = spec.layers[int(layer)].mixer
    if isinstance(mixer, DeltaRule) and mixer.is_tiled != adapter.is_tiled:
        return _other_heads(mixer, part, pair)
    return pair


def _other_heads(mixer: DeltaRule, part: str, pair: LoraPair) -> LoraPair:
    """A pair whose file has value heads in the other one of the two orders."""
    times = mixer.num_v_heads // mixer.num_k_heads
    shape = (mixer.num_k_heads, times) if mixer.is_tiled else (times, mixer.num_k_heads)
    heads = np.arange(mixer.num_v_heads).reshape(shape).T.reshape(-1)
    size = 1 if part in ("beta_in", "decay_in") else mixer.v_dim
    order = (heads[:, None] * size + np.arange(size)).reshape(-1)
    match part:
        case "out":
            return replace(pair, a=np.ascontiguousarray(pair.a[:, order]))
        case "conv_in":
            return replace(pair, b=pair.b[np.concatenate((np.arange(2 * mixer.k_size), 2 * mixer.k_size + order))])
        case "gate_in" | "beta_in" | "decay_in":
            return replace(pair, b=pair.b[order])
    return pair  # of the MLP


def _values(adapter: AdapterFile, name: str) -> npt.NDArray[np.float32]:
    tensor = adapter.tensors[name]
    data = np.frombuffer(adapter.data, np.uint8)[tensor.start : tensor.end]
    return RawTensor(name, tensor.shape, tensor.kind.lower(), as_rows(data, tensor.shape)).float32()
