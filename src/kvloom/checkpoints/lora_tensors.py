"""The tensors of a LoRA adapter."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvloom.checkpoints.families.interleaved import row_order
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


def pairs_of(adapter: AdapterFile, spec: DecoderSpec) -> Iterator[tuple[str, LoraPair]]:
    """(canonical name of the linear, its pair), for the whole model. Raises BadRequest when a value is not finite."""
    if spec.is_multiplied:
        raise BadRequest(FIELD, f"adapters of {spec.family} are not supported: its multipliers are in its weights")
    for name, module in adapter.modules.items():
        a, b = _values(adapter, module.a), _values(adapter, module.b)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise BadRequest(FIELD, f"{WEIGHTS_FILE}: {module.a} or its lora_B holds values that are not finite")
        is_interleaved = spec.interleaved if adapter.is_interleaved is None else adapter.is_interleaved
        order = row_order(spec, name) if is_interleaved else None
        yield name, LoraPair(a, b if order is None else b[order], module.scale)


def _values(adapter: AdapterFile, name: str) -> npt.NDArray[np.float32]:
    tensor = adapter.tensors[name]
    data = np.frombuffer(adapter.data, np.uint8)[tensor.start : tensor.end]
    return RawTensor(name, tensor.shape, tensor.kind.lower(), as_rows(data, tensor.shape)).float32()
