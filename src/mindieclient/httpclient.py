"""The name under which spec 4.4.1 publishes the client; the samples use mindieclient.python."""

from mindieclient.python.common.log import Log
from mindieclient.python.httpclient import (
    AsyncRequest,
    Input,
    MindIEClientException,
    MindIEHTTPClient,
    RequestedOutput,
    Result,
)

__all__ = ["AsyncRequest", "Input", "Log", "MindIEClientException", "MindIEHTTPClient", "RequestedOutput", "Result"]
