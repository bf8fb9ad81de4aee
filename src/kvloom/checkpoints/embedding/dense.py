"""Dense layers behind the pooling, of sentence-transformers' folders and of GGUF files of embedding models."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvloom.checkpoints.families.values import count, flag, short
from kvloom.checkpoints.fields import unknown_field
from kvloom.checkpoints.files import read_object
from kvloom.checkpoints.gguf import GgufFile
from kvloom.checkpoints.quantized.numbers import Floats
from kvloom.checkpoints.safetensors import SafetensorsSource
from kvloom.checkpoints.source import RawTensor, check_shape
from kvloom.checkpoints.unread import told
from kvloom.contract.errors import ModelError

ACTIVATIONS = ("Identity", "Tanh")  # names of torch's classes
_READ = ("in_features", "out_features", "bias", "activation_function")
PLAIN: Mapping[str, tuple[object, ...]] = {  # of Dense and Normalize of sentence-transformers 6.2
    "module_input_name": ("sentence_embedding",),
    "module_output_name": ("sentence_embedding",),
    "use_residual": (True,),
}


@dataclass(frozen=True, slots=True)
class Dense:
    """y = activation(weight x + bias), in float32. weight [out, in]; bias [out], None = none.

    With `adds_input` x is added to y; through `residual` [out, in], where there is one.
    """

    weight: Floats
    bias: Floats | None = None
    activation: str = "Identity"  # one of ACTIVATIONS
    adds_input: bool = False
    residual: Floats | None = None

    @property
    def num_out(self) -> int:
        return int(self.weight.shape[0])

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.weight, self.bias, self.residual) if part is not None)

    def __call__(self, x: Floats) -> Floats:
        """x [in] -> [out]."""
        y = self.weight @ x
        if self.bias is not None:
            y += self.bias
        if self.activation == "Tanh":
            y = np.tanh(y)
        if self.adds_input:
            y += x if self.residual is None else self.residual @ x
        return y


def dense_of_folder(folder: Path, num_in: int) -> Dense:
    """A Dense module of sentence-transformers. `num_in`: size of its input. Raises ModelError."""
    config = read_object(folder / "config.json")
    name = unknown_field(config, _READ, PLAIN)
    if name is not None:
        raise ModelError(f"{folder / 'config.json'}: {name[:80]} is not supported, got {short(config[name])}")
    num_out = count(config, "out_features")
    if count(config, "in_features") != num_in:
        raise ModelError(f"{folder}: in_features is {config['in_features']}, what it is given has {num_in} numbers")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ModelError(f"{folder}: activation_function {activation!r:.80} is not supported; supported are {known}")
    tensors = SafetensorsSource(folder, {})
    bias = tensors.floats("linear.bias", (num_out,)) if flag(config, "bias", default=True) else None
    weight, adds_input = tensors.floats("linear.weight", (num_out, num_in)), config.get("use_residual") is True
    is_projected = adds_input and num_in != num_out
    residual = tensors.floats("residual.weight", (num_out, num_in)) if is_projected else None
    if unread := tensors.unread():
        raise ModelError(f"{folder}: has {told(unread)}")
    return Dense(weight, bias, activation, adds_input, residual)


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
