"""The Engine API: token ids or text in, a callback for every token, no HTTP (spec 3.3.1).

Names follow Python's style, with those of the C++ interface as aliases (`engine.forward` and `engine.Forward`). Values
that C++ returns through pointers are returned as (Status, value).
"""

from kvloom.engine_api.codes import (
    Code,
    DataType,
    Error,
    InferResponseEndFlag,
    MemoryType,
    Operation,
    ParameterType,
    Status,
    TensorType,
)
from kvloom.engine_api.engine import BlockQuotas, InferenceEngine
from kvloom.engine_api.requests import (
    Compare,
    InferenceRequest,
    InferenceResponse,
    RequestId,
    SamplingParams,
    SendResponseCallback,
)
from kvloom.engine_api.tensors import Input, Output

LLM_ENGINE_DataType = TensorType
LLM_ENGINE_MemoryType = MemoryType
LLM_ENGINE_ParameterType = ParameterType

__all__ = [
    "BlockQuotas",
    "Code",
    "Compare",
    "DataType",
    "Error",
    "InferResponseEndFlag",
    "InferenceEngine",
    "InferenceRequest",
    "InferenceResponse",
    "Input",
    "LLM_ENGINE_DataType",
    "LLM_ENGINE_MemoryType",
    "LLM_ENGINE_ParameterType",
    "MemoryType",
    "Operation",
    "Output",
    "ParameterType",
    "RequestId",
    "SamplingParams",
    "SendResponseCallback",
    "Status",
    "TensorType",
]
