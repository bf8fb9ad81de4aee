"""Inputs and requested outputs of an inference: spec 4.3.1.3 and 4.3.1.4."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindieclient.python.httpclient.checks import MAX_NAME_CHARS, shown
from mindieclient.python.httpclient.errors import MindIEClientException

MAX_TOKENS = 16000
DATATYPE = "UINT32"

Shape = Sequence[int] | NDArray[np.integer[Any]]


class Input:
    """Token ids of one request: shape [1, n] with n <= 16000, datatype UINT32."""

    def __init__(self, name: str, shape: Shape, datatype: str) -> None:
        if datatype != DATATYPE:
            raise MindIEClientException(f"datatype must be {DATATYPE!r}, the only one supported: {shown(datatype)}")
        self._name = _tensor_name(name)
        self._shape = _checked_shape(shape)
        self._tensor: NDArray[np.uint32] | None = None

    def get_input_name(self) -> str:
        """The name that the request sends."""
        return self._name

    def get_input_shape(self) -> list[int]:
        """[1, n], n the number of tokens."""
        return list(self._shape)

    def set_input_shape(self, shape: Shape) -> None:
        """Set the shape. A tensor of another shape that was set before is dropped."""
        self._shape = _checked_shape(shape)
        if self._tensor is not None and list(self._tensor.shape) != self._shape:
            self._tensor = None

    def get_input_data_type(self) -> str:
        """ "UINT32"."""
        return DATATYPE

    def initialize_data(self, input_tensor: NDArray[np.uint32]) -> None:
        """Set the data by copying; `input_tensor` must have this input's shape and dtype uint32."""
        if not isinstance(input_tensor, np.ndarray) or input_tensor.dtype != np.uint32:
            kind = getattr(input_tensor, "dtype", type(input_tensor).__name__)
            raise MindIEClientException(f"input_tensor must be a numpy array of dtype uint32, not {kind}")
        if list(input_tensor.shape) != self._shape:
            raise MindIEClientException(
                f"input_tensor has shape {list(input_tensor.shape)}, but input {self._name!r} has shape {self._shape}"
            )
        self._tensor = input_tensor.copy()

    def get_input_tensor(self) -> NDArray[np.uint32] | None:
        """The data; None before `initialize_data`."""
        return self._tensor


class RequestedOutput:
    """An output that a request asks for by name."""

    def __init__(self, name: str) -> None:
        self._name = _tensor_name(name)

    def get_output_name(self) -> str:
        """The name that the request sends."""
        return self._name

    def get_output_tensor(self) -> dict[str, str]:
        """The output in the form of the request's JSON."""
        return {"name": self._name}


def input_tensor_json(tensor: object, parameters: dict[str, Any]) -> dict[str, Any]:
    """An `Input` in the form of the request's JSON. The documented server reads parameters only here."""
    if not isinstance(tensor, Input):
        raise MindIEClientException(f"inputs must hold Input objects, not {type(tensor).__name__}")
    data = tensor.get_input_tensor()
    if data is None:
        raise MindIEClientException(f"input {tensor.get_input_name()!r} has no data: call initialize_data first")
    body: dict[str, Any] = {
        "name": tensor.get_input_name(),
        "shape": tensor.get_input_shape(),
        "datatype": tensor.get_input_data_type(),
        "data": data.ravel().tolist(),
    }
    if parameters:
        body["parameters"] = parameters
    return body


def _tensor_name(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise MindIEClientException(f"name must be a string of 1 to {MAX_NAME_CHARS} characters: {shown(name)}")
    return name


def _checked_shape(shape: object) -> list[int]:
    values = shape.tolist() if isinstance(shape, np.ndarray) else shape
    if isinstance(values, list | tuple) and len(values) == 2:
        rows, columns = values
        whole = all(isinstance(v, int | np.integer) and not isinstance(v, bool) for v in values)
        if whole and rows == 1 and 1 <= columns <= MAX_TOKENS:
            return [1, int(columns)]
    raise MindIEClientException(f"shape must be [1, n] with n in [1, {MAX_TOKENS}]: {shown(shape)}")
