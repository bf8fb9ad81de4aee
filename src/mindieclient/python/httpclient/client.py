"""MindIEHTTPClient: spec 4.3.1.2."""

import logging
import sys
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import httpx

from mindieclient.python.common.log import Log
from mindieclient.python.httpclient import checks, connection
from mindieclient.python.httpclient.errors import MindIEClientException
from mindieclient.python.httpclient.result import AsyncRequest, Result
from mindieclient.python.httpclient.stream import EventReader
from mindieclient.python.httpclient.tensors import Input, RequestedOutput, input_tensor_json

logger = logging.getLogger(__name__)

LOGGER = "mindieclient"  # the name of the client's logger
MAX_CONTROL_CONNECTIONS = 2


class MindIEHTTPClient:
    """A client of one server; may be shared by threads. Call `close`, or use it in a `with` statement.

    Inference has `concurrency` connections; further requests wait, at most `network_timeout` seconds. Status and cancel
    have connections of their own, so that a running stream can be cancelled even when concurrency is 1. Times are in
    seconds. `api_key`, if given, is sent as a bearer token. `verbose`: log one line for each request, in the program's
    log or on standard error.
    """

    def __init__(
        self,
        url: str,
        greenlet_size: int | None = None,
        ssl_options: Mapping[str, str] | None = None,
        network_timeout: float = 600.0,
        connection_timeout: float = 600.0,
        concurrency: int = 1,
        verbose: bool = False,
        *,
        enable_ssl: bool = False,
        api_key: str | None = None,
    ) -> None:
        num_connections = checks.check_count("concurrency", concurrency, 1, checks.MAX_CONCURRENCY)
        num_workers = num_connections
        if greenlet_size is not None:
            num_workers = checks.check_count("greenlet_size", greenlet_size, 1, num_connections)
        self.valid_url = connection.checked_url(url, bool(enable_ssl))
        endpoint = connection.Endpoint(
            url=self.valid_url,
            context=connection.client_context(ssl_options) if enable_ssl else None,
            network_timeout_s=checks.check_positive("network_timeout", network_timeout),
            connection_timeout_s=checks.check_positive("connection_timeout", connection_timeout),
            api_key=checks.check_api_key(api_key),
        )
        self._verbose = bool(verbose)
        if self._verbose:
            Log(LOGGER)  # prints lines unless the program has configured logging
        self._inference = endpoint.open(num_connections)
        self._control = endpoint.open(MAX_CONTROL_CONNECTIONS)
        self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="mindieclient")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # `_workers` is the last thing that __init__ sets; a dying interpreter closes sockets by itself.
        if hasattr(self, "_workers") and not sys.is_finalizing():
            self.close()

    def close(self) -> None:
        """Close the client. Requests that were not sent yet are dropped; running ones finish. May be called again."""
        if self._control.is_closed:
            return
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._inference.close()
        self._control.close()

    def is_server_live(self) -> bool:
        """Whether the server lives; False also when nobody listens. Raises MindIEClientException for other failures."""
        return self._is_well("/v2/health/live")

    def is_server_ready(self) -> bool:
        """Whether the server can serve all its models; False and raises as `is_server_live`."""
        return self._is_well("/v2/health/ready")

    def is_model_ready(self, model_name: str, model_version: str = "") -> bool:
        """Whether a model can be served; False and raises as `is_server_live`."""
        return self._is_well(f"{checks.check_model(model_name, model_version)}/ready")

    def get_server_metadata(self) -> dict[str, Any]:
        """The server's name, version and extensions. Raises MindIEClientException."""
        return self._query("/v2")

    def get_model_metadata(self, model_name: str, model_version: str = "") -> dict[str, Any]:
        """A model's name, versions, inputs and outputs. Raises MindIEClientException."""
        return self._query(checks.check_model(model_name, model_version))

    def get_model_config(self, model_name: str, model_version: str = "") -> dict[str, Any]:
        """A model's limits, as the server has them. Raises MindIEClientException."""
        return self._query(f"{checks.check_model(model_name, model_version)}/config")

    def get_slot_count(self, model_name: str, model_version: str = "") -> Result:
        """Slots of the running batch, total and free. Raises MindIEClientException."""
        return Result(self._query(f"{checks.check_model(model_name, model_version)}/getSlotCount"), self._verbose)

    def infer(
        self,
        model_name: str,
        inputs: Sequence[Input],
        model_version: str = "",
        outputs: Sequence[RequestedOutput] | None = None,
        request_id: str = "",
        parameters: Mapping[str, Any] | None = None,
    ) -> Result:
        """Token ids in, token ids out."""
        path = f"{checks.check_model(model_name, model_version)}/infer"
        return self._send(path, _infer_body(inputs, outputs, request_id, parameters))

    def async_infer(
        self,
        model_name: str,
        inputs: Sequence[Input],
        model_version: str = "",
        outputs: Sequence[RequestedOutput] | None = None,
        request_id: str = "",
        parameters: Mapping[str, Any] | None = None,
    ) -> AsyncRequest:
        """As `infer`, in the background. Raises for wrong arguments; `get_result` raises later errors."""
        path = f"{checks.check_model(model_name, model_version)}/infer"
        body = _infer_body(inputs, outputs, request_id, parameters)
        try:
            future = self._workers.submit(self._send, path, body)
        except RuntimeError as error:
            raise MindIEClientException("the client is closed") from error
        return AsyncRequest(future, self._verbose)

    def generate(
        self,
        model_name: str,
        prompt: str,
        model_version: str = "",
        request_id: str = "",
        parameters: Mapping[str, Any] | None = None,
    ) -> Result:
        """Text in, the whole text out (`text_output` of the response)."""
        path = f"{checks.check_model(model_name, model_version)}/generate"
        return self._send(path, _generate_body(prompt, request_id, parameters))

    def generate_stream(
        self,
        model_name: str,
        prompt: str,
        model_version: str = "",
        request_id: str = "",
        parameters: Mapping[str, Any] | None = None,
    ) -> Generator[str]:
        """Text in, pieces of text out as they arrive. The request is sent when the first piece is asked for.

        Closing the generator ends the request on the server.
        """
        path = f"{checks.check_model(model_name, model_version)}/generate_stream"
        return self._stream(path, _generate_body(prompt, request_id, parameters))

    def cancel(self, model_name: str, request_id: str, model_version: str = "") -> Result:
        """End a request early. The result is false in a condition if the server knows no such request."""
        path = f"{checks.check_model(model_name, model_version)}/stopInfer"
        body = {"id": checks.check_request_id(request_id, optional=False)}
        with self._open_only():
            response = connection.post(self._control, path, connection.json_bytes(body))
        self._trace("POST", path, response)
        if response.status_code == httpx.codes.NOT_FOUND:
            return Result({"id": request_id, "error": response.text}, self._verbose, is_success=False)
        connection.check_status(response, path)
        return Result(response.content or body, self._verbose)

    def _send(self, path: str, body: bytes) -> Result:
        with self._open_only():
            response = connection.post(self._inference, path, body)
        self._trace("POST", path, response)
        connection.check_status(response, path)
        return Result(response.content, self._verbose)

    def _stream(self, path: str, body: bytes) -> Generator[str]:
        reader = EventReader()
        with self._open_only(), connection.telling(f"POST {path}"):
            with self._inference.stream("POST", path, content=body, headers=connection.JSON) as response:
                self._trace("POST", path, response)
                if not response.is_success:
                    response.read()
                connection.check_status(response, path)
                for data in response.iter_bytes():
                    yield from reader.feed(data)
            yield from reader.finish()

    def _is_well(self, path: str) -> bool:
        try:
            with self._open_only():
                response = connection.get(self._control, path)
        except connection.Unreachable as error:
            logger.warning("%s", error)
            return False
        self._trace("GET", path, response)
        return response.is_success

    def _query(self, path: str) -> dict[str, Any]:
        with self._open_only():
            response = connection.get(self._control, path)
        self._trace("GET", path, response)
        connection.check_status(response, path)
        return Result(response.content).get_response()

    def _open_only(self) -> "_OpenOnly":
        return _OpenOnly(self._control)

    def _trace(self, method: str, path: str, response: httpx.Response) -> None:
        """Log a request without bodies, which contain prompts."""
        if self._verbose:
            logger.info("%s %s%s -> %d", method, self.valid_url, path, response.status_code)


