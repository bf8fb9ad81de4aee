"""Tensors on an accelerator. They are torch tensors; the caller has imported torch."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from ems.checked import Checked
from ems.common.exception import internal_error
from ems.runs import SKIPPED, Block, Bytes
from ems.tensors import imported_torch

_WORDS = {8: "int64", 4: "int32", 2: "int16", 1: "uint8"}  # a thread of the device copies one


class DeviceTensors(Checked):
    """A batch is packed on the device, then crosses the bus in one copy.

    Blocks with the same pattern of runs are packed by one call for each tensor. Works on any torch device; the host
    side of the copy is pinned for CUDA.
    """

    batch_bytes = 32 << 20

    def __init__(self, tensors: Sequence[Any], widths: list[int], group_of: list[int]) -> None:
        """tensors: of torch, [blocks, tokens a block, ...]; widths: bytes of a token; group_of: their layer groups."""
        self._torch: Any = imported_torch()
        described = list(zip(tensors, widths, strict=True))
        self._word = next(size for size in _WORDS if all(_is_aligned(*each, size) for each in described))
        self._dtype = getattr(self._torch, _WORDS[self._word])
        rows, words = map(self._rows_of, tensors), [width // self._word for width in widths]
        self._rows = list(zip(rows, words, group_of, strict=True))
        self._device = tensors[0].device

    def _rows_of(self, tensor: Any) -> Any:
        """A view of the same memory as words [blocks, words of a block]; there may be gaps between blocks."""
        row = tensor[0].numel()
        flat = tensor.detach().as_strided((tensor.shape[0], row), (tensor.stride(0), 1))
        return flat.view(self._torch.uint8).view(self._dtype)

    def gather(self, blocks: Sequence[Block], targets: Sequence[Bytes]) -> None:
        try:
            self._synchronize()  # what the caller computes on its streams must be finished before it is read
            size = sum(len(target) for target in targets)
            packed = self._torch.empty(size, dtype=self._torch.uint8, device=self._device)
            for area, rows, numbers in self._parts(blocks, packed.view(self._dtype)):
                self._torch.index_select(rows, 0, numbers, out=area)
            host = self._host(size)
            host.copy_(packed)
        except RuntimeError as error:
            raise internal_error(f"device memory: {error}") from error
        data, position = host.numpy(), 0
        for target in targets:
            target[:] = data[position : position + len(target)]
            position += len(target)

    def scatter(self, blocks: Sequence[Block], sources: Sequence[Bytes]) -> None:
        try:
            host = self._host(sum(len(source) for source in sources))
            data, position = host.numpy(), 0
            for source in sources:
                data[position : position + len(source)] = source
                position += len(source)
            packed = host.to(self._device)
            for area, rows, numbers in self._parts(blocks, packed.view(self._dtype)):
                rows.index_copy_(0, numbers, area)
            self._synchronize()  # the caller may use the cache on any stream afterwards
        except RuntimeError as error:
            raise internal_error(f"device memory: {error}") from error

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            self._torch.accelerator.synchronize(self._device)

    def _parts(self, blocks: Sequence[Block], packed: Any) -> Iterator[tuple[Any, Any, Any]]:
        """Pairs of matching memory: words of `packed` [n, words] and words of rows; with the numbers of the n rows."""
        position = 0
        for runs, some in groupby(blocks, key=_one_run_each):
            alike = list(some)
            if runs is None:
                for block in alike:
                    yield from self._runs(block, packed, position)
                    position += self._size(block)
                continue
            size = self._size(alike[0])
            area, column = packed[position : position + size * len(alike)].view(len(alike), size), 0
            numbers = [self._numbers([block[group][0][0] for block in alike]) for group in range(len(runs))]
            for rows, width, group in self._rows:
                start, count = runs[group]
                end = column + count * width
                yield area[:, column:end], rows[:, start * width : (start + count) * width], numbers[group]
                column = end
            position += size * len(alike)

    def _runs(self, block: Block, packed: Any, position: int) -> Iterator[tuple[Any, Any, Any]]:
        """The same for a block whose tokens are not contiguous."""
        for rows, width, group in self._rows:
            for number, start, count in block[group]:
                size, first = count * width, start * width
                if number != SKIPPED:
                    area = packed[position : position + size].view(1, size)
                    yield area, rows[:, first : first + size], self._numbers([number])
                position += size

    def _size(self, block: Block) -> int:
        """Size of a block in words."""
        return sum(width * sum(count for _number, _start, count in block[group]) for _rows, width, group in self._rows)

    def _numbers(self, numbers: list[int]) -> Any:
        return self._torch.tensor(numbers, dtype=self._torch.int64).to(self._device)

    def _host(self, size: int) -> Any:
        return self._torch.empty(size, dtype=self._torch.uint8, pin_memory=self._device.type == "cuda")


def _is_aligned(tensor: Any, width: int, size: int) -> bool:
    """Whether tokens and blocks of the tensor begin and end at multiples of that word size."""
    stride_bytes = tensor.stride(0) * tensor.element_size()
    return width % size == 0 and stride_bytes % size == 0 and tensor.data_ptr() % size == 0


def _one_run_each(block: Block) -> tuple[tuple[int, int], ...] | None:
    """Where a block's tokens begin in each layer group, and their number; None where they are not contiguous."""
    if any(len(runs) != 1 or runs[0][0] == SKIPPED for runs in block):
        return None
    return tuple((start, count) for ((_number, start, count),) in block)
