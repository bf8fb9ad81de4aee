"""Tensors on an accelerator. They are torch's, which the caller has imported."""

from collections.abc import Sequence
from typing import Any

from ems.checked import Checked
from ems.common.exception import internal_error
from ems.runs import SKIPPED, Block, Bytes
from ems.tensors import imported_torch


class DeviceTensors(Checked):
    """A batch is packed on the device, then crosses the bus in one copy.

    Works on any device of torch; the host side of the copy is pinned where the device is CUDA.
    """

    batch_bytes = 32 << 20

    def __init__(self, tensors: Sequence[Any], widths: list[int], group_of: list[int]) -> None:
        """tensors: of torch, [blocks, tokens a block, ...]; widths: bytes of a token; group_of: their layer groups."""
        self._torch: Any = imported_torch()
        self._rows = list(zip(map(self._rows_of, tensors), widths, group_of, strict=True))
        self._device = tensors[0].device

    def _rows_of(self, tensor: Any) -> Any:
        """A view of the same memory as uint8 [blocks, bytes of a block]; the blocks may be apart."""
        row = tensor[0].numel()
        flat = tensor.detach().as_strided((tensor.shape[0], row), (tensor.stride(0), 1))
        return flat.view(self._torch.uint8)

    def gather(self, blocks: Sequence[Block], targets: Sequence[Bytes]) -> None:
        try:
            self._synchronize()  # what the caller computes on its streams must be there before it is read
            packed = self._torch.empty(
                sum(len(target) for target in targets), dtype=self._torch.uint8, device=self._device
            )
            for device_part, rows_part in self._parts(blocks, packed):
                device_part.copy_(rows_part)
            host = self._host(packed.numel())
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
            for device_part, rows_part in self._parts(blocks, packed):
                rows_part.copy_(device_part)
            self._synchronize()  # the caller may use the cache on any stream afterwards
        except RuntimeError as error:
            raise internal_error(f"device memory: {error}") from error

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            self._torch.accelerator.synchronize(self._device)

    def _parts(self, blocks: Sequence[Block], packed: Any) -> list[tuple[Any, Any]]:
        """Pairs of equal size: a range of `packed`, and the tokens of the cache it stands for."""
        parts, position = [], 0
        for block in blocks:
            for rows, width, group in self._rows:
                for number, start, count in block[group]:
                    size, first = count * width, start * width
                    if number != SKIPPED:
                        parts.append((packed[position : position + size], rows[number, first : first + size]))
                    position += size
        return parts

    def _host(self, size: int) -> Any:
        return self._torch.empty(size, dtype=self._torch.uint8, pin_memory=self._device.type == "cuda")
