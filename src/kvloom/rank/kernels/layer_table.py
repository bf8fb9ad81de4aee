"""LayerTable: the table of the layers' own inputs, which stays in its file.

It has more numbers than all other tensors of a small model; a step reads the rows of its tokens.
"""

from dataclasses import replace

import numpy as np

from kvloom.checkpoints.families.spec import DecoderSpec
from kvloom.checkpoints.source import CheckedTensor, RawTensor, WeightSource
from kvloom.contract.errors import ModelError
from kvloom.rank.kernels.backend import Floats, Ints

TABLE = "layer_embed"
_ROWS = 8  # decoded at once: their numbers stay in the second-level cache


class LayerTable:
    """Rows [layers * size] of tokens, times sqrt(size)."""

    def __init__(self, spec: DecoderSpec, weights: WeightSource) -> None:
        """Raises ModelError for a table whose rows do not lie apart in the file."""
        assert spec.layer_inputs is not None, "layers have inputs"
        tensor = weights.tensor(TABLE)
        raw = tensor.unchecked if isinstance(tensor, CheckedTensor) else tensor
        if not isinstance(raw, RawTensor):
            raise ModelError(f"{spec.family}: a table of the layers' inputs in the form {raw.form} is not supported")
        self._raw, self._scale = raw, np.float32(spec.layer_inputs.size**0.5)

    def rows(self, ids: Ints) -> Floats:
        """float32 [tokens, layers * size]. Raises ModelError for a value that is no finite number."""
        found = np.empty((len(ids), self._raw.shape[1]), np.float32)
        for at in range(0, len(ids), _ROWS):
            data = self._raw.data[ids[at : at + _ROWS]]
            own = replace(self._raw, shape=(len(data), self._raw.shape[1]), data=data)
            np.multiply(own.float32(), self._scale, out=found[at : at + _ROWS])
        if not np.isfinite(found).all():
            raise ModelError(f"tensor {self._raw.name}: a weight is no finite number")
        return found
