"""The tensors of a LoRA adapter."""

from collections.abc import Iterator
from dataclasses import dataclass

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from kvloom.engine.errors import BadRequest
from kvloom.engine.lora import FIELD, WEIGHTS_FILE, AdapterFile


@dataclass(frozen=True, slots=True)
class LoraPair:
    """y += scale * B (A x); float32, a [rank, in], b [out, rank]."""

    a: Tensor
    b: Tensor
    scale: float


def pairs_of(adapter: AdapterFile) -> Iterator[tuple[str, LoraPair]]:
    """(canonical name of the linear, its pair). Raises BadRequest when the file is damaged or a value is not finite."""
    try:
        tensors = load(adapter.data)
    except SafetensorError as error:
        raise BadRequest(FIELD, f"{WEIGHTS_FILE} is damaged: {error}") from None
    for name, module in adapter.modules.items():
        a, b = tensors[module.a].float().contiguous(), tensors[module.b].float().contiguous()
        if not (a.isfinite().all() and b.isfinite().all()):
            raise BadRequest(FIELD, f"{WEIGHTS_FILE}: {module.a} or its lora_B holds values that are not finite")
        yield name, LoraPair(a, b, module.scale)
