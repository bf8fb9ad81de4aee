"""Memory that holds no value is refused by name, whatever library it comes from."""

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch

from ems import EmsErrorCode, EmsException, KvBufferWrapper, KvPool

MEMORY = ctypes.create_string_buffer(64)
ADDRESS = ctypes.addressof(MEMORY)


def released() -> memoryview:
    view = memoryview(bytearray(8))
    view.release()
    return view


def freed() -> torch.Tensor:
    tensor = torch.zeros(8)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (released, "buffer: is a memoryview that was released"),
        (lambda: torch.eye(4).to_sparse(), "buffer: is sparse, nested or conjugated"),
        (lambda: torch.eye(4).to_mkldnn(), "buffer: is sparse"),
        (lambda: torch.nested.nested_tensor([torch.zeros(4)], layout=torch.jagged), "buffer: is sparse, nested"),
        (lambda: torch.zeros(4, dtype=torch.complex64).conj(), "buffer: is sparse, nested or conjugated"),
        (lambda: torch.zeros(4, dtype=torch.complex64).conj().imag, "buffer: is sparse, nested or conjugated"),
        (freed, "buffer: is sparse, nested or conjugated, or its memory was freed; expected a dense tensor"),
        (lambda: KvBufferWrapper(0, 8), "data_ptr: must be the address of a buffer"),
        (lambda: KvBufferWrapper(2**64, 8), "data_ptr: must be the address of a buffer"),
        (lambda: KvBufferWrapper("1", 8), "data_ptr: must be the address of a buffer"),
        (lambda: KvBufferWrapper(ADDRESS, 0), "length: must be a positive number of bytes"),
        (lambda: KvBufferWrapper(ADDRESS, 8.0), "length: must be a positive number of bytes"),
        (lambda: KvBufferWrapper(ADDRESS, 2**63), "length: reaches beyond the memory that a process may have"),
    ],
)
def test_what_is_no_memory_is_named(make: Callable[[], object], message: str):
    with pytest.raises(EmsException) as caught:
        KvPool.register(make())
    assert caught.value.status_code() == EmsErrorCode.EMS_INVALID_ARGUMENT
    assert caught.value.message().startswith(message)


def test_an_array_of_a_kind_of_its_own_is_its_memory():
    assert len(KvPool.register(np.ma.array([1, 2, 3], mask=[0, 1, 0], dtype=np.int64))) == 24
