"""What can be registered: tensors of torch, numpy and DLPack share blocks where they hold the same kind of elements."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from ems import CcResult, EmsException
from ems.buffer import RegisteredCache
from tests.support.pool.agents import session, slots_of

SHAPE = (8, 4, 2, 8)


class OthersTensor:
    """A DLPack tensor of an unknown library."""

    def __init__(self, tensor: object, device: int = 1) -> None:
        self._tensor = tensor
        self._device = device

    def __dlpack__(self, **options: object) -> object:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0


def numbers(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(dtype)


def freed() -> torch.Tensor:
    """A tensor whose memory was given back, as engines do with what they need no more."""
    tensor = torch.zeros(SHAPE).half()
    tensor.untyped_storage().resize_(0)
    return tensor


KINDS = {
    "torch": lambda tensor: tensor,
    "numpy": lambda tensor: tensor.numpy(),
    "dlpack": lambda tensor: OthersTensor(tensor.numpy()),
}


@pytest.mark.parametrize("saved", KINDS)
@pytest.mark.parametrize("loaded", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_what_one_library_saves_another_loads(agent, saved, loaded, dtype):
    source, target = numbers(dtype), torch.zeros(SHAPE, dtype=dtype)
    with session(agent.config.socket, [[KINDS[saved](source)]]) as cc:
        assert cc.save(slots_of(0, 1), [1, 2], [4, 4]) == CcResult(2, 2)
    with session(agent.config.socket, [[KINDS[loaded](target)]]) as cc:
        assert cc.load(slots_of(5, 3), [1, 2], [4, 4]) == CcResult(2, 2)
    assert torch.equal(target[[5, 3]], source[:2])
    assert not target[[0, 1, 2, 4, 6, 7]].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.float64, torch.complex64])
def test_elements_that_numpy_does_not_know_are_moved_too(agent, dtype):
    source, target = numbers(torch.float32).to(dtype), torch.zeros(SHAPE, dtype=dtype)
    for wrapped in ([[source]], [[OthersTensor(source)]]):
        with session(agent.config.socket, wrapped, model_id="m") as cc:
            assert cc.save(slots_of(0, 1), [1, 2], [4, 4]) == CcResult(2, 2)
    with session(agent.config.socket, [[target]], model_id="m") as cc:
        assert cc.load(slots_of(6, 7), [1, 2], [4, 4]) == CcResult(2, 2)
    assert torch.equal(target[6:].view(torch.uint8), source[:2].view(torch.uint8))
    assert RegisteredCache([[source]]).layout.dtype == str(dtype).removeprefix("torch.")


def read_only() -> np.ndarray:
    array = np.zeros(SHAPE, np.float16)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (read_only(), "tensor 1 can only be read"),
        (np.zeros(SHAPE, ">f2"), "tensor 1 has elements of >f2, expected numbers in this machine's order"),
        (np.zeros(SHAPE, object), "tensor 1 has elements of object"),
        (np.zeros(SHAPE, [("a", "i4")]), "tensor 1 has elements of"),
        (np.zeros((8, 4), np.float16), "tensor 1 has 2 dimensions"),
        (np.zeros((0, 4, 2, 8), np.float16), "tensor 1 is empty"),
        (np.zeros(SHAPE, np.float32), "tensor 1 has another dtype"),
        (np.zeros((8, 2, 4, 8), np.float16).swapaxes(1, 2), "tensor 1: the tokens of a block must be contiguous"),
        (np.zeros(SHAPE, np.float16)[::-1], "tensor 1: the memory of its blocks overlaps"),
        (torch.zeros((1, 4, 2, 8)).half().expand(SHAPE), "tensor 1: the memory of its blocks overlaps"),
        (torch.zeros(SHAPE, dtype=torch.float16, device="meta"), "tensor 1 has another dtype or device"),
        (np.zeros(SHAPE, "V0"), "tensor 1 is empty"),
        (torch.zeros(SHAPE).half().to_sparse(), "tensor 1 is sparse, nested or conjugated"),
        (torch.zeros(SHAPE).to_mkldnn(), "tensor 1 is sparse"),
        (torch.nested.nested_tensor([torch.zeros(4)], layout=torch.jagged), "tensor 1 is sparse, nested"),
        (torch.zeros(SHAPE, dtype=torch.complex64).conj(), "tensor 1 is sparse, nested or conjugated"),
        (torch.zeros(SHAPE, dtype=torch.complex64).conj().imag, "tensor 1 is sparse, nested or conjugated"),
        (freed(), "or its memory was freed; expected a dense tensor"),
        ([1, 2], "must be a list of layers, each a list of tensors"),
        (None, "must be a list of layers, each a list of tensors"),
    ],
)
def test_what_cannot_be_registered_is_named(tensor, problem):
    with pytest.raises(EmsException, match=problem):
        RegisteredCache([[np.zeros(SHAPE, np.float16), tensor]])


WITHOUT_TORCH = """
import sys
from ems import EmsException
from ems.buffer import RegisteredCache

class Elsewhere:
    def __init__(self, device):
        self.device = device
    def __dlpack_device__(self):
        return self.device, 0
    def __dlpack__(self, **options):
        raise BufferError("elements of its own")

for device in (2, 1):
    try:
        RegisteredCache([[Elsewhere(device)]])
    except EmsException as error:
        print(error.message())
assert "torch" not in sys.modules
"""


def test_memory_of_a_device_needs_torch_to_be_imported():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "kvcache: tensor 0 is on a device (DLPack's 2); import torch to register it",
        "kvcache: tensor 0 cannot be seen through DLPack: elements of its own",
    ], done.stderr
