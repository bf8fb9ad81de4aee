"""Dense layers behind the pooling: what sentence-transformers and files of embedding models put there."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvloom.checkpoints.families.values import count
from kvloom.checkpoints.files import read_object
from kvloom.checkpoints.gguf import GgufFile
from kvloom.checkpoints.mapped import MappedFile
from kvloom.checkpoints.quantized.numbers import Floats
from kvloom.checkpoints.safetensors import entries_of, refuse_pickle
from kvloom.checkpoints.source import RawTensor, check_shape, widen
from kvloom.checkpoints.tensorfile import FLOATS
from kvloom.contract.errors import ModelError

ACTIVATIONS = ("Identity", "Tanh")  # by the names of torch's classes


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
    """A Dense module of sentence-transformers. `num_in`: numbers that it is given. Raises ModelError."""
    config = read_object(folder / "config.json")
    num_out = count(config, "out_features")
    if count(config, "in_features") != num_in:
        raise ModelError(f"{folder}: in_features is {config['in_features']}, what it is given has {num_in} numbers")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ModelError(f"{folder}: activation_function {activation!r:.80} is not supported; supported are {known}")
    path = folder / "model.safetensors"
    if not path.exists():
        refuse_pickle(folder)
    tensors = FloatTensors(path)
    bias = tensors.read("linear.bias", (num_out,)) if config.get("bias", True) else None
    return Dense(tensors.read("linear.weight", (num_out, num_in)), bias, activation)


def dense_of_gguf(file: GgufFile, num_states: int) -> tuple[Dense, ...]:
    """As llama.cpp's converter writes those of a folder: matrices alone. Raises ModelError when they do not fit."""
    found: list[Dense] = []
    for name in ("dense_2.weight", "dense_3.weight"):
        info, num_in = file.header.tensors.get(name), found[-1].num_out if found else num_states
        if info is None:
            continue
        check_shape(name, info.shape, (info.shape[0], num_in), str(file.path))
        raw = RawTensor(name, info.shape, file.kind(name), file.rows(name))
        found.append(Dense(raw.float32()))
    return tuple(found)


class FloatTensors:
    """The tensors of one small safetensors file."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError."""
        self._path, self._file = path, MappedFile(path)
        self._entries = entries_of(path, self._file)

    def read(self, name: str, shape: tuple[int, ...]) -> Floats:
        """float32, a copy. Raises ModelError when it is missing, of another shape or no floats."""
        entry = self._entries.get(name)
        if entry is None:
            raise ModelError(f"{self._path}: tensor {name} is missing")
        check_shape(name, entry.shape, shape, str(self._path))
        if entry.kind not in FLOATS:
            raise ModelError(f"{self._path}: tensor {name} is {entry.kind}; known are F32, F16 and BF16")
        return widen(self._file.part(entry.start, entry.end), entry.kind.lower()).reshape(shape)
