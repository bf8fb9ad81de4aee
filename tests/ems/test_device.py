"""The copies for accelerators, on tensors of the CPU device: the same bytes, with few calls."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ems.device import DeviceTensors
from tests.support.pool.agents import BLOCK_SIZE, copy_of, slots_of, tokens_of, zero


class Counted(TorchDispatchMode):
    """Counts calls of torch operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_the_path_of_accelerators_moves_the_same_bytes(cc, kv):
    """The packed copies of device tensors are used for tensors of the CPU device."""
    before, registered = copy_of(kv), cc._cache
    flat = [tensor for layer in kv for tensor in layer]
    widths = [tensor[0, 0].numel() * tensor.element_size() for tensor in flat]
    registered.tensors = DeviceTensors(flat, widths, [0] * len(flat))
    assert cc.save([*slots_of(*range(20)), 100, 101], list(range(21)), [4] * 20 + [2]).success == 21
    zero(kv)
    assert cc.load([*slots_of(*range(30, 50)), 8, 6], list(range(21)), [4] * 20 + [2]).success == 21
    assert torch.equal(
        tokens_of(kv, [*slots_of(*range(30, 50)), 8, 6]), tokens_of(before, [*slots_of(*range(20)), 100, 101])
    )


@pytest.mark.parametrize(("dim", "offset"), [(8, 0), (6, 0), (8, 1), (3, 0), (8, 2)])
def test_blocks_on_a_device_are_packed_by_one_call_a_tensor(dim, offset):
    """This holds for any token width and memory alignment: copies use words of 8, 4, 2 or 1 bytes."""
    count, num_tensors = 64, 6
    memory = torch.randn(2, num_tensors, count * BLOCK_SIZE * dim + offset).half()
    before, after = ([row[offset:].view(count, BLOCK_SIZE, 1, dim) for row in half] for half in memory)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
    blocks = [((number, 0, BLOCK_SIZE),) for number in order]
    size = num_tensors * BLOCK_SIZE * dim * 2
    packed = [np.zeros(size, np.uint8) for _ in blocks]
    source, target = (DeviceTensors(half, [dim * 2] * num_tensors, [0] * num_tensors) for half in (before, after))
    with Counted() as gathered:
        source.gather([(block,) for block in blocks], packed)
    with Counted() as scattered:
        target.scatter([(block,) for block in blocks], packed)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert (gathered.calls["index_select"], scattered.calls["index_copy_"]) == (num_tensors, num_tensors)
    assert gathered.calls["copy_"] == 1


def test_layer_groups_and_scattered_tokens_go_their_own_ways():
    """Groups with 4 and 2 tokens per block; whole, partial and scattered blocks in one batch."""
    before = [torch.randn(16, 4, 1, 8).half(), torch.randn(32, 2, 1, 8).half()]
    after = [torch.zeros_like(tensor) for tensor in before]
    blocks = [
        (((3, 0, 4),), ((9, 0, 2),)),
        (((5, 0, 4),), ((1, 0, 2),)),
        (((7, 1, 2),), ((4, 1, 1),)),
        (((8, 0, 1), (2, 3, 1)), ((6, 0, 2),)),
    ]
    packed = [np.zeros(sum(n for runs in block for _b, _s, n in runs) * 16, np.uint8) for block in blocks]
    DeviceTensors(before, [16, 16], [0, 1]).gather(blocks, packed)
    DeviceTensors(after, [16, 16], [0, 1]).scatter(blocks, packed)
    for group, (one, other) in enumerate(zip(before, after, strict=True)):
        moved = torch.zeros(one.shape[:2], dtype=torch.bool)
        for block in blocks:
            for number, start, count in block[group]:
                moved[number, start : start + count] = True
        assert torch.equal(one[moved], other[moved])
        assert not other[~moved].any()
