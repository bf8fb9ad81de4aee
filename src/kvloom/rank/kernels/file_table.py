"""FileTable: a table that stays in its file, of which a step reads the rows of its tokens.

That of Gemma 4's layers' own inputs has more numbers than all other tensors of a small model.
"""

from dataclasses import replace

import numpy as np

from kvloom.checkpoints.families.spec import DecoderSpec
from kvloom.checkpoints.source import CheckedTensor, RawTensor, WeightSource
from kvloom.contract.errors import ModelError
from kvloom.rank.kernels.backend import Floats, Ints

LAYER_INPUTS = "layer_embed"
_ROWS = 8  # decoded at once: their numbers stay in the second-level cache


class FileTable:
    """Rows of tokens, times `scale`."""

    def __init__(self, weights: WeightSource, name: str, scale: float) -> None:
        """Raises ModelError for a table whose rows do not lie apart in the file."""
        tensor = weights.tensor(name)
        raw = tensor.unchecked if isinstance(tensor, CheckedTensor) else tensor
        if not isinstance(raw, RawTensor):
            raise ModelError(f"tensor {name}: a table that stays in its file in the form {raw.form} is not supported")
        self._raw, self._scale = raw, np.float32(scale)

    def rows(self, ids: Ints) -> Floats:
        """float32 [tokens, numbers of a row]. Raises ModelError for a value that is no finite number."""
        found = np.empty((len(ids), self._raw.shape[1]), np.float32)
        for at in range(0, len(ids), _ROWS):
            data = self._raw.data[ids[at : at + _ROWS]]
            own = replace(self._raw, shape=(len(data), self._raw.shape[1]), data=data)
            np.multiply(own.float32(), self._scale, out=found[at : at + _ROWS])
        if not np.isfinite(found).all():
            raise ModelError(f"tensor {self._raw.name}: a weight is no finite number")
        return found


def layer_table(spec: DecoderSpec, weights: WeightSource) -> FileTable | None:
    """The layers' own inputs, [layers * size] of a token; None without such. Raises ModelError."""
    return FileTable(weights, LAYER_INPUTS, spec.layer_inputs.size**0.5) if spec.layer_inputs else None
