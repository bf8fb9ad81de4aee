"""Dense layers behind the pooling, of sentence-transformers' folders and of GGUF files of embedding models."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvloom.checkpoints.families.values import count
from kvloom.checkpoints.files import read_object
from kvloom.checkpoints.gguf import GgufFile
from kvloom.checkpoints.quantized.numbers import Floats
from kvloom.checkpoints.safetensors import SafetensorsSource
from kvloom.checkpoints.source import RawTensor, check_shape
from kvloom.contract.errors import ModelError

ACTIVATIONS = ("Identity", "Tanh")  # names of torch's classes


@dataclass(frozen=True, slots=True)
class Dense:
    """y = activation(weight x + bias), in float32. weight [out, in]; bias [out], None = none."""

    weight: Floats
    bias: Floats | None = None
    activation: str = "Identity"  # one of ACTIVATIONS

    @property
    def num_out(self) -> int:
        return int(self.weight.shape[0])

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Floats) -> Floats:
        """x [in] -> [out]."""
        y = self.weight @ x
        if self.bias is not None:
            y += self.bias
        return np.tanh(y) if self.activation == "Tanh" else y


def dense_of_folder(folder: Path, num_in: int) -> Dense:
    """A Dense module of sentence-transformers. `num_in`: size of its input. Raises ModelError."""
    config = read_object(folder / "config.json")
    num_out = count(config, "out_features")
    if count(config, "in_features") != num_in:
        raise ModelError(f"{folder}: in_features is {config['in_features']}, what it is given has {num_in} numbers")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ModelError(f"{folder}: activation_function {activation!r:.80} is not supported; supported are {known}")
    tensors = SafetensorsSource(folder, {})
    bias = tensors.floats("linear.bias", (num_out,)) if config.get("bias", True) else None
    return Dense(tensors.floats("linear.weight", (num_out, num_in)), bias, activation)


def dense_of_gguf(file: GgufFile, num_states: int) -> tuple[Dense, ...]:
    """The dense layers as llama.cpp's converter writes them: matrices only. Raises ModelError when they do not fit."""
    found: list[Dense] = []
    for name in ("dense_2.weight", "dense_3.weight"):
        info, num_in = file.header.tensors.get(name), found[-1].num_out if found else num_states
        if info is None:
            continue
        check_shape(name, info.shape, (info.shape[0], num_in), str(file.path))
        raw = RawTensor(name, info.shape, file.kind(name), file.rows(name))
        found.append(Dense(raw.float32()))
    return tuple(found)