class _OpenOnly:
    """Turns httpx's RuntimeError for a closed client into MindIEClientException."""

    def __init__(self, pool: httpx.Client) -> None:
        self._pool = pool

    def __enter__(self) -> None:
        if self._pool.is_closed:
            raise MindIEClientException("the client is closed")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError) and self._pool.is_closed:
            raise MindIEClientException("the client was closed during a request") from error


def _infer_body(inputs: object, outputs: object, request_id: object, parameters: object) -> bytes:
    if not isinstance(inputs, Sequence) or len(inputs) != 1:
        raise MindIEClientException("inputs must be a list of exactly one Input")
    body: dict[str, Any] = {"inputs": [input_tensor_json(inputs[0], checks.check_parameters(parameters))]}
    if outputs is not None:
        if not isinstance(outputs, Sequence) or len(outputs) != 1 or not isinstance(outputs[0], RequestedOutput):
            raise MindIEClientException("outputs must be a list of exactly one RequestedOutput, or None")
        body["outputs"] = [outputs[0].get_output_tensor()]
    return _with_id(body, request_id)


def _generate_body(prompt: object, request_id: object, parameters: object) -> bytes:
    body: dict[str, Any] = {"text_input": checks.check_prompt(prompt)}
    checked = checks.check_parameters(parameters)
    if checked:
        body["parameters"] = checked
    return _with_id(body, request_id)


def _with_id(body: dict[str, Any], request_id: object) -> bytes:
    checked = checks.check_request_id(request_id, optional=True)
    return connection.json_bytes({"id": checked, **body} if checked else body)
