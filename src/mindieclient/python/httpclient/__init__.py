"""The HTTP client of spec 4."""

from mindieclient.python.httpclient.client import MindIEHTTPClient
from mindieclient.python.httpclient.errors import MindIEClientException
from mindieclient.python.httpclient.result import AsyncRequest, Result
from mindieclient.python.httpclient.tensors import Input, RequestedOutput

__all__ = ["AsyncRequest", "Input", "MindIEClientException", "MindIEHTTPClient", "RequestedOutput", "Result"]
