"""Answers: `Result` of a request, `AsyncRequest` for a running one. Spec 4.3.1.5 and 4.3.1.1."""

import json
import logging
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mindieclient.python.httpclient.checks import check_positive, shown
from mindieclient.python.httpclient.errors import MindIEClientException

logger = logging.getLogger(__name__)

_DTYPES: dict[str, type[np.generic]] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}


class Result:
    """The JSON object of the server's answer. False in a condition if the server declined, otherwise true."""

    def __init__(
        self, response: Mapping[str, Any] | str | bytes, verbose: bool = False, *, is_success: bool = True
    ) -> None:
        self._response = dict(response) if isinstance(response, Mapping) else _parsed(response)
        self._is_success = is_success
        if verbose:
            logger.info("result with the keys %s", sorted(self._response))

    def __bool__(self) -> bool:
        return self._is_success

    def __repr__(self) -> str:
        return f"Result({self._response!r}, is_success={self._is_success})"

    def get_response(self) -> dict[str, Any]:
        """The whole JSON object."""
        return self._response

    def retrieve_output_index_to_numpy(self, index: int) -> NDArray[Any]:
        """The output of that index, in its shape and type. Raises MindIEClientException when there is none."""
        outputs = self._outputs()
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(outputs):
            raise MindIEClientException(f"index must be an integer in [0, {len(outputs)}), the outputs: {shown(index)}")
        return _to_numpy(outputs[index])

    def retrieve_output_name_to_numpy(self, name: str) -> NDArray[Any]:
        """The output with this name, in any letter case: servers spell the requested name differently."""
        names = [str(output.get("name", "")) for output in self._outputs()]
        for position, found in enumerate(names):
            if isinstance(name, str) and found.casefold() == name.casefold():
                return self.retrieve_output_index_to_numpy(position)
        raise MindIEClientException(f"the answer has no output {shown(name)}; it has {names}")

    def _outputs(self) -> list[dict[str, Any]]:
        outputs = self._response.get("outputs")
        if not isinstance(outputs, list) or not all(isinstance(output, dict) for output in outputs):
            raise MindIEClientException("the answer has no list of outputs: only that of infer has one")
        return outputs


class _Greenlet(Protocol):
    """What AsyncRequest needs of a gevent greenlet, which spec 4.3.1.1 names as its argument."""

    def get(self, block: bool = True, timeout: float | None = None) -> Result: ...


class AsyncRequest:
    """A running request, executed by a future of the client, or by a greenlet that the caller provides."""

    def __init__(self, greenlet: Future[Result] | _Greenlet, verbose: bool = False) -> None:
        self._pending = greenlet
        self._verbose = verbose

    def get_result(self, timeout: float | None = None) -> Result:
        """Wait for the result, at most `timeout` seconds (None: for ever). May be called again after a timeout."""
        limit_s = None if timeout is None else check_positive("timeout", timeout)
        try:
            if isinstance(self._pending, Future):
                result = self._pending.result(limit_s)
            else:
                result = self._pending.get(block=True, timeout=limit_s)
        except TimeoutError as error:
            raise MindIEClientException(f"no result within {limit_s} s") from error
        except CancelledError as error:
            raise MindIEClientException("the client was closed before the request was sent") from error
        if self._verbose:
            logger.info("asynchronous request finished")
        return result


def _parsed(text: str | bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MindIEClientException("the answer is not JSON") from error
    if not isinstance(value, dict):
        raise MindIEClientException("the answer is not a JSON object")
    return value


def _to_numpy(output: dict[str, Any]) -> NDArray[Any]:
    datatype = output.get("datatype")
    dtype = _DTYPES.get(str(datatype))
    if dtype is None:
        raise MindIEClientException(f"the answer has an output of the unknown datatype {shown(datatype)}")
    try:
        return np.asarray(output["data"], dtype=dtype).reshape(output["shape"])
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise MindIEClientException(f"the answer has an output whose data do not fit its shape: {error}") from error
